// What all parts of the report share: elements, numbers as text, colours. A text from the data becomes a text node,
// never markup.
"use strict";

const Report = { data: null, redraw: [], tables: {} }; // tables: how those of the page are sorted and filtered

// Columns of equal steps travel as {from, by, length}.
Report.decode = function decode(value) {
  if (Array.isArray(value)) return value.map(decode);
  if (value === null || typeof value !== "object") return value;
  if ("from" in value && "by" in value && "length" in value) {
    return Array.from({ length: value.length }, (_, i) => value.from + i * value.by);
  }
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, decode(one)]));
};

// element("button", {class: "x", onclick: f}, "text", child, ...)
Report.element = function (tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
};

Report.section = function (id, title, ...children) {
  const heading = Report.element("h2", { id: `${id}-title` }, title);
  return Report.element("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
};

Report.number = function (value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : String(+value.toPrecision(4));
};

Report.score = function (value, score) {
  if (value === null || value === undefined) return "–";
  return score.percent ? `${(100 * value).toFixed(2)} %` : Report.number(value);
};

Report.bytes = function (count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${count.toLocaleString("en-US", { maximumFractionDigits: count < 10 ? 1 : 0 })} ${unit}`;
    count /= 1000;
  }
  return `${count.toLocaleString("en-US", { maximumFractionDigits: 1 })} TB`;
};

Report.duration = function (seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(1)} min`;
  return seconds < 2 * 86400 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
};

// A time of simulated days, the first of which begins at 0.
Report.clock = function (seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.round(seconds / 60), day = Math.floor(minutes / 1440);
  const clock = `${String(Math.floor((minutes % 1440) / 60)).padStart(2, "0")}:${String(minutes % 60).padStart(2, "0")}`;
  return day ? `day ${day + 1}, ${clock}` : clock;
};

Report.signed = (value) => (value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`);
Report.count = (number, what) => `${Report.number(number)} ${what}${number === 1 ? "" : "s"}`;

Report.last = function (column) {
  for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
  return null;
};

// Okabe and Ito's palette, with a lighter one for the dark. Methods have the colours that they have in the plots.
Report.palettes = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b8578c", "#8a6d00", "#3d9bd1", "#7a4fa3", "#5a5a5a"],
  dark: ["#4fb0e8", "#ff8f3f", "#35c99b", "#ee9fc9", "#e8c547", "#8fd0f5", "#b795e0", "#b4b4b4"],
};
Report.fixed = { FedCluster: 0, FedAvg: 1, "minibatch SGD": 2, "FedCluster+": 3, "centralized SGD": 7 };

Report.dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
Report.colour = (index) => {
  const palette = Report.palettes[Report.dark() ? "dark" : "light"];
  return palette[index % palette.length];
};
// A colour of the style sheet; those of the present theme are remembered.
const variables = new Map();
Report.variable = function (name) {
  if (!variables.has(name)) variables.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return variables.get(name);
};

// A canvas of this size in CSS pixels, empty.
Report.pen = function (canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
};

// What is under the pointer or a finger: text(x, y, width of the canvas) says it, null for nothing.
Report.tips = function (canvas, tip, frame, text) {
  const show = (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, said = text(x, y, box.width);
    tip.hidden = said === null;
    if (tip.hidden) return;
    tip.textContent = said;
    tip.style.left = `${Math.max(0, Math.min(x + 14, frame.clientWidth - tip.offsetWidth - 2))}px`;
    tip.style.top = `${y + 18}px`;
  };
  canvas.addEventListener("pointermove", show);
  canvas.addEventListener("pointerdown", show);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
};

Report.drawAll = function () {
  variables.clear();
  Report.redraw.forEach((draw) => draw());
};

Report.theme = function () {
  const button = document.getElementById("theme"), root = document.documentElement;
  const names = { "": "as the system has them", dark: "dark", light: "light" }, order = Object.keys(names);
  const stored = () => { try { return localStorage.getItem("fedcluster-theme"); } catch { return ""; } };
  const store = (theme) => { try { localStorage.setItem("fedcluster-theme", theme); } catch { /* not remembered */ } };
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    button.title = `Colours: ${names[theme]}`;
    button.setAttribute("aria-label", button.title);
    Report.drawAll();
  };
  apply(order.includes(stored()) ? stored() : "");
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
    store(next);
    apply(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", Report.drawAll);
};
