// A matrix as coloured cells on a canvas, with its values under the pointer.
"use strict";

// options: rows and columns (labels), axis {x, y}, colour(value), title(row, column), words (for a screen reader), and if
// wanted height, steps (distances of labels of columns that are numbers), text(row, column), choose(row, column)
Report.heat = function (values, options) {
  const { element } = Report, height = values.length, width = values.length ? values[0].length : 0;
  const LETTERS = 22, top = 7, bottom = 36, FONT = "11px system-ui, sans-serif";
  const canvas = element("canvas", { role: "img", "aria-label": options.words });
  const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const frame = element("div", { class: "heat" }, canvas, tip);
  const longest = Math.max(1, ...options.rows.map((label) => Math.min(LETTERS, String(label).length)));
  const left = (options.axis.y ? 24 : 8) + 6.4 * longest;
  let wide = 1, tall = 1;

  function draw() {
    const space = frame.clientWidth || 300;
    wide = (space - left - 2) / width;
    tall = Math.max(1, Math.min(24, (options.height || 280) / height));
    const pen = Report.pen(canvas, space, top + tall * height + bottom);
    const gap = wide > 5 && tall > 5 ? 1 : 0, empty = Report.variable("--faint"), texts = options.text && wide > 17 && tall > 11;
    pen.font = "10px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    values.forEach((row, y) => row.forEach((value, x) => {
      const none = value === null || value === undefined;
      pen.fillStyle = none ? empty : options.colour(value);
      pen.fillRect(left + x * wide, top + y * tall, Math.max(wide - gap, 0.5), Math.max(tall - gap, 0.5));
      if (!texts) return;
      pen.fillStyle = none ? Report.variable("--quiet") : Report.ink(pen.fillStyle);
      pen.fillText(options.text(y, x), left + (x + 0.5) * wide, top + (y + 0.5) * tall, wide - 2);
    }));
    label(pen);
  }

  function label(pen) {
    pen.fillStyle = Report.variable("--quiet");
    pen.font = FONT;
    pen.textAlign = "right";
    const rows = Math.ceil(13 / tall), shown = labelled();
    let free = 0; // the first row with room for a label; of equal neighbours only the first is labelled
    options.rows.forEach((text, y) => {
      if (y < free || text === options.rows[y - 1]) return;
      free = y + rows;
      pen.fillText(cut(String(text)), left - 5, top + (y + 0.5) * tall);
    });
    pen.textAlign = "center";
    options.columns.forEach((text, x) => {
      if (shown(x)) pen.fillText(String(text), left + (x + 0.5) * wide, top + height * tall + 10);
    });
    pen.fillText(options.axis.x, left + (width * wide) / 2, top + height * tall + 28);
    pen.translate(7, top + (height * tall) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(options.axis.y, 0, 0);
  }

  // Which columns have a label: numbers that are multiples of 1, 2, 5, ... with room between them; else every so manyth.
  function labelled() {
    const { columns } = options, room = Math.max(1, ...columns.map((text) => (Number.isInteger(text) || typeof text !== "number" ? String(text).length : 1))) * 7 + 8;
    if (columns.length > 1 && columns.every((one) => typeof one === "number")) {
      const each = (columns.at(-1) - columns[0]) / (columns.length - 1);
      const step = (options.steps || [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4]).find((one) => (one / each) * wide >= room);
      if (step && columns.some((one) => one % step === 0)) return (x) => columns[x] % step === 0;
    }
    const every = Math.ceil(room / wide);
    return (x) => x % every === 0;
  }

  function at(x, y) {
    const column = Math.floor((x - left) / wide), row = Math.floor((y - top) / tall);
    return column >= 0 && column < width && row >= 0 && row < height ? [row, column] : null;
  }

  Report.tips(canvas, tip, frame, (x, y) => { const place = at(x, y); return (place && options.title(...place)) || null; });
  if (options.choose) {
    canvas.classList.add("choose");
    canvas.addEventListener("click", (event) => { const place = at(event.offsetX, event.offsetY); if (place) options.choose(...place); });
  }
  frame.draw = draw;
  return frame;

  function cut(text) { return text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text; }
};

// Black or white, whichever can be read on a colour #rrggbb.
Report.ink = function (colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#14181d" : "#ffffff";
};

// Colours of shares, from the background to blue; and of cosines, from orange (back) through grey to blue (on).
Report.share = (value, most = 1) => Report.mix("--card", 0, value / (most || 1));
Report.turn = (value) => Report.mix("--middle", value < 0 ? 1 : 0, Math.abs(value) * 1.3);
Report.mix = function (background, index, share) {
  const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const from = parts(Report.variable(background)), to = parts(Report.colour(index)), s = Math.max(0, Math.min(1, share));
  return `rgb(${from.map((part, i) => Math.round(part + (to[i] - part) * s)).join(",")})`;
};
