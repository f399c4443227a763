// Puts the page together, and follows a run that is still training.
"use strict";

(function () {
  const { element } = Report;
  const KEYS = 12; // in which runs differ, as columns of their table
  const state = { run: null }; // the run whose details are shown; at first one that has clusters
  let sections = [];

  const columns = (table) => table.columns.map((label, index) => ({ label, left: index < table.left, value: (row) => sortable(row[index]), text: (row) => row[index] }));
  const sortable = (text) => { const value = parseFloat(String(text).replace(/,/g, "")); return Number.isNaN(value) ? text : value; };

  // What a command other than `report` ends with: sentences, tables, pictures.
  function findings() {
    const { data } = Report;
    if (!data.sentences.length && !data.tables.length && !data.pictures.length) return null;
    return Report.section("findings", "Findings",
      ...data.sentences.map((sentence) => element("p", {}, sentence)),
      ...data.tables.map((table) => Report.table(columns(table), table.rows, { caption: table.title || null, label: "Findings" })),
      ...data.pictures.map((picture) => element("img", { class: "picture", src: picture.source, alt: picture.words })));
  }

  function table() {
    const { data } = Report;
    if (data.runs.length < 2) return null;
    const best = (run, score) => { const known = (run.rounds[score.key] || []).filter((value) => value !== null); return known.length ? known.reduce((a, b) => ((score.higher ? a > b : a < b) ? a : b)) : null; };
    const final = (run, key) => Report.last(run.rounds[key]);
    const scores = data.scores.filter((score) => Report.curves.state.shown.has(score.key));
    const all = Report.differences(data.runs), keys = all.slice(0, KEYS), order = Report.curves.colours();
    const isText = (key) => data.runs.some((run) => typeof sortable(run.experiment[key] ?? "0") === "string");
    const mark = (run) => { const one = element("i", { class: "swatch", "aria-hidden": "true" }); one.style.background = Report.colour(order.get(run.group)); return one; };
    const only = element("button", { type: "button", hidden: true, onclick: () => Report.curves.only(left) }, "Show only these runs in the curves");
    let left = null; // runs that the filter leaves
    const filtered = (runs) => { left = runs; only.hidden = !runs || !runs.length; };
    const choose = (run) => { state.run = data.runs.indexOf(run); build(); document.getElementById("run").scrollIntoView(); };
    const found = [
      { label: "run", left: true, value: (run) => run.name, text: (run) => run.name, cell: (run) => element("span", { class: "named" }, mark(run), run.folder ? element("button", { type: "button", class: "link", title: run.name, onclick: () => choose(run) }, run.name) : run.name) },
      ...(data.runs[0].folder ? [{ label: "state", left: true, value: (run) => run.state, text: (run) => run.state }] : []),
      { label: "rounds", value: (run) => final(run, "round") },
      ...scores.map((score) => ({ label: score.label, value: (run) => final(run, score.key), text: (run) => Report.score(final(run, score.key), score) })),
      ...scores.filter((score) => score.higher).map((score) => ({ label: `best ${score.label}`, value: (run) => best(run, score), text: (run) => Report.score(best(run, score), score) })),
      { label: "updates", value: (run) => final(run, "device_updates") },
      { label: "bytes", value: (run) => (final(run, "bytes_up") || 0) + (final(run, "bytes_down") || 0), text: (run) => Report.bytes((final(run, "bytes_up") || 0) + (final(run, "bytes_down") || 0)) },
      ...keys.map((key) => ({ label: key, left: isText(key), value: (run) => sortable(run.experiment[key] ?? ""), text: (run) => run.experiment[key] ?? "–" })),
    ];
    const more = all.length > keys.length ? ` (${keys.length} of ${all.length})` : "";
    return Report.section("runs", "Runs", element("p", { class: "quiet" }, `The last values of each run, and the keys in which the experiments differ${more}. Click a column to sort.${data.runs[0].folder ? " Click a run to see its details below." : ""}`),
      Report.table(found, data.runs, { label: "Runs", filter: "Filter runs", most: 25, filtered, chosen: (run) => data.runs.indexOf(run) === state.run }), only);
  }

  function chooser() {
    const { data } = Report;
    if (data.runs.length < 2) return null;
    const select = element("select", { id: "run", "aria-label": "Run whose details are shown", onchange: () => { state.run = +select.value; build(); document.getElementById("run").focus(); } },
      data.runs.map((run, index) => element("option", { value: index, selected: index === state.run }, run.name)));
    return Report.section("details", "One run", element("div", { class: "controls" }, element("label", {}, "details of", select)));
  }

  function build() {
    const { data } = Report;
    state.run ??= Math.max(0, data.runs.findIndex((one) => one.folder && one.fleet.clusters && one.fleet.clusters.length > 1));
    const run = data.runs[state.run], open = [...document.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
    sections.forEach((section) => section.stop && section.stop());
    Report.redraw.length = 0;
    document.title = `${data.title} · fedcluster`;
    document.getElementById("title").textContent = data.title;
    document.getElementById("about").replaceChildren(...about());
    document.getElementById("made").textContent = `Written by fedcluster ${data.version}, ${data.made}. Charts: uPlot (MIT).`;
    sections = [findings(), Report.curves.build(), table(), ...(run && run.folder ? [chooser(), Report.wheel.build(run), Report.fleet(run), Report.devices(run), Report.events(run), Report.privacy(run), Report.experiment(run)] : [])].filter(Boolean);
    const tiles = data.runs.length === 1 && run.folder ? Report.summary(run) : null, reason = data.runs.length > 1 && run.folder && run.reason;
    document.getElementById("parts").replaceChildren(...[tiles, ...sections].filter(Boolean));
    document.getElementById("sections").replaceChildren(...sections.filter((one) => one.id !== "details").map((one) => element("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
    if (document.getElementById("details")) { const place = document.querySelector("#details"); place.append(...[reason ? element("p", { class: "reason" }, reason) : null, Report.summary(run)].filter(Boolean)); }
    for (const summary of document.querySelectorAll("details > summary")) if (open.includes(summary.textContent)) summary.parentElement.open = true;
    Report.drawHeats = () => document.querySelectorAll(".heat").forEach((heat) => heat.draw());
    Report.redraw.push(() => { Report.drawHeats(); sections.forEach((section) => section.draw && section.draw()); });
    sections.forEach((section) => section.start && section.start());
    Report.drawHeats();
  }

  function about() {
    const { data } = Report, { runs } = data;
    if (!runs.length || !runs[0].folder) return [data.live ? "Waiting for the first round." : ""];
    if (runs.length === 1) return [element("span", { class: `state ${runs[0].state}` }, runs[0].state), ` ${runs[0].folder}`, runs[0].reason ? element("span", { class: "reason" }, runs[0].reason) : ""];
    const states = [...new Set(runs.map((run) => run.state))].map((name) => `${runs.filter((run) => run.state === name).length} ${name}`);
    return [`${runs.length} runs: ${states.join(", ")}.${data.every > 1 ? ` The page has every ${data.every}th round.` : ""}`];
  }

  // A page that is served gets its data again whenever the run has written something.
  function follow() {
    const sign = document.getElementById("live"), events = new EventSource("events");
    const say = (text, lost) => { sign.hidden = false; sign.classList.toggle("lost", lost); sign.textContent = text; };
    const typing = () => document.activeElement && document.activeElement.matches("input[type=search], select");
    let held = false, stale = false; // a button of the pointer is down; the page is older than its data
    const busy = () => held || typing() || document.hidden;
    const rebuild = () => {
      const place = scrollY, focus = focused();
      stale = false;
      build();
      focus();
      scrollTo({ top: place, behavior: "instant" });
    };
    const update = (event) => {
      Report.data = Report.decode(JSON.parse(event.data));
      const run = Report.data.runs[0];
      say(run ? `live, round ${Report.last(run.rounds.round) || 0}` : "waiting for the run", false);
      stale = true;
      if (!busy() || event.type === "end") rebuild();
    };
    const catchUp = () => setTimeout(() => stale && !busy() && rebuild());
    addEventListener("pointerdown", () => { held = true; });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { held = false; catchUp(); });
    for (const name of ["focusout", "visibilitychange"]) document.addEventListener(name, catchUp);
    events.addEventListener("change", update);
    events.addEventListener("end", (event) => {
      events.close();
      update(event);
      say(Report.data.runs.length ? Report.data.runs[0].state : "ended", false);
    });
    events.addEventListener("error", () => say("reconnecting", true));
  }

  // What has the focus has it again after the page was built anew: the element of the same section, kind and name.
  function focused() {
    const name = (one) => [one.closest("section")?.id, one.tagName, one.getAttribute("aria-label")?.split(".")[0] || one.labels?.[0]?.textContent || one.textContent].join();
    const all = () => [...document.querySelectorAll("main :is(button, input, select, summary, [tabindex])")], active = document.activeElement;
    const wanted = active.closest("main > *") && name(active), like = all().filter((one) => name(one) === wanted).indexOf(active);
    return () => { const one = wanted && all().filter((other) => name(other) === wanted)[like]; if (one) one.focus({ preventScroll: true }); };
  }

  Report.data = Report.decode(JSON.parse(document.getElementById("data").textContent));
  Report.theme();
  build();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; Report.drawHeats(); sections.forEach((section) => section.draw && section.draw()); } });
  if (Report.data.live) follow();
})();
