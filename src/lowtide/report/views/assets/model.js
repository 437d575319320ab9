// --- the data of a report: buffers, live buffers at a moment, bytes by role ------------------------------------------

const SPACES = ["device", "host"];

function makeModel(data) {
  const items = decodeBuffers(data).concat(decodeRest(data));
  const cache = {};
  return {
    items,
    numMoments: data.moments.length,
    momentName: (moment) => data.moments[moment],
    /** Buffers that are alive at a moment, largest first; the `bytes` of a folded row depend on the moment. */
    alive: (space, moment) => items
      .filter((item) => item.space === space && item.start <= moment && moment <= item.end)
      .map((item) => (item.steps ? { ...item, bytes: foldedBytes(item, moment) } : item))
      .filter((item) => item.bytes)
      .sort((a, b) => b.bytes - a.bytes || a.id - b.id),
    series: (space) => (cache[space] ??= makeSeries(items.filter((i) => i.space === space), data.moments.length, data.roles)),
  };
}

function decodeBuffers(data) {
  const c = data.buffers;
  const text = (column, at) => data.strings[c[column][at]];
  return c.bytes.map((bytes, at) => {
    const item = {
      id: at, space: SPACES[c.space[at]], bytes, padding: c.padding[at], start: c.start[at], end: c.end[at],
    };
    for (const name of ["role", "path", "phase", "scope", "operation", "source", "shape", "dtype"]) item[name] = text(name, at);
    item.label = item.path || item.scope.split("/").slice(-3).join("/") || item.operation || item.role;
    item.length = item.end - item.start;
    return item;
  });
}

/** Small buffers that Python folded into one row per role; `steps` are pairs of a moment and the change of bytes there. */
function decodeRest(data) {
  return data.rest.map((rest, at) => ({
    id: data.buffers.bytes.length + at, space: rest.space, role: rest.role, path: "", phase: "", scope: "", operation: "",
    source: "", shape: "", dtype: "", padding: 0, bytes: 0, start: 0, end: data.moments.length - 1,
    length: data.moments.length - 1, steps: rest.steps, label: `everything smaller than ${formatBytes(rest.limit)} (${count(rest.count)} buffers)`,
  }));
}

function groupBuffers(items) {
  const keyOf = (i) => [i.role, i.phase, i.shape, i.dtype, i.bytes, pattern(i.label)];
  return groupAlike(items, keyOf, mergeBuffers).sort((a, b) => b.bytes - a.bytes || a.id - b.id);
}

function mergeBuffers(list) {
  const all = (name) => list.map((item) => item[name]);
  const start = Math.min(...all("start")), end = Math.max(...all("end"));
  const texts = Object.fromEntries(["path", "scope", "operation", "source"].map((name) => [name, shared(all(name))]));
  const spread = new Set(list.map((item) => `${item.start} ${item.end}`)).size > 1;
  return {
    ...list[0], ...texts, spread, id: Math.min(...all("id")), count: list.length, each: list[0].bytes,
    bytes: list.reduce((sum, i) => sum + i.bytes, 0), padding: list.reduce((sum, i) => sum + i.padding, 0),
    start, end, length: end - start, label: counted(all("label")),
  };
}

function foldedBytes(item, moment) {
  let sum = 0;
  for (let at = 0; at < item.steps.length && item.steps[at] <= moment; at += 2) sum += item.steps[at + 1];
  return sum;
}

/** Bytes by role at every moment; roles are in order from the bottom of the stack to its top. */
function makeSeries(items, numMoments, order) {
  const steps = {};
  const add = (role, at, bytes) => { (steps[role] ??= new Float64Array(numMoments + 1))[at] += bytes; };
  for (const item of items) {
    if (item.steps) for (let at = 0; at < item.steps.length; at += 2) add(item.role, item.steps[at], item.steps[at + 1]);
    else { add(item.role, item.start, item.bytes); add(item.role, item.end + 1, -item.bytes); }
  }
  const totals = new Float64Array(numMoments);
  const roles = order.filter((role) => steps[role]).map((role) => {
    const values = steps[role].slice(0, numMoments);
    for (let at = 1; at < numMoments; at++) values[at] += values[at - 1];
    for (let at = 0; at < numMoments; at++) totals[at] += values[at];
    return { role, values };
  });
  return { roles, totals, moments: null, numMoments };
}
