// One checkpoint, opened: its operators, their subtasks, and the timeline of every subtask.

import { h } from "./dom.js";
import { timeline } from "./charts.js";
import { bytes, duration, moment, NONE, percent } from "./format.js";
import { definitions, table } from "./table.js";
import { changed, choice, choose, contentWidth, narrow } from "./ui.js";

const LINES = 40;

export function checkpointDetail(store, row) {
  const loaded = store.detail(row.id, changed);
  const one = loaded?.value ?? row;
  const operators = [...new Set(one.subtasks.map((subtask) => subtask.operator))].sort();
  const name = "checkpoint." + row.id;
  return h("div", { class: "inside", key: name },
    definitions([
      ["Path", h("span", { class: "path" }, one.path ?? NONE)],
      ["Discarded", String(one.discarded ?? NONE)],
      ["Checkpoint Type", one.kind === "savepoint" ? "savepoint" : "aligned checkpoint"],
      one.kind === "savepoint" ? ["Savepoint Format", one.savepoint_format ?? NONE] : null,
      ["Batch", one.batch_id],
      one.failure ? ["Failure Message", one.failure] : null,
    ]),
    one.subtasks.length
      ? [operatorTable(store, one, operators, name), timelines(one, name)]
      : h("p", { class: "note" }, loaded?.error ?? (loaded?.asked ? "Loading the subtasks …" : "The figures of its subtasks are not kept any more.")));
}

const sum = (some, get) => some.reduce((total, one) => total + get(one), 0);
const most = (some, get) => some.reduce((top, one) => Math.max(top, get(one)), 0);

function operatorTable(store, one, operators, name) {
  const rows = operators.map((operator) => {
    const subtasks = one.subtasks.filter((subtask) => subtask.operator === operator);
    const expected = Math.max(subtasks.length, Math.round(one.expected / Math.max(1, operators.length)));
    return { operator, subtasks, expected };
  });
  return table({
    id: name + ".operators",
    caption: "Operators",
    showCaption: true,
    rows,
    rowKey: (row) => row.operator,
    openName: (row) => "the subtasks of " + row.operator,
    open: (row) => subtaskTable(store, one, row, name),
    columns: [
      { name: "Name", value: (row) => row.operator, cell: (row) => row.operator },
      { name: "Acknowledged", number: true, value: (row) => row.subtasks.length, cell: (row) => row.subtasks.length + "/" + row.expected + " (" + percent(row.subtasks.length / row.expected) + ")" },
      { name: "Latest Acknowledgment", value: (row) => most(row.subtasks, (s) => s.ack_time), cell: (row) => moment(most(row.subtasks, (s) => s.ack_time) * 1000, true), class: "time" },
      { name: "End to End Duration", number: true, value: (row) => most(row.subtasks, (s) => s.end_to_end_ms), cell: (row) => duration(most(row.subtasks, (s) => s.end_to_end_ms)) },
      { name: "Checkpointed Data Size", number: true, value: (row) => sum(row.subtasks, (s) => s.checkpointed_bytes), cell: (row) => bytes(sum(row.subtasks, (s) => s.checkpointed_bytes)) },
      { name: "Full Checkpoint Data Size", number: true, value: (row) => sum(row.subtasks, (s) => s.full_bytes), cell: (row) => bytes(sum(row.subtasks, (s) => s.full_bytes)) },
      { name: "Processed (persisted) in-flight data", number: true, cell: (row) => bytes(sum(row.subtasks, (s) => s.alignment_bytes)) + " (0 B)" },
    ],
  });
}

const FIGURES = [
  ["End to End Duration", (s) => s.end_to_end_ms, duration],
  ["Checkpointed Data Size", (s) => s.checkpointed_bytes, bytes],
  ["Full Checkpoint Data Size", (s) => s.full_bytes, bytes],
  ["Sync Duration", (s) => s.sync_ms, duration],
  ["Async Duration", (s) => s.async_ms, duration],
  ["Processed (persisted) Data", (s) => s.alignment_bytes, (value) => bytes(value) + " (0 B)"],
  ["Alignment Duration", (s) => s.alignment_ms, duration],
  ["Start Delay", (s) => s.start_delay_ms, duration],
];

function subtaskTable(store, one, { operator, subtasks, expected }, name) {
  const acked = new Map(subtasks.map((subtask) => [subtask.subtask, subtask]));
  const rows = Array.from({ length: Math.max(expected, ...[...acked.keys()].map((index) => index + 1)) }, (_, index) => ({ index, figures: acked.get(index) ?? null }));
  const over = (words, of) => [words, "", ...FIGURES.map(([, get, format]) => format(of(subtasks.map(get)))), ""];
  const logs = "#/jobs/" + encodeURIComponent(store.id) + "/logs/slot-";
  return table({
    id: name + ".subtasks." + operator,
    caption: "SubTasks of " + operator,
    showCaption: true,
    rows,
    rowKey: (row) => row.index,
    fixed: [
      over("Minimum", (values) => Math.min(...values)),
      over("Average", (values) => values.reduce((a, b) => a + b, 0) / values.length),
      over("Maximum", (values) => Math.max(...values)),
    ],
    columns: [
      { name: "ID", number: true, value: (row) => row.index, cell: (row) => row.index },
      { name: "Acknowledged", value: (row) => row.figures?.ack_time, class: "time",
        cell: (row) => row.figures ? moment(row.figures.ack_time * 1000, true) : [NONE + " ", h("a", { href: logs + row.index }, "View Logs")] },
      ...FIGURES.map(([title, get, format], at) => ({ name: title, number: true, value: (row) => (row.figures ? get(row.figures) : null),
        cell: (row) => (row.figures ? format(get(row.figures)) : NONE) + (at === 0 && !row.figures && one.status === "failed" ? " (aborted)" : "") })),
      { name: "Unaligned Checkpoint", cell: (row) => (row.figures ? "false" : NONE) },
    ],
  });
}

// Every subtask from the moment the checkpoint was due: what delayed it, what it did, and what it waited for.
function timelines(one, name) {
  const slowest = [...one.subtasks].sort((a, b) => b.end_to_end_ms - a.end_to_end_ms);
  const all = choice(name + ".lines", 0);
  const shown = slowest.slice(all * LINES, (all + 1) * LINES);
  const end = one.status !== "completed" ? null : one.completed_time ? (one.completed_time - one.trigger_time) * 1000 : one.end_to_end_ms;
  const publish = end === null ? 0 : one.publish_ms ?? 0;
  const rows = shown.map((s) => ({
    name: s.operator.slice(0, 10) + " " + s.subtask,
    start: 0,
    parts: [
      { name: "start delay", class: "delay", length: s.start_delay_ms },
      { name: "sync", class: "sync", length: s.sync_ms },
      { name: "upload", class: "upload", length: s.async_ms },
      { name: "acknowledged, waits for the others", class: "waits", length: end === null ? 0 : Math.max(0, end - s.end_to_end_ms) },
      { name: "rows are published", class: "publishes", length: publish },
    ],
  }));
  const marks = [
    end === null ? null : { name: "completed", at: end, class: "completed" },
    publish > 0 ? { name: "published", at: end + publish, class: "published" } : null,
  ].filter(Boolean);
  const first = slowest[0];
  const describe = "Timeline of checkpoint " + one.id + " for " + one.subtasks.length + " subtasks, slowest first. The slowest is subtask " + first.subtask + " of " + first.operator +
    ": start delay " + duration(first.start_delay_ms) + ", sync " + duration(first.sync_ms) + ", upload " + duration(first.async_ms) + ", acknowledged after " + duration(first.end_to_end_ms) +
    (end === null ? "." : "; the checkpoint was completed after " + duration(end) + (publish > 0 ? ", and its rows were visible after " + duration(end + publish) : "") + ".");
  const pages = Math.ceil(slowest.length / LINES);
  return [
    timeline({ id: name + ".timeline", title: "Timeline, slowest subtask first", rows, marks, width: contentWidth() - (narrow() ? 40 : 80), format: duration, describe }),
    pages > 1
      ? h("p", { key: "lines", class: "note" }, "Subtasks " + (all * LINES + 1) + " to " + (all * LINES + shown.length) + " of " + slowest.length + " ",
          h("button", { type: "button", disabled: all === 0, on: { click: () => choose(name + ".lines", all - 1) } }, "Slower"), " ",
          h("button", { type: "button", disabled: all === pages - 1, on: { click: () => choose(name + ".lines", all + 1) } }, "Faster"))
      : null,
  ];
}
