// Tables that are sorted by their headers, shown in pages, and whose rows open.

import { h } from "./dom.js";
import { count } from "./format.js";
import { choice, choose, toggle } from "./ui.js";

export const ROWS_PER_PAGE = 25;

/**
 * A table. `columns`: {name, value (for sorting), cell (what is shown), number, hint}. `open(row)` gives what an opened row
 * shows. `fixed`: rows that stay on top, as lists of cells. Rows are sorted by what was chosen, or as they come.
 */
export function table({ id, caption, columns, rows, rowKey, open, fixed = [], empty = "None", start, showCaption, rowClass, openName }) {
  const sort = choice(id + ".sort", start ?? null);
  const sorted = sort ? sortRows(rows, columns[sort.column], sort.down) : rows;
  const pages = Math.max(1, Math.ceil(rows.length / ROWS_PER_PAGE));
  const page = Math.min(choice(id + ".page", 0), pages - 1);
  const shown = pages > 1 ? sorted.slice(page * ROWS_PER_PAGE, (page + 1) * ROWS_PER_PAGE) : sorted;
  const width = columns.length + (open ? 1 : 0);
  const body = [
    ...fixed.map((cells, index) =>
      h("tr", { key: "fixed" + index, class: "fixed" }, cells.map((cell, at) =>
        at === 0 ? h("th", { scope: "row" }, cell) : h("td", { class: columns[at]?.number ? "number" : null }, cell)))),
    ...shown.flatMap((row) => rowElements({ id, columns, row, key: String(rowKey(row)), open, width, rowClass, openName })),
  ];
  if (!body.length) body.push(h("tr", { key: "empty" }, h("td", { colspan: width, class: "empty" }, empty)));
  return h("div", { key: id, class: "table" },
    h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption },
      h("table", null,
        h("caption", { class: showCaption ? null : "unseen" }, caption),
        h("thead", null, h("tr", null,
          open ? h("th", { scope: "col", class: "opener", key: "open" }, h("span", { class: "unseen" }, "Details")) : null,
          columns.map((column, index) => header(id, column, index, sort)))),
        h("tbody", null, body))),
    pages > 1 ? pager(id, caption, page, pages, rows.length) : null);
}

function header(id, column, index, sort) {
  const by = sort?.column === index;
  const order = by ? (sort.down ? "descending" : "ascending") : column.value ? "none" : null;
  const next = { column: index, down: by ? !sort.down : Boolean(column.number) };
  return h("th", { scope: "col", key: column.name, "aria-sort": order, class: column.number ? "number" : null, title: column.hint },
    column.value
      ? h("button", { type: "button", class: "sort", on: { click: () => choose(id + ".sort", next) } },
          column.name, h("span", { class: "arrow", "aria-hidden": "true" }, by ? (sort.down ? "▼" : "▲") : "↕"))
      : column.name);
}

function rowElements({ id, columns, row, key, open, width, rowClass, openName }) {
  const name = id + ".open." + key;
  const opened = open && choice(name, false);
  const label = (opened ? "Close " : "Open ") + (openName ? openName(row) : key);
  const cells = columns.map((column, index) => {
    const props = { key: column.name, class: column.number ? "number" : column.class ?? null };
    return index === 0
      ? h("th", { ...props, scope: "row" }, column.cell(row))
      : h("td", props, column.cell(row));
  });
  const line = h("tr", { key: "row" + key, class: rowClass?.(row) ?? null },
    open
      ? h("td", { class: "opener", key: "open" },
          h("button", { type: "button", class: "open", "aria-expanded": String(Boolean(opened)), "aria-label": label,
            on: { click: () => toggle(name) } }, opened ? "−" : "+"))
      : null,
    cells);
  return opened ? [line, h("tr", { key: "more" + key, class: "more" }, h("td", { colspan: width }, open(row)))] : [line];
}

function sortRows(rows, column, down) {
  if (!column?.value) return rows;
  const known = [];
  const unknown = [];
  for (const row of rows) {
    const value = column.value(row);
    if (value === null || value === undefined) unknown.push(row);
    else known.push([value, row]);
  }
  known.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  if (down) known.reverse();
  return known.map(([, row]) => row).concat(unknown);
}

function pager(id, caption, page, pages, rows) {
  const go = (to) => () => choose(id + ".page", Math.max(0, Math.min(pages - 1, to)));
  const button = (text, label, to, off) =>
    h("button", { type: "button", key: label, "aria-label": label, disabled: off, on: { click: go(to) } }, text);
  return h("nav", { class: "pager", "aria-label": "Pages of " + caption },
    button("«", "First page", 0, page === 0),
    button("‹", "Previous page", page - 1, page === 0),
    h("span", null, "Page " + count(page + 1) + " of " + count(pages) + " · " + count(rows) + " rows"),
    button("›", "Next page", page + 1, page === pages - 1),
    button("»", "Last page", pages - 1, page === pages - 1));
}

/** Names and values in two columns. */
export function definitions(pairs) {
  return h("dl", { class: "pairs" }, pairs.filter(Boolean).map(([name, value]) =>
    h("div", { key: name }, h("dt", null, name), h("dd", null, value))));
}
