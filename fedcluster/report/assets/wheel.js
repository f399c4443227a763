// The cycle wheel: who took which turn in a round, how far each turn moved the model, and whether it moved on or back.
"use strict";

Report.wheel = (function () {
  const { element } = Report;
  const state = { round: null }; // null: the last

  const percent = (share) => `${Math.round(100 * share)} %`;
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  // The rows of cycles.jsonl that the page has, by round.
  function byRound(cycles) {
    const rounds = new Map();
    cycles.round.forEach((round, i) => {
      const row = Object.fromEntries(Object.entries(cycles).filter(([, column]) => Array.isArray(column)).map(([key, column]) => [key, column[i]]));
      rounds.set(round, [...(rounds.get(round) || []), row]);
    });
    return rounds;
  }

  function verdict(row) {
    if (row.failed) return "failed: the model stays";
    if (row.cosine === null) return row.moved ? "first move" : "";
    if (row.cosine < -0.05) return `took back (−${(-row.cosine).toFixed(2)})`;
    return row.cosine > 0.05 ? `moved on (+${row.cosine.toFixed(2)})` : "sideways";
  }

  function build(run) {
    const rounds = byRound(run.cycles), order = [...rounds.keys()];
    if (!order.length) return null;
    const known = run.cycles.moved.some((value) => value !== null);
    const canvas = element("canvas", { role: "img" }), tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const frame = element("div", { class: "wheel" }, canvas, tip), list = element("div");
    const slider = element("input", { type: "range", min: 0, max: order.length - 1, step: 1, "aria-label": "Round", oninput: () => show(+slider.value) });
    const said = element("output", {}), play = element("button", { type: "button", onclick: toggle }, "▶ Play");
    let timer = null, place = 0;

    function toggle() {
      if (timer) return stop();
      play.textContent = "❚❚ Stop";
      if (place === order.length - 1) show(0);
      timer = setInterval(() => (place === order.length - 1 ? stop() : show(place + 1)), Math.max(120, Math.min(900, 12000 / order.length)));
      return null;
    }
    function stop() { clearInterval(timer); timer = null; play.textContent = "▶ Play"; }

    function show(index) {
      place = index;
      state.round = index === order.length - 1 ? null : order[index];
      slider.value = index;
      slider.setAttribute("aria-valuetext", `round ${order[index]}`);
      said.textContent = `round ${order[index]} of ${order.at(-1)}`;
      draw();
      table();
    }

    function draw() {
      const rows = rounds.get(order[place]), furthest = Math.max(...rows.map((row) => row.moved || 0), 1e-12), side = Math.min(400, frame.clientWidth || 320), scale = window.devicePixelRatio || 1;
      Object.assign(canvas.style, { width: `${side}px`, height: `${side}px` });
      Object.assign(canvas, { width: side * scale, height: side * scale });
      const pen = canvas.getContext("2d"), c = side / 2, inner = side * 0.13, outer = side * 0.41, ring = side * 0.45;
      pen.scale(scale, scale);
      pen.font = "11.5px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.strokeStyle = Report.variable("--line");
      for (const share of [0.5, 1]) arc(pen, c, inner + share * (outer - inner), 0, 2 * Math.PI, "stroke");
      const each = (2 * Math.PI) / rows.length, every = Math.ceil(rows.length / 40);
      rows.forEach((row, i) => {
        const from = i * each - Math.PI / 2, to = from + each, gap = rows.length > 1 ? Math.min(0.03, each * 0.1) : 0;
        const length = known ? Math.max(0.015, (row.moved || 0) / furthest) : 1, radius = inner + length * (outer - inner);
        pen.fillStyle = row.failed ? Report.variable("--warn") : row.cosine === null ? (known ? Report.variable("--quiet") : Report.colour(row.cluster)) : Report.turn(row.cosine);
        pen.beginPath();
        pen.arc(c, c, radius, from + gap, to - gap);
        pen.arc(c, c, inner, to - gap, from + gap, true);
        pen.fill();
        if (i % every) return;
        pen.fillStyle = Report.variable("--text");
        const middle = (from + to) / 2;
        pen.fillText(String(row.cluster), c + ring * Math.cos(middle), c + ring * Math.sin(middle));
      });
      pen.fillStyle = Report.variable("--quiet");
      pen.fillText("round", c, c - 9);
      pen.fillStyle = Report.variable("--text");
      pen.font = "600 17px system-ui, sans-serif";
      pen.fillText(String(order[place]), c, c + 8);
      const back = rows.filter((row) => row.cosine !== null && row.cosine < -0.05).length;
      canvas.setAttribute("aria-label", `Cycle wheel of round ${order[place]}: ${rows.length} clusters took their turns clockwise from the top, ${back} took back part of what the one before did. The table has the numbers.`);
    }

    function arc(pen, c, radius, from, to, how) {
      pen.beginPath();
      pen.arc(c, c, radius, from, to);
      pen[how]();
    }

    canvas.addEventListener("pointermove", (event) => {
      const rows = rounds.get(order[place]), box = canvas.getBoundingClientRect();
      const x = event.clientX - box.left - box.width / 2, y = event.clientY - box.top - box.height / 2, far = Math.hypot(x, y) / box.width;
      tip.hidden = far < 0.12 || far > 0.5;
      if (tip.hidden) return;
      const turn = ((Math.atan2(y, x) + Math.PI / 2 + 2 * Math.PI) % (2 * Math.PI)) / (2 * Math.PI), row = rows[Math.floor(turn * rows.length)];
      tip.replaceChildren(element("b", {}, `Cluster ${row.cluster}`), `, turn ${row.cycle + 1}: ${row.cohort} devices`,
        known ? `, moved the model by ${Report.number(row.moved)}` : "", verdict(row) ? `, ${verdict(row)}` : "");
      tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 14, frame.clientWidth - 230))}px`;
      tip.style.top = `${event.clientY - box.top + 16}px`;
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

    function table() {
      const rows = rounds.get(order[place]), furthest = Math.max(...rows.map((row) => row.moved || 0), 1e-12), timed = rows.some((row) => row.simulated_seconds !== null);
      const columns = [
        { label: "turn", value: (row) => row.cycle + 1 },
        { label: "cluster", value: (row) => row.cluster },
        { label: "devices", value: (row) => row.cohort },
      ];
      if (known) columns.push({ label: "moved the model by", value: (row) => row.moved, cell: (row) => Report.bar(row.moved / furthest, Report.number(row.moved)) }, { label: "against the turn before", left: true, value: (row) => row.cosine, text: verdict });
      if (timed) columns.push({ label: "from", value: (row) => row.opened, text: (row) => Report.duration(row.opened) }, { label: "to", value: (row) => row.simulated_seconds, text: (row) => Report.duration(row.simulated_seconds) });
      for (const [name, title] of [["refused", "refused"], ["missing", "no answer"], ["dropped", "dropped out"], ["late", "late"]]) {
        if (run.cycles[name].some(Boolean)) columns.push({ label: title, value: (row) => row[name] });
      }
      list.replaceChildren(Report.table(columns, rows, { label: `Turns of round ${order[place]}`, most: 40 }));
    }

    const index = state.round === null ? order.length - 1 : Math.max(0, order.indexOf(state.round));
    const parts = known ? [grid(rounds, order, show), clusters(rounds)] : [element("p", { class: "quiet" }, "This run was written before cycles noted how far they move the model: the wheel shows who took which turn.")];
    const every = run.cycles.every > 1 ? element("p", { class: "quiet" }, `Of this run, every ${run.cycles.every}th round is in the page.`) : null;
    const explained = known ? "Clusters take their turns clockwise from the top. The longer a wedge, the further its cluster moved the model, compared with the others of the round. Blue goes on in the direction of the turn before, orange takes part of it back." : "";
    const section = Report.section("cycles", "Cycles", explained ? element("p", { class: "quiet" }, explained) : null, every,
      element("div", { class: "controls" }, play, slider, said),
      element("div", { class: "turning" }, frame, list), ...parts.flat());
    section.start = () => { show(index); section.querySelectorAll(".heat").forEach((heat) => heat.draw()); };
    section.stop = stop;
    section.draw = () => { draw(); section.querySelectorAll(".heat").forEach((heat) => heat.draw()); };
    return section;
  }

  // Rounds from left to right, the turns of a round from top to bottom.
  function grid(rounds, order, show) {
    const turns = Math.max(...[...rounds.values()].map((rows) => rows.length));
    const at = (turn, j) => rounds.get(order[j])[turn];
    const values = Array.from({ length: turns }, (_, turn) => order.map((_, j) => (at(turn, j) ? at(turn, j).cosine : null)));
    const title = (turn, j) => { const row = at(turn, j); return row ? `round ${order[j]}, turn ${turn + 1}: cluster ${row.cluster} moved the model by ${Report.number(row.moved)}, ${verdict(row)}` : ""; };
    const bar = element("i", { "aria-hidden": "true" });
    bar.style.background = "linear-gradient(90deg, var(--warn), var(--middle), var(--accent))";
    return [
      element("h3", {}, "On or back, over all rounds"),
      element("span", { class: "scale" }, "takes back", bar, "moves on"),
      Report.heat(values, { rows: values.map((_, i) => i + 1), columns: order, axis: { x: "round", y: "turn" }, colour: Report.turn, title, height: 200, choose: (_, j) => show(j),
        words: `Whether each turn moved the model on or back, for ${order.length} rounds of ${turns} turns. The table below has the mean of each cluster.` }),
    ];
  }

  function clusters(rounds) {
    const groups = new Map();
    for (const row of [...rounds.values()].flat()) groups.set(row.cluster, [...(groups.get(row.cluster) || []), row]);
    const rows = [...groups].sort((a, b) => a[0] - b[0]).map(([cluster, all]) => {
      const cosines = all.map((row) => row.cosine).filter((value) => value !== null);
      return { cluster, turns: all.length, moved: mean(all.map((row) => row.moved || 0)), cosine: mean(cosines), back: cosines.length ? cosines.filter((value) => value < -0.05).length / cosines.length : 0, refused: all.reduce((sum, row) => sum + (row.refused || 0), 0) };
    });
    const most = Math.max(...rows.map((row) => row.moved));
    return Report.table([
      { label: "cluster", value: (row) => row.cluster },
      { label: "turns", value: (row) => row.turns },
      { label: "mean movement", value: (row) => row.moved, cell: (row) => Report.bar(row.moved / most, Report.number(row.moved)) },
      { label: "mean cosine", value: (row) => row.cosine, text: (row) => (row.cosine === null ? "–" : row.cosine.toFixed(2).replace("-", "−")) },
      { label: "turns that took back", value: (row) => row.back, cell: (row) => Report.bar(row.back, percent(row.back)) },
      { label: "refused", value: (row) => row.refused },
    ], rows, { caption: "How each cluster moved the model", most: 30 });
  }

  return { build, state };
})();
