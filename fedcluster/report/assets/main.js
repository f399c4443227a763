// Puts the page together, and follows a run that is still training.
"use strict";

(function () {
  const { element } = Report;
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
    const keys = Report.differences(data.runs).slice(0, 12);
    const choose = (run) => { state.run = data.runs.indexOf(run); build(); document.getElementById("run").scrollIntoView(); };
    const found = [
      { label: "run", left: true, value: (run) => run.name, text: (run) => run.name, cell: (run) => (run.folder ? element("button", { type: "button", class: "link", onclick: () => choose(run) }, run.name) : run.name) },
      ...(data.runs[0].folder ? [{ label: "state", left: true, value: (run) => run.state, text: (run) => run.state }] : []),
      { label: "rounds", value: (run) => final(run, "round") },
      ...scores.map((score) => ({ label: score.label, value: (run) => final(run, score.key), text: (run) => Report.score(final(run, score.key), score) })),
      ...scores.filter((score) => score.higher).map((score) => ({ label: `best ${score.label}`, value: (run) => best(run, score), text: (run) => Report.score(best(run, score), score) })),
      { label: "updates", value: (run) => final(run, "device_updates") },
      { label: "bytes", value: (run) => (final(run, "bytes_up") || 0) + (final(run, "bytes_down") || 0), text: (run) => Report.bytes((final(run, "bytes_up") || 0) + (final(run, "bytes_down") || 0)) },
      ...keys.map((key) => ({ label: key, value: (run) => sortable(run.experiment[key] ?? ""), text: (run) => run.experiment[key] ?? "–" })),
    ];
    return Report.section("runs", "Runs", element("p", { class: "quiet" }, "The last values of each run, and the keys in which the experiments differ." + (data.runs[0].folder ? " Choose a run to see its details below." : "")),
      Report.table(found, data.runs, { label: "Runs", filter: "Filter runs", most: 25, chosen: (run) => data.runs.indexOf(run) === state.run }));
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
    document.getElementById("about").textContent = about();
    document.getElementById("made").textContent = `Written by fedcluster ${data.version}, ${data.made}. Charts: uPlot (MIT).`;
    sections = [findings(), Report.curves.build(), table(), ...(run && run.folder ? [chooser(), Report.wheel.build(run), Report.fleet(run), Report.devices(run), Report.events(run), Report.privacy(run), Report.experiment(run)] : [])].filter(Boolean);
    const tiles = data.runs.length === 1 && run.folder ? Report.summary(run) : null;
    document.getElementById("parts").replaceChildren(...[tiles, ...sections].filter(Boolean));
    document.getElementById("sections").replaceChildren(...sections.filter((one) => one.id !== "details").map((one) => element("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
    if (document.getElementById("details")) { const place = document.querySelector("#details"); place.append(Report.summary(run)); }
    for (const summary of document.querySelectorAll("details > summary")) if (open.includes(summary.textContent)) summary.parentElement.open = true;
    Report.drawHeats = () => document.querySelectorAll(".heat").forEach((heat) => heat.draw());
    Report.redraw.push(() => { Report.drawHeats(); sections.forEach((section) => section.draw && section.draw()); });
    sections.forEach((section) => section.start && section.start());
    Report.drawHeats();
  }

  function about() {
    const { data } = Report, { runs } = data;
    if (runs.length === 1 && runs[0].folder) return `${runs[0].folder} · ${runs[0].state}`;
    if (!runs.length || !runs[0].folder) return data.live ? "Waiting for the first round." : "";
    const finished = runs.filter((run) => run.state === "finished").length, thinned = data.every > 1 ? ` Every ${data.every}th round is in the page.` : "";
    return `${runs.length} runs, ${finished} finished.${thinned}`;
  }

  // A page that is served gets its data again whenever the run has written something.
  function follow() {
    const sign = document.getElementById("live"), events = new EventSource("events");
    const say = (text, lost) => { sign.hidden = false; sign.classList.toggle("lost", lost); sign.textContent = text; };
    const typing = () => document.activeElement && document.activeElement.matches("input[type=search], select");
    const update = (event) => {
      Report.data = Report.decode(JSON.parse(event.data));
      const run = Report.data.runs[0];
      say(run ? `live, round ${Report.last(run.rounds.round) || 0}` : "waiting for the run", false);
      if (typing() && event.type !== "end") return;
      const place = scrollY;
      build();
      scrollTo({ top: place, behavior: "instant" });
    };
    events.addEventListener("change", update);
    events.addEventListener("end", (event) => {
      events.close();
      update(event);
      say(Report.data.runs.length ? Report.data.runs[0].state : "ended", false);
    });
    events.addEventListener("error", () => say("reconnecting", true));
  }

  Report.data = Report.decode(JSON.parse(document.getElementById("data").textContent));
  Report.theme();
  build();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; Report.drawHeats(); sections.forEach((section) => section.draw && section.draw()); } });
  if (Report.data.live) follow();
})();
