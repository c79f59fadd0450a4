"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const element = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Numbers as people write them; the raw value of everything that is shown stays in data-value.
function scaled(value, units, base) {
  let k = 0;
  while (k < units.length - 1 && Math.abs(value) >= base) { value /= base; k += 1; }
  return [value, units[k]];
}
const digits = (value, most) => value.toLocaleString("en-US", { maximumFractionDigits: most, minimumFractionDigits: 0 });
const show = {
  count: (value) => digits(value, 1),
  bytes: (value) => { const [n, unit] = scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024); return `${digits(n, 1)} ${unit}`; },
  seconds: (value) => value >= 1 ? `${digits(value, 2)} s` : value >= 1e-3 ? `${digits(value * 1e3, 2)} ms` : `${digits(value * 1e6, 0)} µs`,
  flops: (value) => { const [n, unit] = scaled(value, ["", "K", "M", "G", "T", "P", "E"], 1000); return `${digits(n, 1)} ${unit}FLOP`; },
  share: (value) => `${digits(value * 100, value < 0.1 ? 1 : 0)} %`,
  ratio: (value) => digits(value, 3),
  large: (value) => { const [n, unit] = scaled(value, ["", "K", "M", "B", "T"], 1000); return `${digits(n, 2)}${unit}`; },
  shape: (value) => value ? value.join(" × ") : "–",
  words: (value) => value,
};
const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const sum = (values) => values.reduce((a, b) => a + b, 0);

function add(parent, tag, attributes = {}, text = "") {
  const child = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) child.setAttribute(name, value);
  child.textContent = text;
  parent.appendChild(child);
  return child;
}

// Summary
function card(id, label, kind, value, detail) {
  const box = add(element("cards"), "div", { class: "card", id: `card-${id}` });
  add(box, "div", { class: "label" }, label);
  add(box, "div", { class: "value", "data-value": value }, show[kind](value));
  add(box, "div", { class: "detail" }, detail);
}

function summary() {
  const { model, mesh, machine, step, balance, ranks, options } = report;
  const nodes = mesh.nodes === 1 ? "one node" : `${digits(mesh.nodes, 0)} nodes`;
  const ranksText = mesh.ranks === 1 ? "one rank" : `${digits(mesh.ranks, 0)} ranks`;
  element("title").textContent = document.title;
  element("subtitle").textContent =
    `${show.large(model.parameters)} parameters, ${digits(model.matrices, 0)} matrices for Muon; ${ranksText} on ${nodes} ` +
    `(${machine.title}); replicas=${options.replicas}, comm_dtype=${options.comm_dtype}, scheme=${options.scheme}`;
  card("step", "Optimizer step", "seconds", step.seconds,
    `on rank ${step.rank}: ` + [["orthogonalise", "orthogonalising"], ["local", "with local matrices"], ["elementwise", "momentum and update"],
      ["exchange_waited_for", "for exchanges"], ["others_waited_for", "for other ranks"], ["adamw", "AdamW"], ["host", "for the host"]]
      .filter(([part]) => step[part] > 0).map(([part, name]) => `${show.seconds(step[part])} ${name}`).join(" + "));
  card("share", "Share of a training step", "share", step.share,
    `${show.large(step.tokens_per_step)} tokens, ${show.large(step.tokens_per_rank)} per rank, at ${show.share(step.mfu)} of the peak take ${show.seconds(step.training_seconds)}`);
  const memory = most(ranks.memory);
  card("memory", "Memory of the fullest rank", "bytes", memory,
    `${show.bytes(most(ranks.adamw_alone))} with AdamW alone; the device has ${show.bytes(machine.memory_bytes)}`);
  card("between", "Sent between nodes", "bytes", most(ranks.sent_between), `by the rank that sends most; ${show.bytes(most(ranks.sent_inside))} inside nodes`);
  card("balance", "Heaviest rank ÷ mean", "ratio", balance.heaviest_over_mean,
    `${digits(balance.heaviest_over_bound, 3)} of what any plan must take; ${digits(balance.idle_ranks, 0)} ranks own nothing`);
  card("peers", "Peers of a rank", "count", most(ranks.peers), "at most, in all exchanges of a step");
  card("flops", "Orthogonalisation", "flops", step.flops, "on all ranks together");
  card("waves", "Waves", "count", most(report.stages.map((stage) => stage.waves)),
    `at most ${digits(most(report.stages.map((stage) => stage.waves_in_flight)), 0)} in flight`);
  report.advice.forEach((sentence) => add(element("advice"), "li", {}, sentence));
  element("advice-section").hidden = report.advice.length === 0;
  element("command").textContent = report.command;
  element("sources").textContent = `Model: ${model.source || model.name}. Machine: ${machine.source || machine.name}. Plan: ` +
    report.stages.map((stage) => stage.digest.slice(0, 12)).join(", ");
}

// Figures
const METRICS = {
  orthogonalise_seconds: ["Seconds of orthogonalising", "seconds"],
  seconds: ["Seconds until the step ends", "seconds"],
  waited_seconds: ["Seconds of waiting for exchanges", "seconds"],
  memory: ["Memory", "bytes"],
  exchange_buffers: ["Exchange buffers", "bytes"],
  sent_between: ["Bytes sent between nodes", "bytes"],
  sent_inside: ["Bytes sent inside nodes", "bytes"],
  matrices: ["Matrices that it orthogonalises", "count"],
  flops: ["FLOPs", "flops"],
  peers: ["Peers", "count"],
};
const HUES = { momentum: "#7a8794", orthogonalise: "#2f7ed8", update: "#56a86b", adamw: "#b070c8", gather: "#e39a2d", scatter: "#d6604d" };

const DRAWN = { responsive: true, displayModeBar: false };
const ZOOMABLE = { responsive: true, displayModeBar: true, displaylogo: false, modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d"]] };
function layout(more) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), family: "system-ui, sans-serif", size: 13 },
    margin: { l: 10, r: 10, t: 10, b: 10 }, hoverlabel: { bgcolor: style("--panel"), bordercolor: style("--line"), font: { color: style("--text") } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, dragmode: false, ...rest,
  };
}
const colours = () => [[0, style("--low")], [1, style("--high")]];

// Ticks in the unit of the largest value, so that an axis or a bar reads "0, 10, 20 ms".
function ticks(low, high, kind) {
  const base = kind === "bytes" ? 1024 : 1000;
  const start = kind === "seconds" ? 1e-6 : 1;
  let unit = start;
  while (high / unit >= base && unit < start * base ** 5) unit *= base;
  const span = (high - low) / unit || 1;
  const rough = span / 4;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const gap = unit * ten * ([1, 2, 5, 10].find((factor) => factor * ten >= rough) || 10);
  const values = [];
  for (let k = Math.ceil(low / gap - 1e-9); k * gap <= high + gap * 1e-6; k += 1) values.push(k * gap || 0);  // || 0: no "-0"
  return { tickmode: "array", tickvals: values, ticktext: values.map((value) => show[kind](value)) };
}

// Ranks fill rows in order; a row is a node as long as the map stays readable, else several nodes.
function rankGrid() {
  const { ranks, ranks_per_node } = report.mesh;
  let columns = Math.min(ranks_per_node, ranks);
  while (ranks / columns > 2 * columns && columns * 2 <= ranks) columns *= 2;
  return { columns, rows: Math.ceil(ranks / columns) };
}

function drawRanks() {
  const metric = element("metric").value;
  const [label, kind] = METRICS[metric];
  const values = report.ranks[metric];
  const { columns, rows } = rankGrid();
  const z = [], text = [];
  for (let row = 0; row < rows; row += 1) {
    z.push([]); text.push([]);
    for (let column = 0; column < columns; column += 1) {
      const rank = row * columns + column;
      z[row].push(rank < values.length ? values[rank] : null);
      text[row].push(rank < values.length ? `rank ${rank}, node ${Math.floor(rank / report.mesh.ranks_per_node)}<br>${show[kind](values[rank])}` : "");
    }
  }
  const low = Math.min(...z.flat().filter((value) => value !== null)), high = most(values);
  element("metric-range").textContent = `from ${show[kind](low)} to ${show[kind](high)}; mean ${show[kind](sum(values) / values.length)}`;
  element("metric-range").dataset.value = JSON.stringify([low, high]);
  const height = Math.max(180, Math.min(520, 26 * rows + 60));
  Plotly.react("ranks", [{
    type: "heatmap", z, text, hoverinfo: "text", colorscale: colours(), zmin: low === high ? 0 : low, zmax: (low === high ? 2 * high : high) || 1, xgap: rows > 32 ? 0 : 1, ygap: rows > 32 ? 0 : 1,
    colorbar: { ...ticks(low, high || 1, kind), thickness: 12, outlinewidth: 0 },
  }], layout({
    height,
    xaxis: { title: { text: `rank within the row of ${columns}` }, showgrid: false, zeroline: false, ...(columns <= 16 ? { dtick: 1 } : {}) },
    yaxis: { title: { text: rows > 3 ? "first rank of the row" : "row" }, autorange: "reversed", showgrid: false, zeroline: false, tickmode: "array",
      ...rowTicks(rows, columns) },
  }), DRAWN);
  element("ranks").setAttribute("aria-label", `Heat map: ${label} of every rank, ${element("metric-range").textContent}`);
}
function rowTicks(rows, columns) {
  const gap = Math.max(1, Math.ceil(rows / 12));
  const tickvals = Array.from({ length: Math.ceil(rows / gap) }, (_, k) => k * gap);
  return { tickvals, ticktext: tickvals.map((row) => digits(row * columns, 0)) };
}

function drawMemory() {
  const kinds = report.memory.filter((kind) => kind.kind !== "total");
  const hues = ["#2f7ed8", "#7db7ff", "#56a86b", "#b070c8", "#e39a2d", "#d6604d", "#7a8794"];
  const traces = kinds.map((kind, k) => ({
    type: "bar", orientation: "h", name: kind.kind.replaceAll("_", " ") + (kind.estimated ? " (estimate)" : ""), y: ["Muon", "AdamW alone"],
    x: [kind.most, kind.adamw_most], marker: { color: hues[k % hues.length] }, hovertemplate: "%{fullData.name}: %{customdata}<extra></extra>",
    customdata: [show.bytes(kind.most), show.bytes(kind.adamw_most)],
  }));
  const high = Math.max(sum(kinds.map((kind) => kind.most)), sum(kinds.map((kind) => kind.adamw_most)));
  Plotly.react("memory", traces, layout({
    barmode: "stack", height: 300, xaxis: { ...ticks(0, high, "bytes"), range: [0, high * 1.03] }, yaxis: { autorange: "reversed" },
    legend: { orientation: "h", y: -0.25, traceorder: "normal" },
  }), DRAWN);
  element("memory").setAttribute("aria-label", "Bars: memory by kind, with Muon and with AdamW alone");
}

function drawTraffic() {
  const stage = Number(element("stage").value);
  const { bytes, ranks_per_block } = report.traffic[stage];
  const first = report.stages[stage].first_rank;
  const names = bytes.map((_, k) => `ranks ${first + k * ranks_per_block}–${Math.min(first + (k + 1) * ranks_per_block, report.stages[stage].last_rank + 1) - 1}`);
  const text = bytes.map((row, from) => row.map((value, to) => `${names[from]} to ${names[to]}<br>${show.bytes(value)}`));
  const high = most(bytes.map(most));
  const gap = Math.max(1, Math.ceil(names.length / 8));
  const places = names.map((_, k) => k).filter((k) => k % gap === 0);
  const labels = places.map((k) => digits(first + k * ranks_per_block, 0));
  Plotly.react("traffic", [{
    type: "heatmap", z: bytes, text, hoverinfo: "text", colorscale: colours(), zmin: 0, zmax: high || 1,
    colorbar: { ...ticks(0, high || 1, "bytes"), thickness: 12, outlinewidth: 0 },
  }], layout({
    height: 340,
    xaxis: { title: { text: `receiver, by its first rank (${ranks_per_block} ranks each)` }, tickmode: "array", tickvals: places, ticktext: labels, showgrid: false },
    yaxis: { title: { text: "sender" }, autorange: "reversed", tickmode: "array", tickvals: places, ticktext: labels, showgrid: false },
  }), DRAWN);
  element("traffic").setAttribute("aria-label", "Heat map: bytes between blocks of ranks in one step");
}

function drawTimeline() {
  const spans = report.timeline;
  const tracks = [...new Set(spans.map((span) => `rank ${span.rank} ${span.track}`))];
  const names = [...new Set(spans.map((span) => span.name))];
  const end = most(spans.map((span) => span.start + span.seconds));
  const traces = names.map((name) => {
    const chosen = spans.filter((span) => span.name === name);
    const key = Object.keys(HUES).find((hue) => name.toLowerCase().startsWith(hue));
    return {
      type: "bar", orientation: "h", name, y: chosen.map((span) => `rank ${span.rank} ${span.track}`), base: chosen.map((span) => span.start),
      x: chosen.map((span) => span.seconds), marker: { color: HUES[key] || "#7a8794", line: { width: 0.5, color: style("--back") } },
      text: chosen.map((span) => `${name}${span.wave === null ? "" : `, wave ${span.wave}`}<br>${show.seconds(span.seconds)} from ${show.seconds(span.start)}`),
      hoverinfo: "text", textposition: "none",
    };
  });
  Plotly.react("timeline", traces, layout({
    barmode: "overlay", height: 130 + 46 * tracks.length, bargap: 0.25, dragmode: "zoom",
    xaxis: { ...ticks(0, end, "seconds"), range: [0, end * 1.01] }, margin: { l: 10, r: 10, t: 40, b: 10 },
    yaxis: { categoryorder: "array", categoryarray: tracks, autorange: "reversed", fixedrange: true }, legend: { orientation: "h", y: -0.2 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--accent") },
  }), ZOOMABLE);
  element("timeline").setAttribute("aria-label", "Timeline: momentum, gather, orthogonalise, scatter, update and AdamW of two ranks");
}

// Tables
const CHOICES = [["label", "", "words"], ["seconds", "step", "seconds"], ["share", "share", "share"], ["heaviest_over_mean", "heaviest ÷ mean", "ratio"],
  ["bytes_sent", "sent", "bytes"], ["bytes_between", "between nodes", "bytes"], ["most_peers", "peers", "count"], ["buffers", "buffers", "bytes"],
  ["memory", "memory", "bytes"]];
const PARAMS = [["name", "parameter", "words"], ["shape", "shape", "shape"], ["count", "count", "count"], ["optimizer", "by", "words"],
  ["matrices", "matrices", "count"], ["matrix_shape", "each", "shape"], ["layout", "layout", "words"], ["how", "how", "words"],
  ["owners", "owners", "count"], ["flops", "FLOPs", "flops"], ["bytes_sent", "sent", "bytes"]];
const EXCHANGES = [["wave", "wave", "count"], ["kind", "", "words"], ["matrices", "matrices", "count"], ["seconds", "time", "seconds"],
  ["bytes_inside", "inside nodes", "bytes"], ["bytes_between", "between nodes", "bytes"], ["most_peers", "peers", "count"],
  ["messages", "messages", "count"], ["mean_message", "mean message", "bytes"], ["largest_message", "largest", "bytes"]];
const MEASURED = [["label", "", "words"], ["predicted", "predicted", "seconds"], ["measured", "measured", "seconds"], ["ratio", "predicted ÷ measured", "ratio"]];

const rank = (value) => Array.isArray(value) ? value.reduce((a, b) => a * b, 1) : value === null ? -1 : value;
function fill(id, columns, rows) {
  const table = element(id);
  table.replaceChildren();
  const head = add(add(table, "thead"), "tr");
  const body = add(table, "tbody");
  columns.forEach(([key, title, kind], k) => {
    const cell = add(head, "th", { scope: "col", "aria-sort": "none", class: kind === "words" ? "words" : "" });
    add(cell, "button", { type: "button" }, title || key).addEventListener("click", () => sort(table, rows, columns, k));
  });
  rows.forEach((row) => body.appendChild(line(row, columns)));
}
function line(row, columns) {
  const tr = document.createElement("tr");
  if (row.chosen) tr.className = "chosen";
  columns.forEach(([key, , kind], k) => {
    if (row.refused && k > 0) return;
    const value = row[key];
    add(tr, "td", { "data-value": JSON.stringify(value), class: kind === "words" ? "words" : "" }, value === null ? "–" : show[kind](value));
  });
  if (row.refused) add(tr, "td", { class: "refused", colspan: columns.length - 1 }, row.refused);
  return tr;
}
function sort(table, rows, columns, k) {
  const cells = [...table.querySelectorAll("th")];
  const order = cells[k].getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
  cells.forEach((cell, place) => cell.setAttribute("aria-sort", place === k ? order : "none"));
  const key = columns[k][0], sign = order === "ascending" ? 1 : -1;
  const sorted = [...rows].sort((a, b) => { const x = rank(a[key]), y = rank(b[key]); return sign * (typeof x === "string" ? x.localeCompare(y) : x - y); });
  table.querySelector("tbody").replaceChildren(...sorted.map((row) => line(row, columns)));
  if (table.id === "params") search();
}
function search() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  const rows = element("params").querySelectorAll("tbody tr");
  rows.forEach((row) => {
    const text = row.textContent.toLowerCase().replaceAll(" ", "");
    row.hidden = !words.every((word) => text.includes(word));
    found += row.hidden ? 0 : 1;
  });
  element("found").textContent = `${digits(found, 0)} of ${digits(rows.length, 0)} rows`;
}

// Theme
function draw() { drawRanks(); drawMemory(); drawTraffic(); drawTimeline(); }
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  element("theme").textContent = theme === "dark" ? "Light" : "Dark";
  element("theme").setAttribute("aria-label", `Use ${theme === "dark" ? "light" : "dark"} colours`);
  draw();
}

summary();
Object.entries(METRICS).forEach(([name, [label]]) => add(element("metric"), "option", { value: name }, label));
report.traffic.forEach((_, stage) => add(element("stage"), "option", { value: stage }, String(stage)));
element("traffic-choice").hidden = report.traffic.length === 1;
fill("params", PARAMS, report.params);
fill("exchanges", EXCHANGES, report.exchanges);
for (const [name, columns] of [["choices", CHOICES], ["meshes", CHOICES], ["measured", MEASURED]]) {
  const rows = report[name] || [];
  element(`${name}-section`).hidden = rows.length === 0;
  fill(name, columns, rows.map((row) => name === "measured" ? { ...row, ratio: row.predicted / row.measured } : row));
}
search();
element("metric").addEventListener("change", drawRanks);
element("stage").addEventListener("change", drawTraffic);
element("search").addEventListener("input", search);
element("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
element("copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(report.command); element("copy").textContent = "Copied"; } catch { getSelection().selectAllChildren(element("command")); }
});
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
