// --- sorted and filtered rows, a few hundred at a time ---------------------------------------------------------------

const PAGE = 100;

/**
 * A table whose columns sort on click.
 * columns: {key, name, right, value(row), cell(row) -> td}; hooks: onRow(row, tr), detail(row) -> node or null.
 */
function makeTable(parts, columns, sort, hooks) {
  const state = { rows: [], sort, limit: PAGE, chosen: null };
  const head = element("tr");
  parts.table.tHead.replaceChildren(head);
  const sortBy = (column) => {
    const same = state.sort.key === column.key;
    state.sort = { key: column.key, down: same ? !state.sort.down : Boolean(column.right) };
    draw();
  };
  columns.forEach((column) => {
    const button = element("button", { type: "button" }, column.name);
    button.addEventListener("click", () => sortBy(column));
    head.append(element("th", { class: column.right ? "right" : null, scope: "col", "data-key": column.key }, button));
  });
  const markSort = () => columns.forEach((column, at) => {
    const active = column.key === state.sort.key;
    head.children[at].setAttribute("aria-sort", active ? (state.sort.down ? "descending" : "ascending") : "none");
    head.children[at].firstChild.textContent = active ? `${column.name} ${state.sort.down ? "↓" : "↑"}` : column.name;
  });
  const draw = () => {
    markSort();
    const sorted = sortRows(state.rows, columns.find((c) => c.key === state.sort.key), state.sort.down);
    const chosenAt = state.chosen === null ? -1 : sorted.findIndex((row) => row.id === state.chosen);
    if (chosenAt >= state.limit) state.limit = Math.ceil((chosenAt + 1) / PAGE) * PAGE;
    const shown = sorted.slice(0, state.limit);
    parts.table.tBodies[0].replaceChildren(...shown.flatMap((row) => drawRow(row, columns, state.chosen === row.id, hooks)));
    if (!sorted.length) parts.table.tBodies[0].append(element("tr", {}, element("td", { class: "empty", colspan: columns.length }, "Nothing to show.")));
    const left = sorted.length - shown.length;
    parts.more.hidden = left === 0;
    parts.more.textContent = `Show ${count(Math.min(left, PAGE * 2))} more of ${count(left)}`;
  };
  parts.more.addEventListener("click", () => { state.limit += PAGE * 2; draw(); });
  return {
    setRows: (rows, keep) => { state.rows = rows; if (!keep) state.limit = PAGE; draw(); },
    choose: (id) => { state.chosen = id; draw(); },
    chosen: () => state.chosen,
    rowNode: (id) => parts.table.tBodies[0].querySelector(`tr[data-id="${id}"]`),
  };
}

function sortRows(rows, column, down) {
  const sign = down ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return [...rows].sort((a, b) => sign * compare(column.value(a), column.value(b)) || a.id - b.id);
}

function drawRow(row, columns, chosen, hooks) {
  const tr = element("tr", { class: chosen ? "chosen" : null, "data-id": row.id, "data-bytes": row.bytes ?? row.delta }, ...columns.map((column) => column.cell(row)));
  hooks.onRow?.(row, tr);
  const detail = chosen ? hooks.detail?.(row) : null;
  return detail ? [tr, element("tr", { class: "detail" }, element("td", { colspan: columns.length }, detail))] : [tr];
}

/** Rows whose texts together contain every word of the query. */
function filterRows(rows, query, texts) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return rows;
  return rows.filter((row) => {
    const all = texts(row).join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  });
}

const cell = (text, kind) => element("td", { class: kind ?? null }, text);

/** Shorten `a/b/train.py:41 (Model.fit.<locals>.loss)` to `train.py:41 (loss)`, so that it fits into a column. */
function shortSource(source) {
  const [place, scope] = source.split(" (");
  const name = place.slice(place.lastIndexOf("/") + 1);
  return scope ? `${name} (${scope.slice(scope.lastIndexOf(".", scope.length - 2) + 1)}` : name;
}

/** Merge rows that differ only in the numbers of their names into one row: `32 × layers/…`. */
function groupAlike(rows, keyOf, merge) {
  const groups = new Map();
  for (const row of rows) {
    const key = row.steps ? String(row.id) : keyOf(row).join("\n");
    if (groups.has(key)) groups.get(key).push(row);
    else groups.set(key, [row]);
  }
  return [...groups.values()].map((list) => (list.length === 1 ? list[0] : merge(list)));
}

const pattern = (text) => text.replace(/\d+/g, "#");

/** The common form of texts, with `*` for numbers that differ; empty if more than numbers differ. */
function shared(texts) {
  if (new Set(texts.map(pattern)).size !== 1) return "";
  const numbers = texts.map((text) => text.match(/\d+/g) ?? []);
  let at = -1;
  return texts[0].replace(/\d+/g, (found) => (at++, numbers.every((n) => n[at] === found) ? found : "*"));
}

/** The common form of texts after their number, `32 × layers/…`; numbers of arguments are listed: `2, 3`. */
function counted(texts) {
  const text = shared(texts);
  return text && !/[\p{L}\d]/u.test(text) ? [...new Set(texts)].sort().join(", ") : `${count(texts.length)} × ${text}`;
}
