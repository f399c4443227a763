// A table that is sorted by the headers of its columns and filtered by a text.
"use strict";

// columns: {label, left, value(row), text(row), cell(row)}: what a row is sorted by, what it says, what it is made of.
Report.table = function (columns, rows, options = {}) {
  const { element } = Report, most = options.most || 100;
  let by = options.sort ?? -1, up = options.up ?? true, wanted = "", all = false;
  const text = (column, row) => (column.text ? column.text(row) : Report.number(column.value(row)));
  const matches = (row) => columns.some((column) => String(text(column, row)).toLowerCase().includes(wanted));

  const sortBy = (index) => { up = by === index ? !up : true; by = index; draw(); };
  const heads = columns.map((column, index) => element("th", { scope: "col", class: column.left ? "left" : null },
    element("button", { type: "button", onclick: () => sortBy(index) }, column.label)));
  const body = element("tbody");
  const more = element("button", { type: "button", class: "more", onclick: () => { all = true; draw(); } });
  const status = element("span", { class: "quiet", role: "status" });
  const type = (event) => { wanted = event.target.value.trim().toLowerCase(); draw(); };
  const search = options.filter && element("div", { class: "filter" },
    element("input", { type: "search", placeholder: options.filter, "aria-label": options.filter, oninput: type }), status);

  function cell(column, row, index) {
    const content = column.cell ? column.cell(row) : text(column, row), side = column.left ? "left" : null;
    return index ? element("td", { class: side }, content) : element("th", { scope: "row", class: side }, content);
  }

  function draw() {
    let shown = wanted ? rows.filter(matches) : rows;
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

  const table = element("table", {}, options.caption && element("caption", {}, options.caption),
    element("thead", {}, element("tr", {}, heads)), body);
  const name = options.caption || options.label || "Table";
  const node = element("div", { class: "tabled" }, search,
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table), more);
  node.redraw = draw;
  draw();
  return node;

  function compare(a, b) {
    const none = (value) => value === null || value === undefined || value === "";
    if (none(a) || none(b)) return none(a) - none(b);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }
};

// A cell with a bar behind its number.
Report.bar = function (share, text) {
  const bar = Report.element("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return Report.element("span", { class: "barred" }, bar, Report.element("span", {}, text));
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
