// How evenly rows are spread over the subtasks and key groups of each step.

import { h } from "./dom.js";
import { barChart } from "./charts.js";
import { count, short } from "./format.js";
import { chartColumns, keyGroups } from "./overview.js";
import { table } from "./table.js";

/** Flink's data skew: the mean distance from the mean, in percent of the mean, 100 at most. */
export function skewOf(values) {
  const mean = values.reduce((a, b) => a + b, 0) / (values.length || 1);
  if (!mean) return 0;
  return Math.min(100, (values.reduce((sum, one) => sum + Math.abs(one - mean), 0) / values.length / mean) * 100);
}

export function dataSkew({ facts }) {
  const steps = facts.graph.filter((one) => one.kind === "step").map((vertex) => {
    const subtasks = facts.subtasks.filter((one) => one.vertex === vertex.id);
    const rows = subtasks.map((one) => one.rows_in);
    const mean = rows.reduce((a, b) => a + b, 0) / (rows.length || 1);
    return { vertex, rows, mean, most: rows.reduce((a, b) => Math.max(a, b), 0), skew: skewOf(rows), groups: skewOf(facts.key_group_rows[vertex.id] ?? []) };
  });
  const number = (name, value, format, hint) => ({ name, number: true, value, cell: (one) => format(value(one)), hint });
  return [
    h("section", { key: "skew", "aria-labelledby": "skew-title" },
      h("h2", { id: "skew-title" }, "Data Skew"),
      h("p", { class: "note" }, "0 %: every subtask takes as many rows as the others. 100 %: one takes nearly all. Rows are counted since the slots started."),
      table({
        id: "skew",
        caption: "Data skew of the steps",
        rows: steps,
        rowKey: (one) => one.vertex.id,
        start: { column: 1, down: true },
        columns: [
          { name: "Step", value: (one) => one.vertex.name, cell: (one) => one.vertex.name },
          number("Data skew", (one) => (one.rows.length ? one.skew : null), (value) => (value === null ? "n/a" : value.toFixed(0) + " %"), "mean distance from the mean"),
          number("Key-group skew", (one) => one.groups, (value) => value.toFixed(0) + " %"),
          number("Rows of the fullest subtask", (one) => one.most, count),
          number("Mean rows of a subtask", (one) => one.mean, count),
          number("Fullest ÷ mean", (one) => (one.mean ? one.most / one.mean : null), (value) => (value === null ? "n/a" : value.toFixed(2))),
        ],
      })),
    steps.map((one) => stepSkew(facts, one)),
  ];
}

function stepSkew(facts, { vertex, rows, mean }) {
  return h("section", { key: vertex.id, "aria-label": "Skew of " + vertex.name },
    h("h3", null, "Step ", h("span", { class: "code" }, vertex.name)),
    rows.length ? barChart({ id: "bars." + vertex.id, title: "Rows per subtask", values: rows, width: chartColumns(1).width, format: short, names: String,
      line: { value: mean, name: "mean" } }) : null,
    keyGroups(facts, vertex));
}
