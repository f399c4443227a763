// The cycle wheel: who took which turn in a round, how far each turn moved the model, and whether it went on in the
// direction of the turn before it or pulled the model back.
"use strict";

Report.wheel = (function () {
  const { element } = Report;
  const state = { round: null, playing: false }; // null: the last round
  const NAMED = 16; // turns, up to which every wedge is labelled in full

  // The rows of cycles.jsonl that the page has, by round. `before` is the turn before it that moved the model, unless
  // that is in a round which the page does not have.
  function byRound(cycles) {
    const rounds = new Map(), keys = Object.keys(cycles).filter((key) => Array.isArray(cycles[key]));
    let before = null;
    cycles.round.forEach((round, i) => {
      const row = Object.fromEntries(keys.map((key) => [key, cycles[key][i]]));
      row.before = before && round - before.round <= 1 ? before : null;
      if (!rounds.has(round)) rounds.set(round, []);
      rounds.get(round).push(row);
      if (row.moved) before = row;
    });
    return rounds;
  }

  const isBack = (row) => row.cosine !== null && row.cosine < -0.05;
  const isOn = (row) => row.cosine !== null && row.cosine > 0.05;

  function verdict(row) {
    if (row.failed) return "failed: the model stays";
    if (row.cosine === null) return row.moved ? "the first move" : "";
    const whom = row.before ? ` cluster ${row.before.cluster}` : " the turn before";
    if (isBack(row)) return `pulled back${whom}`;
    return isOn(row) ? `went on from${whom}` : "sideways";
  }

  function summary(rows) {
    const moved = rows.filter((row) => row.moved), back = rows.filter(isBack), failed = rows.filter((row) => row.failed).length;
    if (!moved.length) return failed ? "No turn of this round moved the model." : "";
    const far = moved.reduce((a, b) => (b.moved > a.moved ? b : a)), said = [`Cluster ${far.cluster} moved the model furthest, by ${Report.number(far.moved)}.`];
    if (back.length) {
      const most = back.reduce((a, b) => (b.cosine < a.cosine ? b : a));
      said.push(`${back.length} of ${rows.length} turns pulled the model back, most of all cluster ${most.cluster}${most.before ? ` after cluster ${most.before.cluster}` : ""} (cosine ${Report.signed(most.cosine)}).`);
    } else said.push("No turn pulled the model back.");
    if (failed) said.push(`${failed} failed and left the model as it was.`);
    return said.join(" ");
  }

  function build(run) {
    const rounds = byRound(run.cycles), order = [...rounds.keys()];
    if (!order.length) return null;
    const known = run.cycles.moved.some((value) => value !== null);
    const canvas = element("canvas", { role: "img" }), tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const frame = element("div", { class: "wheel" }, canvas, tip), list = element("div"), said = element("p", { class: "said" });
    const slider = element("input", { type: "range", min: 0, max: order.length - 1, step: 1, "aria-label": "Round", oninput: () => { stop(); show(+slider.value); } });
    const place = element("output", {}), play = element("button", { type: "button", disabled: order.length < 2, onclick: () => (state.playing ? stop() : start()) });
    let timer = null, at = 0;

    function start() {
      state.playing = true;
      play.textContent = "❚❚ Stop";
      if (at === order.length - 1) show(0);
      timer = setInterval(() => (at === order.length - 1 ? stop() : show(at + 1)), Math.max(120, Math.min(900, 12000 / order.length)));
    }
    function stop() {
      clearInterval(timer);
      state.playing = false;
      play.textContent = "▶ Play";
    }

    function show(index) {
      at = index;
      state.round = index === order.length - 1 ? null : order[index];
      slider.value = index;
      slider.setAttribute("aria-valuetext", `round ${order[index]}`);
      place.textContent = `round ${order[index]} of ${order.at(-1)}`;
      said.textContent = known ? summary(rounds.get(order[index])) : "";
      draw();
      table();
    }

    function draw() {
      const rows = rounds.get(order[at]), furthest = Math.max(...rows.map((row) => row.moved || 0), 1e-12);
      const side = Math.min(400, frame.clientWidth || 320), pen = Report.pen(canvas, side, side);
      const full = rows.length <= NAMED && side > 330, c = side / 2, inner = side * 0.14, outer = c - (full ? 64 : 28), each = (2 * Math.PI) / rows.length, top = -Math.PI / 2;
      pen.strokeStyle = Report.variable("--line");
      for (const share of [0.5, 1]) ring(pen, c, inner + share * (outer - inner), 0, 2 * Math.PI);
      rows.forEach((row, i) => {
        const from = top + i * each, to = from + each, gap = rows.length > 1 ? Math.min(0.03, each * 0.1) : 0;
        const length = row.failed ? 0.04 : known ? Math.max(0.02, (row.moved || 0) / furthest) : 1, radius = inner + length * (outer - inner);
        pen.fillStyle = row.failed ? Report.variable("--line") : !known ? Report.colour(row.cluster) : row.cosine === null ? Report.variable("--quiet") : Report.turn(row.cosine);
        pen.beginPath();
        pen.arc(c, c, radius, from + gap, to - gap);
        pen.arc(c, c, inner, to - gap, from + gap, true);
        pen.fill();
      });
      labels(pen, rows, c, outer + (full ? 8 : 14), each, full);
      pen.fillStyle = Report.variable("--quiet");
      pen.fillText("round", c, c - 10);
      pen.fillStyle = Report.variable("--text");
      pen.font = "600 17px system-ui, sans-serif";
      pen.fillText(String(order[at]), c, c + 8);
      if (rows.length > 1) arrow(pen, c, inner - 7);
      canvas.setAttribute("aria-label", `Cycle wheel of round ${order[at]}: ${rows.length} clusters took their turns clockwise from the top. ${known ? summary(rows) : ""} The table has the numbers.`);
    }

    function labels(pen, rows, c, radius, each, full) {
      const every = Math.ceil(rows.length / 40);
      pen.fillStyle = Report.variable("--text");
      pen.font = "11.5px system-ui, sans-serif";
      pen.textBaseline = "middle";
      rows.forEach((row, i) => {
        if (i % every) return;
        const middle = (i + 0.5) * each - Math.PI / 2, x = Math.cos(middle);
        pen.textAlign = !full || Math.abs(x) < 0.2 ? "center" : x > 0 ? "left" : "right";
        pen.fillText(full ? `cluster ${row.cluster}` : String(row.cluster), c + radius * x, c + radius * Math.sin(middle));
      });
      pen.textAlign = "center";
    }

    function ring(pen, c, radius, from, to) {
      pen.beginPath();
      pen.arc(c, c, radius, from, to);
      pen.stroke();
    }

    // In which direction the turns go, from the first one's edge.
    function arrow(pen, c, radius) {
      const from = -Math.PI / 2 + 0.1, to = Math.PI * 0.75, x = c + radius * Math.cos(to), y = c + radius * Math.sin(to);
      pen.strokeStyle = pen.fillStyle = Report.variable("--quiet");
      pen.lineWidth = 1.5;
      ring(pen, c, radius, from, to);
      pen.translate(x, y);
      pen.rotate(to + Math.PI / 2);
      pen.beginPath();
      pen.moveTo(7, 0);
      pen.lineTo(-2, 4.5);
      pen.lineTo(-2, -4.5);
      pen.fill();
    }

    Report.tips(canvas, tip, frame, (x, y, side) => {
      const rows = rounds.get(order[at]), far = Math.hypot(x - side / 2, y - side / 2) / side;
      if (far < 0.12 || far > 0.5) return null;
      const turn = ((Math.atan2(y - side / 2, x - side / 2) + 2.5 * Math.PI) % (2 * Math.PI)) / (2 * Math.PI), row = rows[Math.floor(turn * rows.length)];
      const moved = known && !row.failed ? `, moved the model by ${Report.number(row.moved)}` : "", said = verdict(row);
      return `Cluster ${row.cluster}, turn ${row.cycle + 1}: ${Report.count(row.cohort, "device")}${moved}${said ? `, ${said}` : ""}${row.cosine === null ? "" : ` (cosine ${Report.signed(row.cosine)})`}`;
    });

    function table() {
      const rows = rounds.get(order[at]), furthest = Math.max(...rows.map((row) => row.moved || 0), 1e-12), timed = rows.some((row) => row.simulated_seconds !== null);
      const columns = [
        { label: "turn", value: (row) => row.cycle + 1 },
        { label: "cluster", value: (row) => row.cluster },
        { label: "devices", value: (row) => row.cohort },
      ];
      if (known) {
        columns.push({ label: "moved the model by", value: (row) => row.moved, cell: (row) => Report.bar(row.moved / furthest, Report.number(row.moved)) },
          { label: "cosine with the turn before", left: true, value: (row) => row.cosine, text: verdict, cell: (row) => Report.lean(row.cosine, verdict(row)) });
      }
      for (const [name, title] of [["refused", "refused"], ["missing", "no answer"], ["dropped", "dropped out"], ["late", "late"]]) {
        if (run.cycles[name].some(Boolean)) columns.push({ label: title, value: (row) => row[name] });
      }
      if (timed) columns.push({ label: "from (UTC)", value: (row) => row.opened, text: (row) => Report.clock(row.opened) }, { label: "to", value: (row) => row.simulated_seconds, text: (row) => Report.clock(row.simulated_seconds) });
      list.replaceChildren(Report.table(columns, rows, { label: `Turns of round ${order[at]}`, key: "turns", most: 40 }));
    }

    const index = state.round === null ? order.length - 1 : Math.max(0, order.indexOf(state.round));
    const every = run.cycles.every > 1 ? element("p", { class: "quiet" }, `Of this run, the page has every ${run.cycles.every}th round.`) : null;
    const older = element("p", { class: "quiet" }, "This run was written before cycles noted how far they move the model: the wheel shows who took which turn.");
    const section = Report.section("cycles", "Cycles", known ? key() : older, every,
      element("div", { class: "controls" }, play, slider, place),
      element("div", { class: "turning" }, frame, element("div", {}, said, list)),
      ...(known ? Report.turns(rounds, order, show) : []));
    section.start = () => { show(index); if (state.playing) start(); else stop(); };
    section.stop = () => clearInterval(timer);
    section.draw = draw;
    return section;
  }

  // What the parts of the wheel mean.
  function key() {
    const bar = element("i", { "aria-hidden": "true", class: "turns" });
    return element("div", { class: "key" },
      element("span", { class: "scale" }, "pulls the model back", bar, "goes on in the direction of the turn before"),
      element("span", {}, "Turns go clockwise. The longer a wedge, the further its cluster moved the model in this round."));
  }

  return { build, state, verdict, isBack };
})();
