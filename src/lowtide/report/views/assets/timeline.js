// --- stacked areas over the moments of the program -------------------------------------------------------------------

const MARGIN = { left: 64, right: 12, top: 26, bottom: 26 };
let charts = 0;

/** Indices of moments to draw, one per column: the moment with most bytes in the column's range (`low` to `high`). */
function pickColumns(totals, room) {
  const n = totals.length;
  const columns = Math.min(n, Math.max(1, Math.floor(room)));
  const picked = [];
  for (let c = 0; c < columns; c++) {
    const low = Math.floor((c * n) / columns), high = Math.floor(((c + 1) * n) / columns);
    let best = low;
    for (let at = low + 1; at < high; at++) if (totals[at] > totals[best]) best = at;
    picked.push({ low, high, best });
  }
  return picked;
}

/**
 * Draw a chart; return its scales, and a function from a pointer's x coordinate to a moment.
 * options: series, styles, peak (moment), capacity (bytes or null), highest (bytes the axis has to reach).
 */
function drawChart(node, options) {
  const { series, styles, peak } = options;
  const width = Math.max(200, node.clientWidth), height = node.clientHeight;
  const plot = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const limit = options.capacity && options.capacity <= options.highest * 1.5 ? options.capacity : null;
  const top = Math.max(1, options.highest, limit ?? 0);
  const x = (moment) => plot.left + ((plot.right - plot.left) * moment) / series.numMoments;
  const y = (bytes) => plot.bottom - ((plot.bottom - plot.top) * bytes) / top;
  const at = (index) => (index >= series.totals.length ? series.numMoments : index && series.moments ? series.moments[index] : index);
  const chart = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const id = ++charts;
  chart.append(textures(series.roles, styles, id), ...axes(plot, top, x, y, series.numMoments));
  drawAreas(chart, series, styles, pickColumns(series.totals, plot.right - plot.left), (i) => x(at(i)), y, id);
  if (limit) chart.append(...limitLine(plot, y(limit), limit));
  if (options.peakBytes) chart.append(...peakMark(plot, x(peak + 0.5), y(options.peakBytes), options.peakBytes, limit ? y(limit) : null));
  node.querySelector("svg")?.remove();
  node.prepend(chart);
  const momentAt = (clientX) => {
    const share = (clientX - node.getBoundingClientRect().left - plot.left) / (plot.right - plot.left);
    return Math.max(0, Math.min(series.numMoments - 1, Math.floor(share * series.numMoments)));
  };
  return { chart, plot, x, y, momentAt };
}

function textures(roles, styles, id) {
  const paths = { "/": "M0 6L6 0", "\\": "M0 0L6 6", x: "M0 6L6 0M0 0L6 6" };
  return svg("defs", {}, ...roles.map(({ role }, at) =>
    svg("pattern", { id: `texture-${id}-${at}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 6, height: 6, fill: styles[role].color }),
      ...(styles[role].texture ? [svg("path", { d: paths[styles[role].texture], stroke: "#fff", "stroke-opacity": 0.3, "stroke-width": 0.8 })] : []))));
}

function axes(plot, top, x, y, numMoments) {
  const nodes = [];
  for (const tick of byteTicks(top, plot.bottom - plot.top > 180 ? 5 : 3)) {
    nodes.push(svg("line", { class: "grid", x1: plot.left, x2: plot.right, y1: y(tick), y2: y(tick) }));
    nodes.push(svg("text", { x: plot.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
  }
  const room = (plot.right - plot.left) / 90;
  const step = niceStep(numMoments / Math.max(1, room));
  for (let moment = 0; moment <= numMoments; moment += step) {
    const anchor = moment === 0 ? "start" : moment + step > numMoments && x(moment) > plot.right - 20 ? "end" : "middle";
    nodes.push(svg("text", { x: x(moment), y: plot.bottom + 18, "text-anchor": anchor }, count(moment)));
  }
  return nodes;
}

function niceStep(rough) {
  const scale = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  return Math.max(1, [1, 2, 5, 10].map((f) => f * scale).find((s) => s >= rough));
}

function drawAreas(chart, series, styles, columns, x, y, id) {
  const lower = new Float64Array(columns.length);
  series.roles.forEach(({ role, values }, at) => {
    const upper = lower.map((base, c) => base + values[columns[c].best]);
    if (columns.some((c) => values[c.best])) {
      const d = `${steps(columns, upper, x, y, false)}${steps(columns, lower, x, y, true)}Z`;
      chart.append(svg("path", { d, fill: `url(#texture-${id}-${at})`, "data-role": role }));
    }
    lower.set(upper);
  });
  if (columns.length) chart.append(svg("path", { class: "total", d: steps(columns, lower, x, y, false) }));
}

/** SVG path of a staircase over the columns, from left to right, or from right to left if `back`. */
function steps(columns, values, x, y, back) {
  const parts = columns.map((column, c) => {
    const from = x(column.low).toFixed(2), to = x(column.high).toFixed(2), at = y(values[c]).toFixed(2);
    return back ? `L${to} ${at}H${from}` : `L${from} ${at}H${to}`;
  });
  return back ? parts.reverse().join("") : `M${parts.join("").slice(1)}`;
}

function limitLine(plot, y, bytes) {
  return [
    svg("line", { class: "limit", x1: plot.left, x2: plot.right, y1: y, y2: y }),
    svg("text", { class: "limit-text", x: plot.right, y: y - 6, "text-anchor": "end" }, `limit ${formatBytes(bytes)}`),
  ];
}

function peakMark(plot, x, y, bytes, limit) {
  const left = x > plot.left + (plot.right - plot.left) * 0.55;
  // If the label would overlap the line of the capacity, it moves below that line.
  const below = limit !== null && Math.abs(y - 8 - limit) < 18 ? 26 : 0;
  return [
    svg("circle", { class: "peak", cx: x, cy: y, r: 4 }),
    svg("text", { class: "peak-text", x: x + (left ? -8 : 8), y: y - 8 + below, "text-anchor": left ? "end" : "start" }, `peak ${formatBytes(bytes)}`),
  ];
}
