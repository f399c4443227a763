// The turns of all rounds: who took which when, who pulls back whom, what each cluster did on average, and when clusters
// trained on the clock.
"use strict";

Report.turns = (function () {
  const { element } = Report;
  const state = { rows: "cluster", colour: "cosine" };
  const PAIRED = 40; // clusters, up to which each is compared with each
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const percent = (share) => `${Math.round(100 * share)} %`;

  // Rounds from left to right, clusters or turns from top to bottom.
  function grid(rounds, order, show) {
    const box = element("div"), names = { cluster: "cluster", turn: "turn" }, all = [...rounds.values()].flat();
    const furthest = Math.max(...all.map((row) => row.moved || 0), 1e-12), least = Math.min(...all.map((row) => row.moved || furthest));
    const span = Math.log(furthest / least) || 1, depth = (moved) => 0.08 + (0.92 * Math.log(moved / least)) / span;

    function fill() {
      const by = state.rows, key = (row) => (by === "cluster" ? row.cluster : row.cycle + 1), other = (row) => (by === "cluster" ? row.cycle + 1 : row.cluster);
      const labels = [...new Set(all.map(key))].sort((a, b) => a - b), place = new Map(labels.map((label, i) => [label, i]));
      const cells = labels.map(() => order.map(() => []));
      order.forEach((round, j) => rounds.get(round).forEach((row) => cells[place.get(key(row))][j].push(row)));
      const far = state.colour === "moved", values = cells.map((line) => line.map((rows) => mean(rows.map((row) => (far ? row.moved || null : row.cosine)).filter((value) => value !== null))));
      const title = (y, x) => cells[y][x].map((row) => `round ${row.round}, turn ${row.cycle + 1}: cluster ${row.cluster} ${row.failed ? "failed" : `moved the model by ${Report.number(row.moved)}, ${Report.wheel.verdict(row)}`}`).join("; ");
      const heat = Report.heat(values, {
        rows: labels, columns: order, axis: { x: "round", y: names[by] }, colour: far ? (value) => Report.share(depth(value)) : Report.turn, title, height: 240, choose: (_, x) => show(x),
        text: (y, x) => cells[y][x].map(other).join(","),
        words: `${far ? "How far each cluster moved the model" : "Whether each cluster pulled the model back or went on"}, for ${order.length} rounds and ${labels.length} ${names[by]}s. The table below has the mean of each cluster.`,
      });
      const bar = element("i", { "aria-hidden": "true", class: far ? "far" : "turns" });
      box.replaceChildren(element("div", { class: "key" }, element("span", { class: "scale" }, far ? Report.number(least) : "pulls back", bar, far ? `${Report.number(furthest)}, logarithmic` : "goes on"),
        element("span", {}, `Without colour: no turn, a failed one, or the first.${order.length < 60 && innerWidth > 720 ? ` The number in a cell is the ${by === "cluster" ? "turn" : "cluster"}.` : ""} Click a round to see its wheel.`)), heat);
      heat.draw();
    }
    const choose = (name, values) => element("select", { "aria-label": name, onchange: (event) => { state[name === "Rows" ? "rows" : "colour"] = event.target.value; fill(); } },
      Object.entries(values).map(([value, text]) => element("option", { value, selected: value === state.rows || value === state.colour }, text)));
    fill();
    return [element("div", { class: "controls heading" }, element("h3", {}, "All rounds"), choose("Rows", { cluster: "a row for each cluster", turn: "a row for each turn" }), choose("Colours", { cosine: "pulled back or went on", moved: "how far it moved the model" })), box];
  }

  // The mean cosine of each cluster's turn with the turn before it, by both clusters. Nothing where few of them follow
  // each other.
  function pairs(rounds) {
    const rows = [...rounds.values()].flat().filter((row) => row.before && row.cosine !== null), clusters = [...new Set(rows.flatMap((row) => [row.cluster, row.before.cluster]))].sort((a, b) => a - b);
    const M = clusters.length, place = new Map(clusters.map((cluster, i) => [cluster, i])), found = clusters.map(() => clusters.map(() => []));
    for (const row of rows) found[place.get(row.before.cluster)][place.get(row.cluster)].push(row.cosine);
    const filled = found.flat().filter((cosines) => cosines.length).length;
    if (M < 3 || M > PAIRED || filled < (M * (M - 1)) / 3) return null;
    return element("div", {}, element("h3", {}, "Who pulls back whom"), Report.heat(found.map((line) => line.map(mean)), {
      rows: clusters, columns: clusters, axis: { x: "cluster whose turn comes next", y: "cluster before" }, colour: Report.turn, height: 320,
      title: (y, x) => { const cosines = found[y][x]; return cosines.length ? `cluster ${clusters[x]} ${mean(cosines) < 0 ? "pulls back" : "goes on from"} cluster ${clusters[y]}: mean cosine ${Report.signed(mean(cosines))} of ${Report.count(cosines.length, "turn")}` : `cluster ${clusters[x]} never came after cluster ${clusters[y]}`; },
      words: `Mean cosine of the movement of each of ${M} clusters with that of the cluster before it.`,
    }));
  }

  function clusters(rounds) {
    const groups = new Map();
    for (const row of [...rounds.values()].flat()) {
      if (!groups.has(row.cluster)) groups.set(row.cluster, []);
      groups.get(row.cluster).push(row);
    }
    const rows = [...groups].sort((a, b) => a[0] - b[0]).map(([cluster, all]) => {
      const cosines = all.map((row) => row.cosine).filter((value) => value !== null);
      return { cluster, turns: all.length, failed: all.filter((row) => row.failed).length, moved: mean(all.map((row) => row.moved || 0)), cosine: mean(cosines), back: cosines.length ? all.filter(Report.wheel.isBack).length / cosines.length : null };
    });
    const most = Math.max(...rows.map((row) => row.moved), 1e-12);
    return Report.table([
      { label: "cluster", value: (row) => row.cluster },
      { label: "turns", value: (row) => row.turns },
      ...(rows.some((row) => row.failed) ? [{ label: "failed", value: (row) => row.failed }] : []),
      { label: "mean movement", value: (row) => row.moved, cell: (row) => Report.bar(row.moved / most, Report.number(row.moved)) },
      { label: "mean cosine", left: true, value: (row) => row.cosine, cell: (row) => Report.lean(row.cosine) },
      { label: "pulled back in", value: (row) => row.back, cell: (row) => (row.back === null ? "–" : Report.bar(row.back, percent(row.back))) },
    ], rows, { caption: "What each cluster did to the model", most: 30 });
  }

  return (rounds, order, show) => {
    const pulls = pairs(rounds);
    return [...grid(rounds, order, show), element("div", { class: pulls ? "columns wide" : "" }, clusters(rounds), pulls)];
  };
})();

// When clusters trained on the clock, which begins at midnight UTC: their latest cycles, over the hours in which their
// devices are free.
Report.timetable = function (run) {
  const { element } = Report, { cycles, fleet } = run, MOST = 400;
  const rows = cycles.round.map((round, i) => ({ round, cluster: cycles.cluster[i], from: cycles.opened[i], to: cycles.simulated_seconds[i], failed: cycles.failed[i], devices: cycles.cohort[i] }))
    .filter((row) => row.from !== null && row.to !== null && row.to >= row.from).slice(-MOST);
  if (!rows.length || !(rows.at(-1).to > rows[0].from)) return null;
  const clusters = fleet.clusters ? fleet.clusters.map((_, K) => K) : [...new Set(rows.map((row) => row.cluster))].sort((a, b) => a - b);
  const first = Math.min(...rows.map((row) => row.from)), last = Math.max(...rows.map((row) => row.to)), left = 34, top = 7;
  const place = new Map(clusters.map((cluster, i) => [cluster, i])), tall = Math.max(4, Math.min(24, 320 / clusters.length));
  const canvas = element("canvas", { role: "img", "aria-label": `When ${clusters.length} clusters trained in rounds ${rows[0].round} to ${rows.at(-1).round}, from ${Report.clock(first)} to ${Report.clock(last)} of simulated time.` });
  const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" }), frame = element("div", { class: "heat" }, canvas, tip);
  let wide = 1;
  const x = (seconds) => left + ((seconds - first) / (last - first)) * wide;

  frame.draw = function () {
    const space = frame.clientWidth || 300, bottom = top + tall * clusters.length, pen = Report.pen(canvas, space, bottom + 36);
    wide = space - left - 8;
    if (fleet.free) shade(pen);
    for (const row of rows) {
      const y = top + place.get(row.cluster) * tall, width = Math.max(2, x(row.to) - x(row.from));
      pen.fillStyle = Report.colour(row.failed ? 1 : 0);
      pen.fillRect(x(row.from), y + tall * (row.failed ? 0.38 : 0.15), width, tall * (row.failed ? 0.24 : 0.7));
    }
    pen.fillStyle = Report.variable("--quiet");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    clusters.forEach((cluster, i) => { if (i % Math.ceil(13 / tall) === 0) pen.fillText(String(cluster), left - 5, top + (i + 0.5) * tall); });
    pen.textAlign = "center";
    const step = [300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 2592000].find((one) => x(first + one) - x(first) > 74) || 8640000;
    for (let at = Math.ceil(first / step) * step; at <= last; at += step) pen.fillText(Report.clock(at), Math.min(x(at), space - 26), bottom + 10);
    pen.fillText("simulated time, UTC", left + wide / 2, bottom + 28);
    pen.translate(7, top + (tall * clusters.length) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText("cluster", 0, 0);
  };

  function shade(pen) {
    const bins = fleet.free[0].length, width = 86400 / bins;
    fleet.free.slice(0, clusters.length).forEach((line, K) => {
      for (let b = Math.floor(first / width); b * width < last; b++) {
        const from = Math.max(first, b * width), to = Math.min(last, (b + 1) * width);
        pen.fillStyle = Report.mix("--card", 2, 0.45 * line[b % bins]);
        pen.fillRect(x(from), top + K * tall, x(to) - x(from) + 0.5, tall - 1);
      }
    });
  }

  Report.tips(canvas, tip, frame, (px, py) => {
    const K = clusters[Math.floor((py - top) / tall)], at = first + ((px - left) / wide) * (last - first), near = (2 / wide) * (last - first);
    const row = rows.find((one) => one.cluster === K && one.from - near <= at && at <= one.to + near);
    return row ? `round ${row.round}, cluster ${K}: ${Report.clock(row.from)} to ${Report.clock(row.to)}, ${row.failed ? "failed" : Report.count(row.devices, "device")}` : null;
  });
  const swatch = (index, text, share) => { const mark = element("i", { class: "swatch", "aria-hidden": "true" }); mark.style.background = share ? `color-mix(in srgb, ${Report.colour(index)} 45%, transparent)` : Report.colour(index); return element("span", { class: "scale" }, mark, text); };
  const whole = cycles.every > 1 || rows[0].round > 1 ? `, rounds ${rows[0].round} to ${rows.at(-1).round}` : "";
  const marks = [swatch(0, "a cycle"), rows.some((row) => row.failed) ? swatch(1, "a failed cycle") : null, fleet.free ? swatch(2, fleet.free_is === "free" ? "devices of the cluster are free" : "night in the cluster", true) : null];
  return element("div", {}, element("h3", {}, `Timetable: when each cluster trained${whole}`), element("div", { class: "key" }, marks), frame);
};
