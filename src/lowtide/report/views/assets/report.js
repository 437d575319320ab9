// --- the page of one report ------------------------------------------------------------------------------------------

const data = JSON.parse(byId("payload").textContent);
const model = makeModel(data);
const tooltip = makeTooltip(byId("tooltip"));
const state = { space: "device", moment: data.peaks.device, role: null, query: "", group: true, cells: [], current: -1 };
let view = null;

const isPeak = () => state.moment === data.peaks[state.space];
const byRole = (moment) => model.series(state.space).roles.map(({ role, values }) => [role, values[moment]]);
const totalAt = (moment) => model.series(state.space).totals[moment] ?? 0;
const momentText = (moment) => `Moment ${count(moment + 1)} of ${count(model.numMoments)}`;

// --- timeline

function drawTimeline() {
  const series = model.series(state.space);
  const peak = data.peaks[state.space];
  view = drawChart(byId("timeline"), {
    series, styles: data.styles, peak, peakBytes: totalAt(peak), highest: series.totals.reduce((a, b) => Math.max(a, b), 1),
    capacity: state.space === "device" ? data.capacity : null,
  });
  view.cursor = svg("line", { class: "cursor", y1: view.plot.top, y2: view.plot.bottom, visibility: "hidden" });
  view.selected = svg("line", { class: "selected", y1: view.plot.top - 4, y2: view.plot.bottom });
  view.handle = svg("path", { class: "handle" });
  view.chart.append(view.cursor, view.selected, view.handle);
}

function markMoment() {
  const x = view.x(state.moment + 0.5), y = view.plot.bottom;
  view.selected.setAttribute("x1", x);
  view.selected.setAttribute("x2", x);
  view.handle.setAttribute("d", `M${x} ${y}l5 7h-10z`);
  const chart = byId("timeline");
  chart.setAttribute("aria-valuemax", model.numMoments);
  chart.setAttribute("aria-valuenow", state.moment + 1);
  chart.setAttribute("aria-valuetext", `${momentText(state.moment)}, ${model.momentName(state.moment)}, ${formatBytes(totalAt(state.moment))}`);
  byId("to-peak").disabled = isPeak();
  drawReadout();
}

function drawReadout() {
  const total = totalAt(state.moment);
  const lost = byRole(state.moment).find(([role]) => role === "fragmentation")?.[1] ?? 0;
  const name = model.momentName(state.moment);
  byId("readout").replaceChildren(
    element("b", {}, momentText(state.moment)), isPeak() ? " (the peak)" : "", name ? ` · ${name}` : "", " · ",
    element("b", { id: "alive", "data-bytes": total }, formatBytes(total)),
    lost ? `, of which ${formatBytes(lost)} fragmentation` : "",
  );
}

function hoverTimeline(event) {
  const moment = view.momentAt(event.clientX), x = view.x(moment + 0.5);
  view.cursor.setAttribute("x1", x);
  view.cursor.setAttribute("x2", x);
  view.cursor.setAttribute("visibility", "visible");
  tooltip.show(event.clientX, event.clientY,
    element("div", { class: "title" }, formatBytes(totalAt(moment))),
    element("div", { class: "quiet" }, [momentText(moment), model.momentName(moment)].filter(Boolean).join(" · ")),
    ...roleLines(byRole(moment), data.styles));
  if (event.buttons & 1) select(moment);
}

function setUpTimeline() {
  const chart = byId("timeline");
  chart.addEventListener("pointermove", hoverTimeline);
  chart.addEventListener("pointerdown", (event) => { chart.setPointerCapture(event.pointerId); select(view.momentAt(event.clientX)); });
  chart.addEventListener("pointerleave", () => { view.cursor.setAttribute("visibility", "hidden"); tooltip.hide(); });
  chart.addEventListener("keydown", (event) => {
    const jump = Math.max(1, Math.round(model.numMoments / 50)), step = event.shiftKey ? jump : 1;
    const moves = {
      ArrowLeft: -step, ArrowDown: -step, ArrowRight: step, ArrowUp: step, PageDown: -jump, PageUp: jump, Home: -Infinity, End: Infinity,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(state.moment + moves[event.key]);
  });
  byId("to-peak").addEventListener("click", () => select(data.peaks[state.space]));
  byId("previous").addEventListener("click", () => select(state.moment - 1));
  byId("next").addEventListener("click", () => select(state.moment + 1));
}

// --- legend

function drawLegend() {
  const total = totalAt(state.moment);
  const rows = byRole(state.moment).reverse().map(([role, bytes]) => {
    const button = element("button", { type: "button", class: bytes ? null : "none", "aria-pressed": String(state.role === role), "data-role": role, title: `Show only ${role} in the table` },
      swatch(data.styles[role]), element("span", { class: "name" }, role), element("span", {}, formatBytes(bytes)),
      element("span", { class: "share" }, percent(bytes, total)));
    button.addEventListener("click", () => { state.role = state.role === role ? null : role; drawLegend(); drawTable(); byId("legend").querySelector(`[data-role="${CSS.escape(role)}"]`)?.focus(); });
    return button;
  });
  byId("legend").replaceChildren(...rows, element("div", { class: "total" }, element("i"), element("span", {}, "total"), element("span", {}, formatBytes(total)), element("span")));
}

// --- treemap

function drawMap() {
  const items = model.alive(state.space, state.moment);
  state.cells = drawTreemap(byId("treemap"), grouped(items), data.styles);
  state.current = -1;
  state.cells.forEach(({ node, item }, at) => {
    node.id = `cell-${at}`;
    node.addEventListener("pointermove", (event) => tooltip.show(event.clientX, event.clientY, ...itemLines(item)));
    node.addEventListener("pointerenter", () => table.rowNode(item.id)?.classList.add("chosen"));
    node.addEventListener("pointerleave", () => { tooltip.hide(); if (table.chosen() !== item.id) table.rowNode(item.id)?.classList.remove("chosen"); });
    node.addEventListener("click", () => chooseFromMap(item));
  });
  markChosen();
  byId("treemap-sum").textContent = `${plural(items.length, "buffer")}, ${formatBytes(sumOf(items))}`;
}

const grouped = (items) => (state.group ? groupBuffers(items) : items);

function itemLines(item) {
  const array = item.dtype ? `${item.dtype}[${item.shape}]` : "";
  const facts = [item.role, item.phase, item.count ? `${formatBytes(item.each)} each` : "", array, item.source].filter(Boolean).join(" · ");
  return [element("div", { class: "title" }, formatBytes(item.bytes)), element("div", {}, item.label), element("div", { class: "quiet" }, facts)];
}

function chooseFromMap(item) {
  if (item.id === null) { state.role = item.role; drawLegend(); drawTable(); return; }
  if (state.role && state.role !== item.role) { state.role = null; drawLegend(); }
  if (state.query) { state.query = byId("filter").value = ""; }
  table.choose(item.id);
  drawTable(true);
  markChosen();
  const row = table.rowNode(item.id), scroll = byId("table-scroll");
  if (row) scroll.scrollTop = row.offsetTop - scroll.clientHeight / 3;
}

function markChosen() {
  for (const { node, item } of state.cells) {
    const chosen = item.id !== null && item.id === table.chosen();
    node.classList.toggle("chosen", chosen);
    node.setAttribute("aria-selected", String(chosen));
  }
}

function setUpMap() {
  const map = byId("treemap");
  const move = (step) => {
    state.cells[state.current]?.node.classList.remove("current");
    state.current = Math.max(0, Math.min(state.cells.length - 1, state.current + step));
    const found = state.cells[state.current];
    if (!found) return;
    found.node.classList.add("current");
    map.setAttribute("aria-activedescendant", found.node.id);
    const box = found.node.getBoundingClientRect();
    tooltip.show(box.left + Math.min(box.width / 2, 60), box.top + Math.min(box.height, 40), ...itemLines(found.item));
  };
  map.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key in steps) { event.preventDefault(); move(steps[event.key]); }
    if ((event.key === "Enter" || event.key === " ") && state.cells[state.current]) { event.preventDefault(); chooseFromMap(state.cells[state.current].item); }
  });
  map.addEventListener("blur", () => { state.cells[state.current]?.node.classList.remove("current"); state.current = -1; tooltip.hide(); });
}

// --- table

function lifetime(item) {
  const scale = 100 / model.numMoments;
  const bar = element("i", { style: { left: `${item.start * scale}%`, width: `${(item.length + 1) * scale}%` } });
  return element("td", { title: `moments ${count(item.start + 1)} to ${count(item.end + 1)}` }, element("span", { class: "life" }, bar));
}

function ownerCell(item) {
  return element("td", { class: "owner", title: item.path || item.scope || item.label },
    element("button", { type: "button", "aria-expanded": String(table.chosen() === item.id) }, item.label));
}

const COLUMNS = [
  { key: "bytes", name: "Bytes", right: true, value: (i) => i.bytes, cell: (i) => cell(formatBytes(i.bytes), "right") },
  { key: "role", name: "Role", value: (i) => i.role, cell: (i) => element("td", {}, swatch(data.styles[i.role]), i.role) },
  { key: "phase", name: "Phase", value: (i) => i.phase, cell: (i) => cell(i.phase) },
  { key: "owner", name: "Owner", value: (i) => i.label, cell: ownerCell },
  { key: "dtype", name: "Type", value: (i) => i.dtype, cell: (i) => cell(i.dtype) },
  { key: "shape", name: "Shape", value: (i) => i.shape, cell: (i) => cell(i.shape.replaceAll(",", " × ")) },
  { key: "padding", name: "Padding", right: true, value: (i) => i.padding, cell: (i) => cell(i.padding ? formatBytes(i.padding) : "", "right") },
  { key: "source", name: "Source", value: (i) => i.source, cell: (i) => element("td", { class: "source", title: i.source || null }, shortSource(i.source)) },
  { key: "length", name: "Lifetime", value: (i) => i.length, cell: lifetime },
];

function details(item) {
  const facts = [
    ["Bytes", item.count ? `${count(item.count)} buffers of ${formatBytes(item.each)}` : ""], ["Path", item.path], ["Scope", item.scope], ["Operation", item.operation], ["Source", item.source],
    ["Lifetime", `${item.spread ? "between " : ""}moments ${count(item.start + 1)} ${item.spread ? "and" : "to"} ${count(item.end + 1)} of ${count(model.numMoments)}`],
  ];
  return element("dl", {}, ...facts.filter(([, text]) => text).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

const table = makeTable({ table: byId("table"), more: byId("more") }, COLUMNS, { key: "bytes", down: true }, {
  detail: details,
  onRow: (item, row) => row.addEventListener("click", () => { table.choose(table.chosen() === item.id ? null : item.id); markChosen(); }),
});

function drawTable(keep) {
  const alive = model.alive(state.space, state.moment);
  const mine = state.role ? alive.filter((item) => item.role === state.role) : alive;
  const rows = filterRows(mine, state.query, (i) => [i.path, i.scope, i.operation, i.source, i.role, i.phase, i.dtype, i.shape, `${i.dtype}[${i.shape}]`, i.label]);
  table.setRows(grouped(rows), keep);
  const some = rows.length !== alive.length;
  const sum = byId("table-sum");
  sum.dataset.bytes = sumOf(rows);
  const lines = grouped(rows).length;
  const folded = lines < rows.length ? ` in ${plural(lines, "row")}` : "";
  sum.textContent = `${some ? `${count(rows.length)} of ` : ""}${plural(alive.length, "buffer")}${folded}, ${formatBytes(sumOf(rows))}`;
}

// --- all of it

function select(moment) {
  const next = Math.max(0, Math.min(model.numMoments - 1, moment));
  if (next === state.moment) return;
  state.moment = next;
  drawMoment();
}

let pending = false;

/** Move the marker at once; draw the slower parts at most once per frame. */
function drawMoment() {
  markMoment();
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawLegend(); drawMap(); drawTable(); });
}

function drawAll() {
  drawTimeline();
  markMoment();
  drawLegend();
  drawMap();
  drawTable();
}

function setUpSpaces() {
  byId("space-switch").hidden = !data.totals.host;
  for (const input of byId("space-switch").querySelectorAll("input")) {
    input.addEventListener("change", () => {
      Object.assign(state, { space: input.value, moment: data.peaks[input.value], role: null });
      table.choose(null);
      drawAll();
    });
  }
}

byId("app").hidden = false;
byId("static").hidden = true;
setUpTheme(byId("theme"), drawAll);
setUpSpaces();
setUpTimeline();
setUpMap();
byId("group").addEventListener("change", (event) => { state.group = event.target.checked; table.choose(null); drawMap(); drawTable(); });
byId("filter").addEventListener("input", (event) => { state.query = event.target.value; drawTable(); });
drawAll();
