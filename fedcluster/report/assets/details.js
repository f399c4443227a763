// The sections on one run: its fleet, the scores of its devices, what was lost, privacy, and the experiment.
"use strict";

Report.tile = (value, name, warn) => Report.element("div", { class: warn ? "tile warn" : "tile" }, Report.element("b", {}, value), Report.element("span", {}, name));

Report.summary = function (run) {
  const { element, tile, last } = Report, { rounds } = run, tiles = [];
  for (const score of Report.data.scores) {
    if (!/^(train_loss|test_(?!loss)[^/]*|epsilon)$/.test(score.key) || !rounds[score.key]) continue;
    tiles.push(tile(Report.score(last(rounds[score.key]), score), score.label));
  }
  if (!rounds.train_loss && rounds.test_loss) tiles.push(tile(Report.number(last(rounds.test_loss)), "test loss"));
  const done = last(rounds.round) || 0;
  tiles.push(tile(run.planned && run.planned !== done ? `${done} of ${run.planned}` : Report.number(done), "rounds"));
  tiles.push(tile(Report.number(last(rounds.device_updates) || 0), "device updates"));
  tiles.push(tile(Report.bytes((last(rounds.bytes_up) || 0) + (last(rounds.bytes_down) || 0)), "up and down"));
  if (rounds.simulated_seconds) tiles.push(tile(Report.duration(last(rounds.simulated_seconds)), "simulated time"));
  tiles.push(tile(Report.duration(last(rounds.elapsed) || 0), "computing time"));
  const lost = Object.entries(run.events.totals).reduce((sum, [kind, count]) => sum + (kind.startsWith("cycle") ? 0 : count), 0);
  if (lost) tiles.push(tile(Report.number(lost), "refused, lost, late", true));
  return element("div", { class: "tiles" }, tiles);
};

Report.fleet = function (run) {
  const { element, fleet = run.fleet } = { ...Report, fleet: run.fleet };
  if (!fleet.clusters || !fleet.clusters.length) return null;
  const weights = fleet.clusters.map((cluster) => cluster.weight), devices = fleet.clusters.map((cluster) => cluster.devices);
  const rows = fleet.clusters.map((cluster, number) => ({ number, ...cluster }));
  const text = [`${Report.number(fleet.devices)} devices in ${fleet.clusters.length} cluster${fleet.clusters.length === 1 ? "" : "s"}`];
  if (fleet.samples) text.push(fleet.samples.least === fleet.samples.most ? `${Report.number(fleet.samples.most)} samples each` : `${Report.number(fleet.samples.least)} to ${Report.number(fleet.samples.most)} samples a device, ${Report.number(Math.round(fleet.samples.mean))} on average`);
  if (fleet.left_out) text.push(`${Report.number(fleet.left_out)} devices in no cluster`);
  const parts = [element("p", {}, `${text.join(", ")}.`), Report.table([
    { label: "cluster", value: (row) => row.number },
    { label: "devices", value: (row) => row.devices, cell: (row) => Report.bar(row.devices / Math.max(...devices), Report.number(row.devices)) },
    { label: "samples", value: (row) => row.samples },
    { label: "weight q", value: (row) => row.weight, cell: (row) => Report.bar(row.weight / Math.max(...weights), Report.number(row.weight)) },
  ], rows, { caption: "Clusters", most: 20 })];
  const numbers = fleet.clusters.map((_, number) => number);
  const sampled = fleet.sampled < fleet.devices && (fleet.class_shares || fleet.free) ? ` Measured on ${Report.number(fleet.sampled)} devices.` : "";
  const heat = (title, values, options) => parts.push(element("div", {}, element("h3", {}, title), Report.heat(values, options)));
  if (fleet.class_shares) {
    const classes = fleet.class_shares[0].map((_, index) => index), most = Math.max(...fleet.class_shares.flat());
    heat("Classes of each cluster", fleet.class_shares, {
      rows: numbers.slice(0, fleet.class_shares.length), columns: classes, axis: { x: `class (full colour: ${Math.round(100 * most)} % of the samples)`, y: "cluster" }, colour: (value) => Report.share(value, most),
      title: (K, c) => `cluster ${K}: ${(100 * fleet.class_shares[K][c]).toFixed(1)} % of its samples are of class ${c}`,
      words: `Share of each of ${classes.length} classes in the samples of each cluster.${sampled}`,
    });
  }
  if (fleet.shown && fleet.shown.length > 1) {
    const place = (one) => (one.cluster < 0 ? "in no cluster" : `cluster ${one.cluster}`);
    heat("Classes of single devices", fleet.shown.map((one) => one.shares), {
      rows: fleet.shown.map((one) => one.cluster), columns: fleet.shown[0].shares.map((_, index) => index), axis: { x: "class (full colour: all samples)", y: "device, by cluster" },
      colour: (value) => Report.share(value), title: (k, c) => `device ${fleet.shown[k].name}, ${place(fleet.shown[k])}: ${(100 * fleet.shown[k].shares[c]).toFixed(0)} % of class ${c}`,
      words: `Share of each class in the samples of ${fleet.shown.length} devices, in the order of their clusters.`,
    });
  }
  if (fleet.free) {
    const bins = fleet.free[0].length, hour = (b) => `${Math.floor((b * 24) / bins)}:${String(Math.round(((b * 24) / bins % 1) * 60)).padStart(2, "0")}`;
    const what = fleet.free_is === "free" ? "are free" : "have night (22 to 6 h)";
    heat(fleet.free_is === "free" ? "When devices are free" : "When it is night", fleet.free, {
      rows: numbers.slice(0, fleet.free.length), columns: Array.from({ length: bins }, (_, b) => (b * 24) / bins), steps: [1, 2, 3, 4, 6, 12], axis: { x: "hour of the day, UTC (full colour: all devices)", y: "cluster" }, colour: (value) => Report.share(value),
      title: (K, b) => `cluster ${K} at ${hour(b)} UTC: ${Math.round(100 * fleet.free[K][b])} % of its devices ${what}`, words: `Share of the devices of each cluster that ${what}, over the hours of the day.${sampled}`,
    });
  }
  return Report.section("fleet", "Fleet and clusters", parts[0], element("div", { class: "columns" }, parts.slice(1)), sampled ? element("p", { class: "quiet" }, sampled.trim()) : null, Report.timetable(run));
};

Report.devices = function (run) {
  const { element } = Report, found = run.devices;
  if (!found.scores || !found.scores.length) return null;
  const parts = [...found.scores].sort((a, b) => (a.name === "loss") - (b.name === "loss")).map((score) => {
    const show = (value) => Report.score(value, score);
    const values = found.first === found.round ? [score.after] : [score.before, score.after];
    const names = found.first === found.round ? [`round ${found.round}`] : [`round ${found.first}`, `round ${found.round}`];
    const best = Math.max(...score.clusters.map((row) => Math.abs(row.mean || 0)), 1e-12);
    return element("div", {},
      element("h3", {}, `${score.name} of the devices, mean ${show(score.mean)}`),
      names.length > 1 ? element("p", { class: "quiet" }, `Full bars: ${names[1]}. Outlines: ${names[0]}.`) : null,
      Report.histogram({ edges: score.edges, columns: values.toReversed(), names, label: score.name + (score.percent ? " (%)" : ""), text: (value) => (score.percent ? +(100 * value).toPrecision(4) : +value.toPrecision(3)),
        words: `Histogram of the ${score.name} of ${found.devices} devices after ${names.join(" and ")}. The mean is ${show(score.mean)}, the worst device has ${show(score.worst[0] && score.worst[0][3])}.` }),
      element("div", { class: "columns" },
        Report.table([
          { label: "device", left: true, value: (row) => row[0], text: (row) => row[0] },
          { label: score.name, value: (row) => row[3], text: (row) => show(row[3]) },
          { label: "cluster", value: (row) => row[1], text: (row) => (row[1] < 0 ? "none" : row[1]) },
          { label: "test samples", value: (row) => row[2] },
        ], score.worst, { caption: found.devices > score.worst.length ? `The worst ${score.worst.length} of ${Report.number(found.devices)} devices` : "Devices, the worst first", key: `worst ${score.name}`, most: 10 }),
        Report.table([
          { label: "cluster", value: (row) => row.cluster, text: (row) => (row.cluster < 0 ? "none" : row.cluster) },
          { label: "devices", value: (row) => row.devices },
          { label: `mean ${score.name}`, value: (row) => row.mean, cell: (row) => Report.bar(Math.abs(row.mean || 0) / best, show(row.mean)) },
        ], score.clusters, { caption: "Clusters, the worst first", key: `clusters ${score.name}`, most: 10, sort: 2, up: score.higher })));
  });
  return Report.section("devices", "Scores by device", element("p", { class: "quiet" }, `${Report.number(found.devices)} devices scored the model of round ${found.round} on samples of their own.`), ...parts);
};

Report.events = function (run) {
  const { element } = Report, { events } = run, kinds = Object.keys(events.totals), title = "Refused, lost, late";
  const attacked = malicious(events.malicious);
  if (!kinds.length) return Report.section("lost", title, element("p", {}, events.cycles ? "Nothing: every update of every cycle was accepted and in time." : "No cycle is over yet."), attacked);
  const tiles = element("div", { class: "tiles" }, Report.tile(Report.number(events.updates || 0), "updates accepted"), kinds.map((kind) => Report.tile(Report.number(events.totals[kind]), kind, true)));
  const most = Math.max(...kinds.flatMap((kind) => events.by_round[kind]));
  const heat = Report.heat(kinds.map((kind) => events.by_round[kind]), { rows: kinds, columns: events.rounds, axis: { x: "rounds with events", y: "" }, height: 26 * kinds.length, colour: (value) => Report.mix("--card", 1, Math.sqrt(value / most)),
    text: (row, j) => String(events.by_round[kinds[row]][j] || ""), title: (row, j) => `round ${events.rounds[j]}: ${events.by_round[kinds[row]][j]} ${kinds[row]}`, words: `Events of each kind by round. ${kinds.map((kind) => `${kind}: ${events.totals[kind]}`).join(", ")}.` });
  const often = events.by_device.length ? Report.table([{ label: "device", left: true, value: (row) => row[0], text: (row) => row[0] }, { label: "times", value: (row) => row[1], cell: (row) => Report.bar(row[1] / events.by_device[0][1], Report.number(row[1])) }], events.by_device, { caption: "Devices, the most frequent first", most: 15 }) : null;
  const columns = [
    { label: "device", left: true, value: (row) => row[2], text: (row) => row[2] || "–" }, { label: "what", left: true, value: (row) => row[3], text: (row) => row[3] },
    { label: "round", value: (row) => row[0] }, { label: "cluster", value: (row) => row[1] },
  ];
  if (events.listed.some((row) => row[4])) columns.push({ label: "why", left: true, value: (row) => row[4], text: (row) => row[4] });
  const list = Report.table(columns, events.listed, { caption: events.all > events.listed.length ? `The last ${Report.number(events.listed.length)} of ${Report.number(events.all)}` : "All of them, the last first", key: "events", most: 15, filter: "Filter by device or reason", sort: 2, up: false });
  return Report.section("lost", title, tiles, attacked, element("h3", {}, "By round"), heat, element("div", { class: "columns wide" }, list, often));
};

function malicious({ sent, stopped = 0, honest = 0 }) {
  if (!sent) return null;
  return Report.element("p", {}, `This simulation has malicious devices. Of the ${Report.number(sent)} updates that they sent, ${Report.number(stopped)} were refused or discarded (${Math.round((100 * stopped) / sent)} %), and so were ${Report.number(honest)} of honest devices.`);
}

Report.privacy = function (run) {
  const { element } = Report, { allowed, epsilon } = run.privacy, secure = allowed.secure_aggregation === "true";
  const differential = epsilon !== null || "epsilon" in allowed || "noise_multiplier" in allowed;
  const parts = [], named = (key) => (SUMS.includes(key) ? secure : differential);
  if (differential) {
    const at = allowed.delta ? ` at delta = ${allowed.delta}` : "";
    parts.push(element("p", {}, epsilon === null ? "Differential privacy: nothing is on record yet." : `Differential privacy: the run has spent epsilon = ${Report.number(epsilon)}${allowed.epsilon ? ` of ${allowed.epsilon}` : ""}${at}.`));
    if (epsilon !== null && +allowed.epsilon > 0) parts.push(element("div", { class: "budget" }, Report.bar(epsilon / +allowed.epsilon, `${Math.round((100 * epsilon) / +allowed.epsilon)} % of the budget`)));
  } else parts.push(element("p", {}, "No differential privacy: the experiment sets neither privacy.epsilon nor privacy.noise_multiplier, and models can tell something of single devices."));
  parts.push(element("p", {}, secure ? "Secure aggregation: the server learned the sums of cohorts, and no single update." : "No secure aggregation: devices keep their data, and the server sees their single updates, from which something of the data can be computed."));
  const keys = Object.entries(allowed).filter(([key]) => named(key));
  if (keys.length) parts.push(Report.table([{ label: "key of [privacy]", left: true, value: (row) => row[0], text: (row) => row[0] }, { label: "value", left: true, value: (row) => row[1], text: (row) => row[1] }], keys, { label: "Privacy of the experiment" }));
  return Report.section("privacy", "Privacy", ...parts);
};
const SUMS = ["secure_aggregation", "threshold", "min_cohort"]; // keys of secure aggregation

// The keys in which runs differ.
Report.differences = function (runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.experiment)))];
  return keys.filter((key) => new Set(runs.map((run) => run.experiment[key])).size > 1);
};

Report.experiment = function (run) {
  const { element } = Report, different = new Set(Report.differences(Report.data.runs));
  const copy = element("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(run.command); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); copy.textContent = "Press Ctrl+C"; }
  } }, "Copy");
  const code = element("code", {}, run.command);
  const rows = Object.entries(run.experiment), value = { label: "value", left: true, value: (row) => row[1], text: (row) => row[1] };
  const others = { label: "in other runs", left: true, value: (row) => row[0], text: (row) => {
    const found = [...new Set(Report.data.runs.map((one) => one.experiment[row[0]] ?? "not set"))].filter((one) => one !== row[1]);
    return found.slice(0, 4).join("; ") + (found.length > 4 ? `; ${found.length - 4} more` : "");
  } };
  const key = { label: "key", left: true, value: (row) => row[0], text: (row) => row[0], cell: (row) => element(different.has(row[0]) ? "b" : "span", {}, row[0]) };
  return Report.section("experiment", "Experiment",
    element("p", { class: "quiet" }, "The same command with the same experiment gives the same bits on the same kind of machine."),
    element("div", { class: "command" }, code, copy),
    element("div", { class: "columns" },
      Report.table(different.size ? [key, value, others] : [key, value], [...rows.filter((row) => different.has(row[0])), ...rows.filter((row) => !different.has(row[0]))], { caption: different.size ? "Keys, those that differ between runs first" : "Keys", key: "keys", most: 14, filter: "Filter keys" }),
      Report.table([{ label: "name", left: true, value: (row) => row[0], text: (row) => row[0] }, value], Object.entries(run.environment), { caption: "Environment" })),
    element("details", {}, element("summary", {}, "experiment.toml"), element("pre", {}, run.toml)));
};
