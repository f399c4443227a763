// The curves: a chart for each score, over an axis that all have in common. uPlot draws them.
"use strict";

Report.curves = (function () {
  const { element } = Report;
  const POINTS = 600, FOCUS = 30, LISTED = 8, RAW = 6; // of a resampled curve; series that fade; values in a tooltip; curves that are also shown unsmoothed
  const UNITS = { bytes: ["gigabytes", ["megabytes", 1e3], ["kilobytes", 1e6]], hours: ["hours", ["minutes", 60], ["seconds", 3600]], time: ["hours", ["minutes", 60], ["seconds", 3600]] };
  const state = { x: "rounds", log: true, smooth: 0, bands: true, hidden: new Set(), shown: null };
  let charts = [];

  const key = (run) => (state.bands ? run.group : run.name);
  const label = (group) => (group.startsWith("experiment ") ? Report.data.runs.find((run) => run.group === group).name : group);
  const seeded = () => new Set(Report.data.runs.map((run) => run.group)).size < Report.data.runs.length;

  // The colour of a run is that of its group.
  function colours() {
    const groups = [...new Set(Report.data.runs.map((run) => run.group))], order = new Map();
    let next = 0;
    for (const group of groups) {
      const name = label(group);
      while (Object.values(Report.fixed).includes(next) && next < 8 && groups.some((one) => label(one) in Report.fixed)) next++;
      order.set(group, name in Report.fixed ? Report.fixed[name] : next++);
    }
    return order;
  }

  // The curves of a score: x and y without gaps, smoothed; where seeds are joined, mean, low and high.
  function lines(score) {
    const runs = Report.data.runs.filter((run) => !state.hidden.has(key(run)) && run.rounds[score.key]);
    const each = runs.map((run) => ({ run, ...points(run, score) })).filter((one) => one.x.length && one.x.at(-1) > 0);
    if (!each.length) return { x: [], curves: [] };
    const x = grid(each.map((one) => one.x)), order = colours(), raw = state.smooth > 0 && each.length <= RAW;
    for (const one of each) one.at = onto(x, one.x, one.y);
    const groups = new Map();
    for (const one of each) groups.set(key(one.run), [...(groups.get(key(one.run)) || []), one]);
    const curves = [...groups].map(([name, members]) => {
      const columns = members.map((one) => one.at), shown = state.bands ? label(name) : name;
      const fold = (f) => x.map((_, i) => (columns.every((column) => column[i] !== null) ? f(columns.map((column) => column[i])) : null));
      const y = columns.length === 1 ? columns[0] : fold((values) => values.reduce((a, b) => a + b) / values.length);
      const band = columns.length > 1 ? { low: fold((v) => Math.min(...v)), high: fold((v) => Math.max(...v)) } : null;
      return { name: shown, index: order.get(members[0].run.group), y, band, raw: raw && columns.length === 1 ? onto(x, members[0].x, members[0].raw) : null };
    });
    return { x, curves };
  }

  // The axis: its label, in a unit in which the longest run is not a small fraction, and what that multiplies x by.
  function along() {
    const axis = Report.data.axes.find((one) => one.key === state.x), label = axis ? axis.label : state.x, known = UNITS[state.x];
    if (!known) return { label, times: 1 };
    const most = Math.max(...Report.data.runs.map((run) => Report.last(run.axes[state.x]) || 0));
    const [name, times] = most >= 0.5 ? [known[0], 1] : known.slice(1).find(([, by]) => most * by >= 0.5) || known.at(-1);
    return { label: label.replace(known[0], name), times };
  }

  function points(run, score) {
    const all = run.axes[state.x] || [], column = run.rounds[score.key], times = along().times, x = [], y = [], raw = [];
    let mean = 0, weight = 0;
    column.forEach((value, i) => {
      const at = all[i] === null || all[i] === undefined ? null : all[i] * times, shown = value * (score.percent ? 100 : 1);
      if (value === null || at === null || (i && x.length && at < x.at(-1))) return;
      mean = state.smooth * mean + (1 - state.smooth) * shown;
      weight = state.smooth * weight + 1 - state.smooth;
      if (x.length && at === x.at(-1)) { x.pop(); y.pop(); raw.pop(); }
      x.push(at);
      y.push(mean / weight);
      raw.push(shown);
    });
    return { x, y, raw };
  }

  // The x that all curves share: their own where they are the same, else so many between the ends.
  function grid(columns) {
    const longest = columns.reduce((a, b) => (b.length > a.length ? b : a));
    if (columns.every((column) => column.every((value, i) => value === longest[i]))) return longest;
    const start = Math.min(...columns.map((column) => column[0])), end = Math.max(...columns.map((column) => column.at(-1)));
    return Array.from({ length: POINTS }, (_, i) => start + ((end - start) * i) / (POINTS - 1));
  }

  // Linear between its points, null outside.
  function onto(there, x, y) {
    let i = 0;
    return there.map((at) => {
      if (at < x[0] || at > x.at(-1) * (1 + 1e-12)) return null;
      while (i < x.length - 2 && x[i + 1] < at) i++;
      if (x.length === 1 || at === x[i]) return y[i];
      const share = Math.min(1, (at - x[i]) / (x[i + 1] - x[i]));
      return y[i] + share * (y[i + 1] - y[i]);
    });
  }

  function make(score, holder, zoom) {
    const { x, curves } = lines(score), loss = score.label.includes("loss") || score.key === "epsilon";
    const positive = curves.every((one) => one.y.every((value) => value === null || value > 0));
    const log = state.log && loss && positive && score.key !== "epsilon";
    if (!curves.length) return none(score, holder);
    const data = [x], series = [{}], bands = [], axis = along();
    for (const one of curves) {
      const stroke = Report.colour(one.index), dash = [[], [6, 4], [2, 3]][Math.floor(one.index / 8) % 3];
      data.push(one.y);
      series.push({ label: one.name, stroke, width: curves.length > FOCUS ? 1 : 1.8, dash, points: { show: x.length < 3 }, spanGaps: true });
      one.columns = 1;
      if (one.raw) {
        data.push(one.raw);
        series.push({ label: "", stroke: `${stroke}55`, width: 1, points: { show: false }, spanGaps: true });
        one.columns = 2;
      }
      if (!one.band) continue;
      one.columns = 3;
      const at = data.length;
      data.push(one.band.high, one.band.low);
      series.push(...[0, 1].map(() => ({ label: "", stroke: "transparent", width: 0, points: { show: false }, spanGaps: true })));
      bands.push({ series: [at, at + 1], fill: `${stroke}33` });
    }
    const ink = { stroke: Report.variable("--quiet"), grid: { stroke: Report.variable("--faint"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const whole = ["rounds", "aggregations", "updates", "gradients"].includes(state.x);
    const incrs = [1, 2, 5].flatMap((n) => Array.from({ length: 13 }, (_, k) => n * 10 ** k)).sort((a, b) => a - b);
    const few = curves.length <= FOCUS;
    const plot = new uPlot({
      width: Math.max(200, holder.clientWidth), height: 270, series, bands,
      legend: { show: false },
      scales: { x: { time: false }, y: log ? { distr: 3, range: padding } : { range: padded } },
      axes: [
        { ...ink, label: axis.label, labelSize: 20, labelFont: ink.font, size: 30, ...(whole ? { incrs } : {}), values: (_, splits) => splits.map(tick) },
        { ...ink, size: 56, values: (_, splits) => splits.map((value) => (value === null ? "" : tick(value))), ...(log ? { filter: (_, splits) => thin(splits), splits: (u, i, low, high) => decades(low, high) } : {}) },
      ],
      focus: { alpha: few ? 0.3 : 1 },
      cursor: { focus: { prox: few ? 30 : -1 }, drag: { x: true, y: false }, points: { show: few ? undefined : false }, sync: { key: "curves", scales: ["x", null] }, y: false },
      hooks: { setCursor: [(u) => hover(u, score, curves, holder)] },
    }, data, holder);
    if (zoom) plot.setScale("x", zoom);
    plot.root.setAttribute("aria-hidden", "true");
    holder.setAttribute("aria-label", words(score, axis, curves));
    return plot;
  }

  function none(score, holder) {
    const empty = Report.data.runs.every((run) => state.hidden.has(key(run)));
    holder.note.textContent = empty ? "All runs are hidden." : `No run has ${score.label} over this axis.`;
    holder.setAttribute("aria-label", holder.note.textContent);
    return null;
  }

  const tick = (value) => (Math.abs(value) >= 1e5 ? value.toExponential(0).replace("e+", "e") : String(+value.toPrecision(6)));
  const padding = (_, low, high) => { const room = Math.max(1.08, (high / low) ** 0.05); return [low / room, high * room]; };
  const padded = (_, low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.05; return [low - room, high + room]; };

  // Ticks of a logarithmic axis: 1, 2, 5 of every decade, more where there are few of them, powers of ten where many.
  function decades(low, high) {
    const span = Math.log10(high / low), multiples = span > 3 ? [1] : span > 0.8 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) found.push(...multiples.map((n) => +(n * 10 ** k).toPrecision(3)));
    return found.filter((value) => value >= low && value <= high);
  }
  const thin = (splits) => splits.map((value, i) => (splits.length > 9 && i % 2 ? null : value));

  function words(score, axis, curves) {
    const ends = curves.slice(0, 12).map((one) => `${one.name} ends at ${Report.number(Report.last(one.y))}`);
    const more = curves.length > 12 ? `, and ${curves.length - 12} more` : "";
    const unit = score.percent ? " in percent" : "";
    return `Chart of ${score.label}${unit} over ${axis.label}. ${ends.join(", ")}${more}. Arrow keys move along the curve, plus and minus zoom, 0 shows all.`;
  }

  // The values under the pointer, the nearest first.
  function hover(u, score, curves, holder) {
    const tip = holder.tip, { left, top, idx } = u.cursor;
    if (idx === null || idx === undefined || left < 0) { tip.hidden = true; return; }
    let at = 1;
    const rows = curves.map((one) => {
      const value = u.data[at][idx], row = { one, value, low: one.band ? one.band.low[idx] : null, high: one.band ? one.band.high[idx] : null };
      at += one.columns;
      return row;
    }).filter((row) => row.value !== null && row.value !== undefined);
    const away = (row) => Math.abs(u.valToPos(row.value, "y") - top);
    const near = rows.sort((a, b) => away(a) - away(b)).slice(0, LISTED).sort((a, b) => b.value - a.value);
    const figure = (value, digits) => (score.percent ? value.toFixed(digits - 2) : Report.number(+value.toPrecision(digits)));
    const said = near.map((row) => {
      const range = row.low === null ? null : element("span", { class: "quiet" }, ` (${figure(row.low, 3)} to ${figure(row.high, 3)})`);
      const name = element("span", {}, row.one.name);
      name.style.color = Report.colour(row.one.index);
      return element("div", {}, name, element("span", { class: "figures" }, element("b", {}, figure(row.value, 4) + (score.percent ? " %" : "")), range));
    });
    const more = rows.length > LISTED ? element("div", { class: "quiet" }, `and ${rows.length - LISTED} more`) : null;
    tip.replaceChildren(...[element("div", { class: "quiet" }, `${along().label}: ${Report.number(u.data[0][idx])}`), ...said, more].filter(Boolean));
    tip.hidden = !near.length;
    const width = holder.clientWidth, room = tip.offsetWidth || 200, x = left + 62;
    tip.style.left = `${Math.max(0, x + room + 14 > width ? x - room - 14 : x + 14)}px`;
    tip.style.top = `${Math.max(0, Math.min(top + 8, 250 - tip.offsetHeight))}px`;
  }

  // All charts have one axis, and show the same part of it.
  function zoom(chart, factor) {
    const { plot } = chart;
    if (!plot) return;
    const { min, max } = plot.scales.x, x = plot.data[0], middle = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
    const all = !factor || (max - min) * factor >= x.at(-1) - x[0];
    for (const one of charts) {
      if (!one.plot) continue;
      const own = one.plot.data[0], range = { min: Math.max(x[0], middle - (middle - min) * factor), max: Math.min(x.at(-1), middle + (max - middle) * factor) };
      one.plot.setScale("x", all ? { min: own[0], max: own.at(-1) } : range);
    }
  }

  function keys(event, chart) {
    const { plot } = chart;
    if (!plot) return;
    const x = plot.data[0];
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const ends = { Home: 0, End: x.length - 1 };
    if (step || event.key in ends) {
      const now = plot.cursor.idx ?? (step > 0 ? -1 : x.length), idx = event.key in ends ? ends[event.key] : Math.max(0, Math.min(x.length - 1, now + step));
      const first = plot.data.slice(1).find((column) => column[idx] !== null) || [];
      plot.setCursor({ left: plot.valToPos(x[idx], "x"), top: plot.valToPos(first[idx] ?? 0, "y") || 0 });
      chart.said.textContent = chart.holder.tip.textContent;
    } else if (event.key === "+" || event.key === "=") zoom(chart, 0.5);
    else if (event.key === "-") zoom(chart, 2);
    else if (event.key === "0" || event.key === "Escape") { zoom(chart, 0); plot.setCursor({ left: -10, top: -10 }); }
    else return;
    event.preventDefault();
  }

  function chart(score) {
    const holder = element("div", { class: "area", tabindex: "0", role: "img" });
    holder.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    holder.style.position = "relative";
    holder.note = element("p", { class: "quiet note" });
    holder.append(holder.tip, holder.note);
    const one = { score, holder, plot: null, said: element("div", { class: "hidden-words", "aria-live": "polite" }) };
    const button = (text, name, factor) => element("button", { type: "button", "aria-label": `${name}: ${score.label}`, title: name, onclick: () => zoom(one, factor) }, text);
    one.node = element("figure", { class: "chart" },
      element("figcaption", {}, element("span", {}, score.label + (score.percent ? " (%)" : "")), element("span", {}, button("+", "Zoom in", 0.5), button("−", "Zoom out", 2), button("⟲", "Show all", 0))),
      holder, one.said);
    holder.addEventListener("keydown", (event) => keys(event, one));
    new ResizeObserver(() => one.plot && one.plot.setSize({ width: Math.max(200, holder.clientWidth), height: 270 })).observe(holder);
    return one;
  }

  // Draw all charts anew; a zoom stays where the axis stays.
  function draw(keep = true) {
    for (const one of charts) {
      const { plot } = one, ends = plot && plot.data[0].length ? [plot.data[0][0], plot.data[0].at(-1)] : [];
      const zoomed = keep && plot && plot.scales.x.min !== null && (plot.scales.x.min > ends[0] || plot.scales.x.max < ends[1]);
      const scale = zoomed ? { min: plot.scales.x.min, max: plot.scales.x.max } : null;
      if (plot) plot.destroy();
      one.holder.note.textContent = "";
      one.holder.tip.hidden = true;
      one.plot = make(one.score, one.holder, scale);
    }
  }

  function defaults(scores) {
    const has = (name) => scores.some((score) => score.key === name);
    const test = scores.filter((score) => score.key.startsWith("test_") && !score.key.includes("/") && (score.key !== "test_loss" || !has("train_loss")));
    return new Set([...(has("train_loss") ? ["train_loss"] : []), ...test.map((score) => score.key).slice(0, 2), ...(has("epsilon") ? ["epsilon"] : [])]);
  }

  // A button for each curve, that hides and shows it; a double click shows no other.
  function legend(fill) {
    const order = colours(), names = [...new Set(Report.data.runs.map(key))];
    const show = (change) => { change(); fill(); draw(); };
    const buttons = names.map((name) => {
      const mark = element("i", { "aria-hidden": "true" }), members = Report.data.runs.filter((one) => key(one) === name);
      mark.style.color = Report.colour(order.get(members[0].group));
      mark.style.borderTopStyle = ["solid", "dashed", "dotted"][Math.floor(order.get(members[0].group) / 8) % 3];
      const button = element("button", { type: "button", "aria-pressed": String(!state.hidden.has(name)), title: "Click: hide or show. Double-click: only this one.", onclick: (event) => {
        if (event.detail === 2) return show(() => { state.hidden = new Set(names.filter((other) => other !== name)); });
        if (!state.hidden.delete(name)) state.hidden.add(name);
        button.setAttribute("aria-pressed", String(!state.hidden.has(name)));
        draw();
      } }, mark, (state.bands ? label(name) : name) + (members.length > 1 ? ` (${members.length} seeds)` : ""));
      return button;
    });
    const every = (text, hidden) => element("button", { type: "button", class: "link", onclick: () => show(() => { state.hidden = new Set(hidden); }) }, text);
    return [...buttons, ...(names.length > 2 ? [every("all", []), every("none", names)] : [])];
  }

  // Show these runs and no others.
  function only(runs) {
    const shown = new Set(runs.map(key));
    state.hidden = new Set(Report.data.runs.map(key).filter((name) => !shown.has(name)));
    Report.drawAll();
    document.getElementById("curves").scrollIntoView();
  }

  function build() {
    const { data } = Report, scores = data.scores;
    if (!scores.length) return null;
    if (!data.axes.length) return Report.section("curves", "Curves", element("p", {}, "No round is finished yet."));
    if (!data.axes.some((axis) => axis.key === state.x)) state.x = data.axes[0].key;
    state.shown ??= defaults(scores);
    const box = element("div", { class: "charts" }), names = element("div", { class: "legend", role: "group", "aria-label": "Curves that are shown" });
    const refresh = () => { charts.forEach((one) => one.plot && one.plot.destroy()); charts = scores.filter((score) => state.shown.has(score.key)).map(chart); box.replaceChildren(...charts.map((one) => one.node)); draw(); };
    const fill = () => names.replaceChildren(...(data.runs.length > 1 ? legend(fill) : []));
    const check = (text, on, change) => element("label", {}, element("input", { type: "checkbox", checked: on, onchange: (event) => change(event.target.checked) }), text);
    const over = element("select", { id: "axis", onchange: (event) => { state.x = event.target.value; draw(false); } },
      data.axes.map((axis) => element("option", { value: axis.key, selected: axis.key === state.x }, axis.label)));
    const amount = element("output", { class: "amount" }, state.smooth || "off");
    const smooth = element("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth, oninput: (event) => { state.smooth = +event.target.value; amount.textContent = state.smooth || "off"; draw(); } });
    const seeds = seeded() ? check("mean and range over seeds", state.bands, (on) => { state.bands = on; state.hidden.clear(); fill(); draw(); }) : (state.bands = false, null);
    const choose = element("details", {}, element("summary", {}, "Choose scores"), element("div", { class: "controls" },
      scores.map((score) => check(score.label, state.shown.has(score.key), (on) => { if (on) state.shown.add(score.key); else state.shown.delete(score.key); refresh(); }))));
    const section = Report.section("curves", "Curves",
      element("div", { class: "controls" }, element("label", { for: "axis" }, "over", over), check("log scale of losses", state.log, (on) => { state.log = on; draw(); }), element("label", {}, "smoothing", smooth, amount), seeds),
      names, box, scores.length > state.shown.size || scores.length > 3 ? choose : null);
    fill();
    Report.redraw.push(() => { fill(); draw(); });
    section.start = refresh;
    return section;
  }

  return { build, draw, state, colours, only };
})();
