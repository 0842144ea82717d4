// The page's data to charts by uPlot. Every word of the data only ever becomes a text node.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const HEIGHT = 220;
const plots = [];
const view = { smooth: 0, log: new Set(), from: null, to: null, hidden: new Set() };
const whole = data.axes.reduce(([low, high], steps) => [Math.min(low, steps[0] ?? low), Math.max(high, steps.at(-1) ?? high)], [Infinity, -Infinity]);
if (whole[0] === whole[1]) whole[0] -= 1;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Distances between two marks of an axis of bytes.
const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);

// A number in few digits: what a person reads off an axis.
function short(value, bytes) {
  if (value === null || value === undefined) return "–";
  if (bytes) {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 5) { value /= 1024; unit += 1; }
    return `${Number(value.toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  return String(Number(value.toPrecision(4)));
}

// An exponential mean that begins at the first value, as TensorBoard smooths.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function inkOf(line, number) {
  const several = data.runs > 1;
  return { stroke: colour(`--c${(several ? line.run : number) % 8}`), dash: DASHES[several ? (line.sparse ? 1 : 0) + 2 * (Math.floor(line.run / 8) % 2) : line.sparse ? 1 : Math.floor(number / 8) % 4] };
}

function drawing(chart, box, keys) {
  const log = view.log.has(chart.name);
  const plain = (values) => (log ? values.map((value) => (value !== null && value <= 0 ? null : value)) : values);
  const series = [{}], bands = [], tables = [];
  let column = 0;
  chart.lines.forEach((line, number) => {
    const { stroke, dash } = inkOf(line, number);
    const show = !view.hidden.has(`${chart.name}/${line.name}`);
    const columns = [data.axes[line.axis]];
    const add = (values, more) => { columns.push(plain(values)); series.push({ show, stroke, points: { show: false }, ...more }); column += 1; return column; };
    if (line.low) {
      const high = add(line.high, { stroke: "transparent", width: 0 });
      const low = add(line.low, { stroke: "transparent", width: 0 });
      bands.push({ series: [high, low], fill: `${stroke}2b` });
    }
    const few = line.y.length <= 60;
    if (view.smooth > 0 && !line.sparse) add(line.y, { stroke: `${stroke}55`, width: 1 });
    line.column = add(view.smooth > 0 && !line.sparse ? smoothed(line.y, view.smooth) : line.y, {
      width: 2, dash: line.sparse || data.runs > 1 ? dash : [], points: { show: line.sparse || few, size: line.sparse ? 7 : 4, fill: stroke, stroke },
    });
    tables.push(columns);
  });
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 200), height: HEIGHT, legend: { show: false }, series, bands,
    cursor: { sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false, dist: 5 }, bind: { dblclick: () => () => zoom(null, null) } },
    scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: log ? { distr: 3 } : { range: (_, low, high) => uPlot.rangeNum(low ?? 0, low || high ? high : 1, 0.08, true) } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? short(tick) : "")), size: 32 },
      { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick, chart.bytes))), size: chart.bytes ? 74 : 62, ...(chart.bytes ? { incrs: BYTES } : {}) },
    ],
    hooks: {
      setCursor: [(u) => label(u, chart, keys)],
      setSelect: [(u) => { if (u.select.width > 0) zoom(Math.round(u.posToVal(u.select.left, "x")), Math.round(u.posToVal(u.select.left + u.select.width, "x"))); }],
    },
  }, uPlot.join(tables), box);
  plot.setScale("x", range());
  label(plot, chart, keys);
  return plot;
}

// Values at the pointer, or the last ones; a line that was not measured there shows its nearest before.
function label(u, chart, keys) {
  const at = u.cursor.idx ?? u.data[0].length - 1;
  chart.lines.forEach((line, number) => {
    const values = u.data[line.column];
    let index = at;
    while (index > 0 && (values[index] === undefined || values[index] === null)) index -= 1;
    const spread = line.stride > 1 ? ` (mean of ${line.stride} steps)` : "";
    keys[number].lastChild.textContent = `${short(values[index], chart.bytes)} at ${data.unit ?? "step"} ${u.data[0][index]}${u.cursor.idx === null || u.cursor.idx === undefined ? "" : spread}`;
  });
}

function key(chart, line, number) {
  const button = make("button", "key");
  button.type = "button";
  const mark = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" })) mark.setAttribute(name, value);
  const stroke = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1: 1, y1: 5, x2: 25, y2: 5, "stroke-width": 2.5 })) stroke.setAttribute(name, value);
  mark.append(stroke);
  button.append(mark, make("span", "", line.name), make("b", "", ""));
  const id = `${chart.name}/${line.name}`;
  button.addEventListener("click", () => { if (!view.hidden.delete(id)) view.hidden.add(id); redraw(); });
  button.paint = () => {
    const ink = inkOf(line, number);
    stroke.setAttribute("stroke", ink.stroke);
    stroke.setAttribute("stroke-dasharray", ink.dash.join(" "));
    button.setAttribute("aria-pressed", String(!view.hidden.has(id)));
  };
  return button;
}

function card(chart) {
  const section = make("section", "chart");
  section.setAttribute("aria-label", chart.title);
  const head = make("header", "");
  head.append(make("h3", "", chart.title));
  if (chart.note) head.append(make("p", "", chart.note));
  const log = make("button", "quiet", "Log axis");
  log.type = "button";
  const positive = chart.lines.some((line) => line.y.some((value) => value > 0));
  log.hidden = !positive;
  log.addEventListener("click", () => { if (!view.log.delete(chart.name)) view.log.add(chart.name); redraw(); remember(); });
  head.append(log);
  const box = make("div", "plot");
  const keys = chart.lines.map((line, number) => key(chart, line, number));
  const row = make("div", "keys");
  row.append(...keys);
  section.append(head, box, row);
  const entry = { plot: null, draw() {
    entry.plot?.destroy();
    log.setAttribute("aria-pressed", String(view.log.has(chart.name)));
    for (const one of keys) one.paint();
    entry.plot = drawing(chart, box, keys);
  } };
  new ResizeObserver(() => { if (entry.plot && box.clientWidth) entry.plot.setSize({ width: box.clientWidth, height: HEIGHT }); }).observe(box);
  plots.push(entry);
  return section;
}

function redraw() { for (const entry of plots) entry.draw(); }
function range() { return { min: view.from ?? whole[0], max: view.to ?? whole[1] }; }

function zoom(from, to) {
  [view.from, view.to] = from !== null && to !== null && to <= from ? [from, from + 1] : [from, to];
  for (const entry of plots) { entry.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); entry.plot.setScale("x", range()); }
  showView();
  remember();
}

// The view stands in the address, so that it outlives a renewal of the page and can be handed on.
function remember() {
  const state = new URLSearchParams();
  if (view.smooth) state.set("smooth", view.smooth);
  if ([...view.log].join(",") !== (data.log ?? []).join(",")) state.set("log", [...view.log].join(","));
  if (view.from !== null) state.set("from", view.from);
  if (view.to !== null) state.set("to", view.to);
  history.replaceState(null, "", state.size ? `#${state}` : location.pathname + location.search);
}

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (state.has(name) && Number.isFinite(Number(state.get(name))) ? Number(state.get(name)) : null);
  view.smooth = Math.min(Math.max(number("smooth") ?? 0, 0), 0.99);
  view.log = new Set((state.get("log") ?? (data.log ?? []).join(",")).split(",").filter(Boolean));
  [view.from, view.to] = [number("from"), number("to")];
}

const tools = document.getElementById("tools");
const [smooth, from, to, reset] = ["smooth", "from", "to", "reset"].map((id) => document.getElementById(id));
function showView() {
  smooth.value = view.smooth;
  [from.value, to.value] = [view.from ?? "", view.to ?? ""];
  [from.placeholder, to.placeholder] = whole.map(String);
  reset.hidden = view.from === null && view.to === null;
}

const charts = document.getElementById("charts");
if (charts && data.charts.length) {
  recall();
  charts.append(...data.charts.map(card));
  tools.hidden = false;
  showView();
  redraw();
  smooth.addEventListener("input", () => { view.smooth = Number(smooth.value); redraw(); remember(); });
  for (const box of [from, to]) box.addEventListener("change", () => zoom(from.value === "" ? null : Number(from.value), to.value === "" ? null : Number(to.value)));
  reset.addEventListener("click", () => zoom(null, null));
  addEventListener("theme", redraw);
}

// A page of a run that goes on is written anew every half a minute; while somebody looks closer it stays.
if (data.renew) setInterval(() => { if (!document.hidden && view.from === null && view.to === null && document.getElementById("renew").checked) location.reload(); }, data.renew * 1000);
