// A table that is sorted by the headers of its columns and filtered by a text.
"use strict";

// columns: {label, left, value(row), text(row), cell(row)}: what a row is sorted by, what it says, what it is made of.
// options: caption or label, key (where two have one caption), sort, up, filter, most, chosen(row), and filtered(rows),
// which is told what a filter leaves. A table that is built anew is sorted and filtered as it was.
Report.table = function (columns, rows, options = {}) {
  const { element } = Report, most = options.most || 100, name = options.caption || options.label || "Table";
  const kept = (Report.tables[options.key || name] ??= { by: options.sort ?? -1, up: options.up ?? true, wanted: "", all: false });
  if (kept.by >= columns.length) kept.by = options.sort ?? -1;
  const text = (column, row) => (column.text ? column.text(row) : Report.number(column.value(row)));
  const matches = (row) => columns.some((column) => String(text(column, row)).toLowerCase().includes(kept.wanted));

  const sortBy = (index) => { kept.up = kept.by === index ? !kept.up : true; kept.by = index; draw(); };
  const heads = columns.map((column, index) => element("th", { scope: "col", class: column.left ? "left" : null },
    element("button", { type: "button", onclick: () => sortBy(index) }, column.label)));
  const body = element("tbody");
  const more = element("button", { type: "button", class: "more", onclick: () => { kept.all = true; draw(); } });
  const status = element("span", { class: "quiet", role: "status" });
  const type = (event) => { kept.wanted = event.target.value.trim().toLowerCase(); draw(); };
  const search = options.filter && rows.length > 1 && element("div", { class: "filter" },
    element("input", { type: "search", value: kept.wanted, placeholder: options.filter, "aria-label": options.filter, oninput: type }), status);

  function cell(column, row, index) {
    const content = column.cell ? column.cell(row) : text(column, row), side = column.left ? "left" : null;
    return index ? element("td", { class: side }, content) : element("th", { scope: "row", class: side }, content);
  }

  function draw() {
    const { by, up, wanted, all } = kept;
    let shown = wanted ? rows.filter(matches) : rows;
    if (options.filtered) options.filtered(wanted ? shown : null);
    if (by >= 0) shown = [...shown].sort((a, b) => (up ? 1 : -1) * compare(columns[by].value(a), columns[by].value(b)));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index !== by ? "none" : up ? "ascending" : "descending"));
    body.replaceChildren(...shown.slice(0, all ? undefined : most).map((row) => {
      const chosen = options.chosen && options.chosen(row);
      return element("tr", { class: chosen ? "chosen" : null }, columns.map((column, index) => cell(column, row, index)));
    }));
    more.hidden = all || shown.length <= most;
    more.textContent = `Show all ${shown.length.toLocaleString("en-US")} rows`;
    status.textContent = wanted ? `${shown.length} of ${rows.length} rows` : "";
  }

  const table = element("table", {}, element("caption", { class: "hidden-words" }, name), element("thead", {}, element("tr", {}, heads)), body);
  const title = options.caption && element("h3", {}, options.caption);
  const node = element("div", { class: "tabled" }, title || search ? element("div", { class: "over" }, title, search) : null,
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table), more);
  draw();
  return node;

  function compare(a, b) {
    const none = (value) => value === null || value === undefined || value === "";
    if (none(a) || none(b)) return none(a) - none(b);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }
};

// A cell with a bar before its number.
Report.bar = function (share, text) {
  const bar = Report.element("span", { class: "bar" });
  bar.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return Report.element("span", { class: "barred" }, Report.element("span", { class: "track", "aria-hidden": "true" }, bar), Report.element("span", { class: "figure" }, text));
};

// A cosine as a bar to the left (back) or right (on) of the middle, its number, and words.
Report.lean = function (cosine, words) {
  const { element } = Report, bar = element("span", { class: "bar" });
  if (cosine === null || cosine === undefined) return words || "–";
  bar.style.background = Report.turn(Math.sign(cosine) * 0.7);
  bar.style.left = `${50 + 50 * Math.min(0, cosine)}%`;
  bar.style.width = `${50 * Math.abs(cosine)}%`;
  return element("span", { class: "barred lean" }, element("span", { class: "track", "aria-hidden": "true" }, bar), element("span", { class: "figure" }, Report.signed(cosine)), words ? element("span", { class: "words" }, words) : null);
};

// A histogram: full bars of the last values and, where there are others, empty ones of the first.
Report.histogram = function (options) {
  const { element } = Report, { edges, columns, names } = options, middles = edges.slice(1).map((edge, b) => (edge + edges[b]) / 2);
  const holder = element("div", { class: "heat", role: "img", "aria-label": options.words }), tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  let plot = null;
  holder.draw = function () {
    if (plot) plot.destroy();
    const ink = { stroke: Report.variable("--quiet"), grid: { stroke: Report.variable("--faint"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const bars = { stroke: Report.colour(0), fill: `${Report.colour(0)}99`, width: 0, paths: uPlot.paths.bars({ size: [0.92, 100] }), points: { show: false } };
    const outline = { ...bars, stroke: Report.colour(1), fill: "transparent", width: 1.5 };
    plot = new uPlot({
      width: Math.max(200, holder.clientWidth), height: 190, legend: { show: false },
      scales: { x: { time: false, range: [edges[0], edges.at(-1)] }, y: { range: (_, low, high) => [0, high * 1.08 || 1] } },
      series: columns.length > 1 ? [{}, bars, outline] : [{}, bars],
      axes: [{ ...ink, size: 28, label: options.label, labelSize: 18, labelFont: ink.font, values: (_, splits) => splits.map(options.text) }, { ...ink, size: 44, label: "devices", labelSize: 16, labelFont: ink.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] }],
      cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      hooks: { setCursor: [(u) => {
        const { idx, left } = u.cursor;
        tip.hidden = idx === null || idx === undefined || left < 0;
        if (tip.hidden) return;
        const counts = names.map((name, i) => `${name}: ${Report.number(columns[names.length - 1 - i][idx])} devices`).join(", ");
        tip.textContent = `${options.text(edges[idx])} to ${options.text(edges[idx + 1])}: ${counts}`;
        tip.style.left = `${Math.max(0, Math.min(left + 50, holder.clientWidth - 230))}px`;
        tip.style.top = "6px";
      }] },
    }, [middles, ...columns], holder);
    plot.root.setAttribute("aria-hidden", "true");
    holder.append(tip);
  };
  return holder;
};
