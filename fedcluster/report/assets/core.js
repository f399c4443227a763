// What all parts of the report share: elements, numbers as text, colours. A text from the data becomes a text node,
// never markup.
"use strict";

const Report = { data: null, redraw: [] };

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
  const minutes = Math.round(seconds / 60), days = Math.floor(minutes / 1440);
  const clock = `${Math.floor((minutes % 1440) / 60)}:${String(minutes % 60).padStart(2, "0")}`;
  return days ? `${days} d ${clock}` : `${clock} h`;
};

Report.last = function (column) {
  for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
  return null;
};

// Okabe and Ito's palette, with a lighter one for the dark. Methods have the colours that they have in the plots.
Report.palettes = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b8578c", "#8a6d00", "#3d9bd1", "#7a4fa3", "#5a5a5a"],
  dark: ["#4fb0e8", "#ff8f3f", "#35c99b", "#ee9fc9", "#e8c547", "#8fd0f5", "#b795e0", "#b4b4b4"],
};
Report.fixed = { FedCluster: 0, FedAvg: 1, "centralized SGD": 7 };

Report.dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
Report.colour = (index) => {
  const palette = Report.palettes[Report.dark() ? "dark" : "light"];
  return palette[index % palette.length];
};
Report.variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

Report.drawAll = () => Report.redraw.forEach((draw) => draw());

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
