// --- squarified treemap: areas are bytes, first by role, then by buffer ----------------------------------------------

const SMALLEST = 64; // area in square pixels below which buffers share one cell
const GAP = 3; // pixels between roles; the last gap lies outside of the map

/** Lay values out in a rectangle, keeping cells close to squares (Bruls, Huizing, van Wijk 2000). */
function squarify(values, box) {
  const total = values.reduce((a, b) => a + b, 0);
  const cells = [];
  let { x, y, w, h } = box, left = total, at = 0;
  while (at < values.length && left > 0) {
    const side = Math.min(w, h), scale = (w * h) / left;
    let row = 1, sum = values[at];
    while (at + row < values.length && worst(values, at, row + 1, sum + values[at + row], side, scale) <= worst(values, at, row, sum, side, scale)) {
      sum += values[at + row++];
    }
    const depth = side ? (sum * scale) / side : 0;
    let offset = 0;
    for (let i = at; i < at + row; i++) {
      const length = sum ? (side * values[i]) / sum : 0;
      cells.push(w >= h ? { x, y: y + offset, w: depth, h: length } : { x: x + offset, y, w: length, h: depth });
      offset += length;
    }
    if (w >= h) { x += depth; w -= depth; } else { y += depth; h -= depth; }
    left -= sum;
    at += row;
  }
  return cells;
}

function worst(values, from, num, sum, side, scale) {
  const area = sum * scale, squared = (side * side) / (area * area);
  return Math.max(squared * values[from] * scale, 1 / (squared * values[from + num - 1] * scale));
}

/** Draw the live buffers `items`. Return the cells, in the order in which arrow keys visit them. */
function drawTreemap(node, items, styles) {
  const groups = new Map();
  for (const item of items) groups.set(item.role, [...(groups.get(item.role) ?? []), item]);
  const roles = [...groups].map(([role, list]) => ({ role, list, bytes: sumOf(list) })).sort((a, b) => b.bytes - a.bytes);
  const boxes = squarify(roles.map((r) => r.bytes), { x: 0, y: 0, w: node.clientWidth + GAP, h: node.clientHeight + GAP });
  const cells = [];
  node.replaceChildren();
  roles.forEach(({ role, list }, at) => drawRole(node, role, list, boxes[at], styles[role], cells));
  if (!items.length) node.append(element("p", { class: "empty" }, "Nothing is alive here."));
  return cells;
}

const sumOf = (items) => items.reduce((sum, item) => sum + item.bytes, 0);

function drawRole(node, role, list, box, style, cells) {
  const named = box.w > 70 && box.h > 58;
  const inner = { x: box.x, y: box.y + (named ? 19 : 0), w: Math.max(0, box.w - GAP), h: Math.max(0, box.h - GAP - (named ? 19 : 0)) };
  if (named) node.append(element("div", { class: "role", style: place({ ...box, w: box.w - 6, h: 18 }) }, `${role}  ${formatBytes(sumOf(list))}`));
  const shown = foldSmall(list, (inner.w * inner.h) / Math.max(1, sumOf(list)), role);
  squarify(shown.map((item) => item.bytes), inner).forEach((cell, at) => {
    const drawn = drawCell(shown[at], cell, style);
    node.append(drawn);
    cells.push({ node: drawn, item: shown[at] });
  });
}

function foldSmall(list, scale, role) {
  const large = list.filter((item) => item.bytes * scale >= SMALLEST);
  const small = list.slice(large.length);
  if (small.length < 2) return list;
  const rest = { id: null, role, bytes: sumOf(small), label: `${count(small.length)} smaller`, shape: "", dtype: "", phase: "" };
  return [...large, rest].sort((a, b) => b.bytes - a.bytes);
}

const place = (box) => ({ left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` });

function drawCell(item, cell, style) {
  const gap = cell.w > 3 && cell.h > 3 ? 1 : 0;
  const w = Math.max(0, cell.w - gap), h = Math.max(0, cell.h - gap);
  const roomy = w >= 84 && h >= 21;
  const node = element("div", {
    class: roomy ? "cell" : "cell small", role: "option", "aria-label": `${item.label}, ${item.role}, ${formatBytes(item.bytes)}`,
    "data-bytes": item.bytes, "data-id": item.id, style: { ...place({ ...cell, w, h }), ...roleFill(style), color: style.ink },
  });
  // Small letters are hard to read on a texture, so they get a plain background.
  const lines = Math.max(1, Math.min(3, Math.floor((h - 22) / 15)));
  if (roomy) node.append(element("span", {
    class: lines > 1 ? "wrap" : null, style: { backgroundColor: style.color, WebkitLineClamp: String(lines) },
  }, ...breakable(shortLabel(item.label, w, lines))));
  if (roomy && h >= 38) node.append(element("span", { style: { backgroundColor: style.color } }, formatBytes(item.bytes)));
  return node;
}

/** Parts of a label with line-break hints after slashes and underscores, so that words stay whole. */
function breakable(label) {
  return label.split(/(?<=[/_])/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));
}

/** Shorten a label by dropping the beginning of the path, which says less than its end; keep a count such as `32 × `. */
function shortLabel(label, width, lines) {
  const room = Math.floor((width - 12) / 7) * lines;
  if (label.length <= room) return label;
  const many = label.match(/^[\d,]+ × /)?.[0] ?? "";
  return `${many}…${label.slice(-Math.max(3, room - many.length - 1))}`;
}
