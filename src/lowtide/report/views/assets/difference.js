// --- the page of two reports -----------------------------------------------------------------------------------------

const data = JSON.parse(byId("payload").textContent);
const tooltip = makeTooltip(byId("tooltip"));
const state = { space: "device", query: "", changed: true, group: true };
const rows = data.rows.map((row, id) => ({ id, ...row, delta: row.after - row.before }));

// --- timelines, one above the other on one scale

const seriesOf = (side) => {
  const found = data.sides[side].series[state.space];
  const totals = found.moments.map((_, at) => found.roles.reduce((sum, { values }) => sum + values[at], 0));
  return { ...found, totals };
};

function drawSide(side, highest) {
  const node = byId(side), series = seriesOf(side), info = data.sides[side];
  byId(`${side}-title`).textContent = `${side === "before" ? "Before" : "After"}: ${formatBytes(info.totals[state.space])} on ${info.target}`;
  const view = drawChart(node, {
    series, styles: data.styles, peak: info.peaks[state.space], peakBytes: Math.max(0, ...series.totals), highest,
    capacity: state.space === "device" ? info.capacity : null,
  });
  node.onpointermove = (event) => {
    const moment = view.momentAt(event.clientX);
    let at = series.moments.findIndex((m) => m > moment);
    at = at < 0 ? series.moments.length - 1 : Math.max(0, at - 1);
    tooltip.show(event.clientX, event.clientY,
      element("div", { class: "title" }, formatBytes(series.totals[at])),
      element("div", { class: "quiet" }, [`${side}, moment ${count(series.moments[at] + 1)} of ${count(series.numMoments)}`, series.names[at]].filter(Boolean).join(" · ")),
      ...roleLines(series.roles.map(({ role, values }) => [role, values[at]]), data.styles));
  };
  node.onpointerleave = tooltip.hide;
}

function drawTimelines() {
  const highest = Math.max(1, ...["before", "after"].flatMap((side) => seriesOf(side).totals));
  for (const side of ["before", "after"]) drawSide(side, highest);
  const used = new Set(["before", "after"].flatMap((side) => seriesOf(side).roles.map(({ role }) => role)));
  byId("legend").replaceChildren(...data.roles.filter((role) => used.has(role)).map((role) => element("span", {}, swatch(data.styles[role]), role)));
}

// --- bars

function drawBars() {
  const roles = data.by_role[state.space].map(([role, before, after]) => ({ role, before, after, delta: after - before }));
  const low = Math.min(0, ...roles.map((r) => r.delta)), high = Math.max(0, ...roles.map((r) => r.delta)), span = Math.max(1, high - low);
  const zero = `${(-low / span) * 100}%`;
  const head = ["", "", "before", "after", "change"].map((name, at) => element("div", { class: `head${at > 1 ? " right" : ""}${at === 2 || at === 3 ? " wide" : ""}` }, name));
  const lines = roles.flatMap((r) => barLine(r, span, low, zero));
  const sum = roles.reduce((a, r) => ({ before: a.before + r.before, after: a.after + r.after }), { before: 0, after: 0 });
  const total = ["total", "", formatBytes(sum.before), formatBytes(sum.after), signedBytes(sum.after - sum.before)];
  byId("bars").replaceChildren(...head, ...lines, ...total.map((text, at) =>
    element("div", { class: `sum${at > 1 ? " right" : ""}${at === 2 || at === 3 ? " wide" : ""}`, "data-bytes": at === 4 ? sum.after - sum.before : null }, text)));
}

function barLine(row, span, low, zero) {
  const bar = element("i", {
    class: row.delta > 0 ? "more" : "less",
    style: { left: `${((Math.min(0, row.delta) - low) / span) * 100}%`, width: `${(Math.abs(row.delta) / span) * 100}%` },
  });
  const track = element("div", { class: "track", "aria-hidden": "true" }, ...(row.delta ? [bar] : []));
  track.style.setProperty("--zero", zero);
  return [
    element("div", { class: "rolename", title: row.role }, swatch(data.styles[row.role]), ` ${row.role}`), track,
    element("div", { class: "right wide" }, formatBytes(row.before)), element("div", { class: "right wide" }, formatBytes(row.after)),
    element("div", { class: `right ${deltaClass(row.delta)}` }, signedBytes(row.delta)),
  ];
}

const deltaClass = (delta) => (delta > 0 ? "up" : delta < 0 ? "down" : "");

// --- table

const size = (bytes, number) => (number === 0 && bytes === 0 ? "–" : formatBytes(bytes));
const COLUMNS = [
  { key: "delta", name: "Change", right: true, value: (r) => Math.abs(r.delta), cell: (r) => cell(signedBytes(r.delta), `right ${deltaClass(r.delta)}`) },
  { key: "before", name: "Before", right: true, value: (r) => r.before, cell: (r) => cell(size(r.before, r.count[0]), "right") },
  { key: "after", name: "After", right: true, value: (r) => r.after, cell: (r) => cell(size(r.after, r.count[1]), "right") },
  { key: "count", name: "Buffers", right: true, value: (r) => r.count[1], cell: (r) => cell(r.count[0] === r.count[1] ? count(r.count[0]) : `${count(r.count[0])} → ${count(r.count[1])}`, "right") },
  { key: "role", name: "Role", value: (r) => r.role, cell: (r) => element("td", {}, swatch(data.styles[r.role]), r.role) },
  { key: "owner", name: "Owner", value: (r) => r.owner, cell: (r) => element("td", { class: "owner", title: r.owner }, r.owner) },
  { key: "dtype", name: "Type", value: (r) => r.dtype, cell: (r) => cell(r.dtype) },
];
const table = makeTable({ table: byId("table"), more: byId("more") }, COLUMNS, { key: "delta", down: true }, {});

function groupRows(list) {
  return groupAlike(list, (r) => [r.role, r.dtype, r.before, r.after, r.count.join(), pattern(r.owner)], (same) => {
    const sum = (value) => same.reduce((total, row) => total + value(row), 0);
    return {
      ...same[0], before: sum((r) => r.before), after: sum((r) => r.after), delta: sum((r) => r.delta),
      count: [sum((r) => r.count[0]), sum((r) => r.count[1])], owner: counted(same.map((r) => r.owner)),
    };
  });
}

function drawTable() {
  const mine = rows.filter((row) => row.space === state.space);
  const changed = state.changed ? mine.filter((row) => row.delta) : mine;
  const shown = filterRows(changed, state.query, (r) => [r.owner, r.role, r.dtype]);
  table.setRows(state.group ? groupRows(shown) : shown);
  const delta = shown.reduce((sum, row) => sum + row.delta, 0);
  byId("table-sum").dataset.bytes = delta;
  byId("table-sum").textContent = `${count(shown.length)} of ${count(mine.length)} owners, ${signedBytes(delta)}`;
}

function drawAll() {
  drawTimelines();
  drawBars();
  drawTable();
}

byId("app").hidden = false;
byId("static").hidden = true;
setUpTheme(byId("theme"), drawAll);
byId("space-switch").hidden = !data.by_role.host.length;
for (const input of byId("space-switch").querySelectorAll("input")) {
  input.addEventListener("change", () => { state.space = input.value; drawAll(); });
}
byId("filter").addEventListener("input", (event) => { state.query = event.target.value; drawTable(); });
byId("group").addEventListener("change", (event) => { state.group = event.target.checked; drawTable(); });
byId("changed").addEventListener("change", (event) => { state.changed = event.target.checked; drawTable(); });
drawAll();
