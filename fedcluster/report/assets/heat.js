// A matrix as coloured cells on a canvas, with its values under the pointer.
"use strict";

// options: rows and columns (labels), axis {x, y}, colour(value), title(row, column), words (for a screen reader),
// height, choose(row, column)
Report.heat = function (values, options) {
  const { element } = Report, height = values.length, width = values.length ? values[0].length : 0;
  const canvas = element("canvas", { role: "img", "aria-label": options.words });
  const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const frame = element("div", { class: "heat" }, canvas, tip);
  const longest = Math.max(1, ...options.rows.map((label) => Math.min(9, String(label).length)));
  const left = 24 + 7 * longest, top = 2, bottom = 36;
  let wide = 1, tall = 1;

  function draw() {
    const space = frame.clientWidth || 300, scale = window.devicePixelRatio || 1;
    wide = (space - left - 2) / width;
    tall = Math.max(1, Math.min(24, (options.height || 280) / height));
    const size = top + tall * height + bottom;
    Object.assign(canvas.style, { width: `${space}px`, height: `${size}px` });
    Object.assign(canvas, { width: space * scale, height: size * scale });
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const gap = wide > 5 && tall > 5 ? 1 : 0, empty = Report.variable("--faint");
    values.forEach((row, y) => row.forEach((value, x) => {
      pen.fillStyle = value === null || value === undefined ? empty : options.colour(value);
      pen.fillRect(left + x * wide, top + y * tall, Math.max(wide - gap, 0.5), Math.max(tall - gap, 0.5));
    }));
    label(pen);
  }

  function label(pen) {
    pen.fillStyle = Report.variable("--quiet");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const rows = Math.ceil(13 / tall), columns = spacing(options.columns, wide);
    let free = 0; // the first row with room for a label; of equal neighbours only the first is labelled
    options.rows.forEach((text, y) => {
      if (y < free || text === options.rows[y - 1]) return;
      free = y + rows;
      pen.fillText(cut(String(text)), left - 5, top + (y + 0.5) * tall);
    });
    pen.textAlign = "center";
    options.columns.forEach((text, x) => {
      if (x % columns === 0) pen.fillText(String(text), left + (x + 0.5) * wide, top + height * tall + 10);
    });
    pen.fillText(options.axis.x, left + (width * wide) / 2, top + height * tall + 28);
    pen.translate(7, top + (height * tall) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(options.axis.y, 0, 0);
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - left) / wide), y = Math.floor((event.clientY - box.top - top) / tall);
    return x >= 0 && x < width && y >= 0 && y < height ? [y, x] : null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const place = at(event), box = canvas.getBoundingClientRect();
    tip.hidden = !place;
    if (!place) return;
    tip.textContent = options.title(...place);
    tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 12, box.width - 220))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (options.choose) {
    canvas.classList.add("choose");
    canvas.addEventListener("click", (event) => { const place = at(event); if (place) options.choose(...place); });
  }
  frame.draw = draw;
  return frame;

  function spacing(labels, step) {
    const least = Math.ceil((Math.max(1, ...labels.map((text) => String(text).length)) * 7 + 8) / step);
    return [1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 25, 50, 100, 200, 250, 500, 1000].find((every) => every >= least) || least;
  }

  function cut(text) { return text.length > 9 ? `${text.slice(0, 8)}…` : text; }
};

// Colours of shares, from the background to blue; and of cosines, from orange (back) through grey to blue (on).
Report.share = (value, most = 1) => Report.mix("--card", 0, value / (most || 1));
Report.turn = (value) => Report.mix("--middle", value < 0 ? 1 : 0, Math.abs(value) * 1.3);
Report.mix = function (background, index, share) {
  const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const from = parts(Report.variable(background)), to = parts(Report.colour(index)), s = Math.max(0, Math.min(1, share));
  return `rgb(${from.map((part, i) => Math.round(part + (to[i] - part) * s)).join(",")})`;
};
