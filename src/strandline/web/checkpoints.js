// Checkpoints as Flink's page shows them: Overview, History, Summary and Configuration.

import { h } from "./dom.js";
import { lineChart } from "./charts.js";
import { checkpointDetail } from "./checkpoint_detail.js";
import { bytes, count, duration, moment, NONE, percent } from "./format.js";
import { chartColumns } from "./overview.js";
import { definitions, table } from "./table.js";
import { tabs } from "./tabs.js";
import { choice, toggle } from "./ui.js";

const SUBTABS = [["overview", "Overview"], ["history", "History"], ["summary", "Summary"], ["configuration", "Configuration"]];
const VIEWS = { overview: overview, history, summary, configuration };

export function checkpoints(store, sub) {
  const current = VIEWS[sub] ? sub : "overview";
  return h("section", { "aria-labelledby": "checkpoints-title" },
    h("h2", { id: "checkpoints-title", class: "unseen" }, "Checkpoints"),
    tabs({
      id: "checkpoints", label: "Checkpoints", level: "second", current,
      tabs: SUBTABS.map(([id, name]) => ({ id, name, href: "#/jobs/" + encodeURIComponent(store.id) + "/checkpoints/" + id })),
      content: VIEWS[current](store),
    }));
}

export const ms = (seconds) => seconds * 1000;
export const completion = (one) => (one.completed_time ? ms(one.completed_time) : ms(one.trigger_time) + one.end_to_end_ms);

/** When the latest subtask acknowledged. */
export function latestAck(one) {
  if (one.latest_ack_time) return ms(one.latest_ack_time);
  if (one.subtasks.length) return ms(one.subtasks.reduce((last, subtask) => Math.max(last, subtask.ack_time), 0));
  return null;
}

function overview(store) {
  const { counts, last_completed: done, last_failed: failed, last_savepoint: saved, restored } = store.facts.checkpoints;
  const none = h("p", { class: "empty" }, "None");
  const card = (title, content) => h("section", { key: title, class: "card" }, h("h3", null, title), content);
  return h("div", { class: "cards" },
    card("Checkpoint Counts", [definitions([["Triggered", count(counts.total)], ["In Progress", count(counts.in_progress)], ["Completed", count(counts.completed)],
      ["Failed", count(counts.failed)], ["Restored", count(counts.restored)]]), h("p", { key: "which", class: "note" }, "Of this run alone.")]),
    card("Latest Completed Checkpoint", done ? [definitions([["ID", done.id], ["Completion Time", moment(completion(done))], ["End to End Duration", duration(done.end_to_end_ms)],
      ["Checkpointed Data Size", bytes(done.checkpointed_bytes)], ["Full Checkpoint Data Size", bytes(done.full_bytes)]]), expandable(store, done)] : none),
    card("Latest Failed Checkpoint", failed ? definitions([["ID", failed.id], ["Failure Time", moment(completion(failed))], ["Cause", failed.failure ?? NONE]]) : none),
    card("Latest Savepoint", saved ? definitions([["ID", saved.id], ["Completion Time", moment(completion(saved))], ["Checkpointed Data Size", bytes(saved.checkpointed_bytes)],
      ["Full Checkpoint Data Size", bytes(saved.full_bytes)], ["Savepoint Format", saved.savepoint_format ?? NONE], ["Path", h("span", { class: "path" }, saved.path ?? NONE)]]) : none),
    card("Latest Restore", restored ? definitions([["ID", restored.id], ["Restore Time", moment(ms(restored.restore_time))],
      ["Type", restored.kind === "savepoint" ? "Savepoint" : "Checkpoint"], ["Path", h("span", { class: "path" }, restored.path)]]) : none));
}

function expandable(store, one) {
  const name = "latest.open";
  const open = choice(name, false);
  return h("div", { key: "detail", class: "expandable" },
    h("button", { type: "button", class: "quiet", "aria-expanded": String(open), on: { click: () => toggle(name) } }, open ? "Hide details" : "Details"),
    open ? checkpointDetail(store, one) : null);
}

function statusOf(one) {
  const words = { in_progress: "IN PROGRESS", completed: "COMPLETED", failed: "FAILED" }[one.status];
  return h("span", { class: "status " + one.status }, words, one.kind === "savepoint" ? h("i", null, " [Savepoint]") : null);
}

function acknowledged(one) {
  const share = one.expected ? " (" + percent(one.acknowledged / one.expected) + ")" : "";
  return one.acknowledged + "/" + one.expected + (one.status === "in_progress" ? share : "");
}

function history(store) {
  return table({
    id: "history",
    caption: "History of the checkpoints",
    rows: store.checkpoints,
    rowKey: (one) => one.id,
    openName: (one) => one.kind + " " + one.id,
    open: (one) => checkpointDetail(store, one),
    rowClass: (one) => (one.status === "failed" ? "failed" : null),
    columns: [
      { name: "ID", number: true, value: (one) => one.id, cell: (one) => one.id },
      { name: "Status", value: (one) => one.status, cell: statusOf },
      { name: "Acknowledged", number: true, value: (one) => one.acknowledged, cell: acknowledged },
      { name: "Trigger Time", value: (one) => one.trigger_time, cell: (one) => moment(ms(one.trigger_time), true), class: "time" },
      { name: "Latest Acknowledgement", value: latestAck, cell: (one) => moment(latestAck(one), true), class: "time" },
      { name: "End to End Duration", number: true, value: (one) => one.end_to_end_ms, cell: (one) => duration(one.end_to_end_ms) },
      { name: "Checkpointed Data Size", number: true, value: (one) => one.checkpointed_bytes, cell: (one) => bytes(one.checkpointed_bytes), hint: "uploaded for this checkpoint" },
      { name: "Full Checkpoint Data Size", number: true, value: (one) => one.full_bytes, cell: (one) => bytes(one.full_bytes), hint: "all that the checkpoint refers to" },
      { name: "Processed (persisted) in-flight data", number: true, cell: (one) => bytes(one.alignment_bytes) + " (0 B)", hint: "barriers lie between two commits, so there is never any" },
    ],
  });
}

/** The value below which a share of the values lies, between neighbours as Flink's statistics do it. */
export function percentile(sorted, share) {
  if (!sorted.length) return null;
  const at = share * (sorted.length + 1) - 1;
  const low = Math.max(0, Math.min(sorted.length - 1, Math.floor(at)));
  const high = Math.min(sorted.length - 1, low + 1);
  return sorted[low] + (sorted[high] - sorted[low]) * Math.max(0, Math.min(1, at - low));
}

const SUMMARY = [
  ["End to End Duration", (one) => one.end_to_end_ms, duration],
  ["Checkpointed Data Size", (one) => one.checkpointed_bytes, bytes],
  ["Full Checkpoint Data Size", (one) => one.full_bytes, bytes],
  ["Processed (persisted) in-flight data", (one) => one.alignment_bytes, (value) => bytes(value) + " (0 B)"],
];

function summary(store) {
  const done = store.checkpoints.filter((one) => one.status === "completed");
  const open = choice("percentiles", false);
  const columns = SUMMARY.map(([name, get, format]) => {
    const values = done.map(get).sort((a, b) => a - b);
    const of = (value) => (values.length ? format(value) : NONE);
    const mean = values.reduce((a, b) => a + b, 0) / (values.length || 1);
    return { name, rows: [of(values[0]), of(mean), of(values.at(-1)), ...[0.5, 0.9, 0.99, 0.999].map((share) => of(percentile(values, share)))] };
  });
  const names = ["Minimum", "Average", "Maximum", "50", "90", "99", "99.9"];
  const rows = names.slice(0, open ? 7 : 3);
  return [
    h("div", { key: "table", class: "table" }, h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Summary of the checkpoints" },
      h("table", null,
        h("caption", { class: "unseen" }, "Summary of " + count(done.length) + " completed checkpoints"),
        h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Figure")), columns.map((one) => h("th", { scope: "col", class: "number", key: one.name }, one.name)))),
        h("tbody", null, rows.map((name, at) => h("tr", { key: name },
          h("th", { scope: "row" }, at > 2 ? name + " % percentile" : name), columns.map((one) => h("td", { class: "number", key: one.name }, one.rows[at])))))))),
    h("p", { key: "more" }, h("button", { type: "button", class: "quiet", "aria-expanded": String(open), on: { click: () => toggle("percentiles") } }, (open ? "▾ " : "▸ ") + "Percentiles"),
      h("span", { class: "note" }, " over " + count(done.length) + " completed checkpoints")),
    plots(store),
  ];
}

function plots(store) {
  const ended = store.checkpoints.filter((one) => one.status !== "in_progress").reverse();
  const { width } = chartColumns(2);
  const of = (get) => ended.map((one) => ({ x: ms(one.trigger_time), y: get(one), mark: one.status === "failed" }));
  const whole = (get) => ended.filter((one) => one.status === "completed").map((one) => ({ x: ms(one.trigger_time), y: get(one) }));
  const day = ended.length > 1 && ms(ended.at(-1).trigger_time - ended[0].trigger_time) > 86_400_000;
  const base = { width, ...(day ? { xFormat: (value) => moment(value).slice(5, 16) } : {}) };
  return h("div", { key: "plots", class: "charts" },
    lineChart({ ...base, id: "durations", title: "End to end duration", format: duration, series: [{ name: "duration", class: "a", points: of((one) => one.end_to_end_ms) }] }),
    lineChart({ ...base, id: "sizes", title: "Size", format: bytes,
      series: [{ name: "full", class: "b", points: whole((one) => one.full_bytes) }, { name: "checkpointed", class: "a", points: whole((one) => one.checkpointed_bytes) }] }),
    lineChart({ ...base, id: "delays", title: "Start delay", format: duration, series: [{ name: "start delay", class: "a", points: of((one) => one.start_delay_ms) }] }),
    lineChart({ ...base, id: "amplification", title: "Amplification: full checkpoint size ÷ state size", format: (value) => (value === null || value === undefined ? NONE : value.toFixed(2)),
      series: [{ name: "amplification", class: "a", points: amplification(store, ended) }] }),
    h("p", { class: "note" }, "Red dots: failed checkpoints. ", changelogWords(store.facts.figures?.changelog)));
}

// The size of the state is known for the last ten minutes only: a checkpoint belongs to the sample before its end.
function amplification({ samples }, ended) {
  const points = [];
  let at = 0;
  for (const one of ended) {
    const end = completion(one);
    while (at + 1 < samples.length && samples[at + 1].time_ms <= end) at++;
    const sample = samples[at];
    const near = sample && Math.abs(end - sample.time_ms) < 5000 && sample.state_bytes > 0 && one.status === "completed" && one.kind !== "savepoint";
    if (near) points.push({ x: ms(one.trigger_time), y: one.full_bytes / sample.state_bytes });
  }
  return points;
}

function changelogWords(changelog) {
  if (!changelog) return "";
  const { base_bytes: base, segment_bytes: log } = changelog;
  return "Changelog: " + bytes(log) + " of segments over " + bytes(base) + " of materialized state" + (base ? ", amplification " + ((base + log) / base).toFixed(2) : "") + ".";
}

function configuration({ facts }) {
  const option = (name) => facts.config[name];
  const seconds = (name) => (typeof option(name) === "number" ? duration(option(name) * 1000) : option(name) ?? NONE);
  const text = (name) => (option(name) === undefined || option(name) === null ? NONE : String(option(name)));
  const on = (value) => (value === undefined ? NONE : String(value).toLowerCase() === "true" ? "Enabled" : "Disabled");
  const logged = String(option("changelog")).toLowerCase() === "true";
  const rows = [
    ["Checkpointing Mode", "Exactly Once"],
    ["Checkpoint Storage", facts.checkpoint_dir || text("checkpoint_dir")],
    ["State Backend", text("state_backend")],
    ["Interval", option("checkpoint_interval") === null ? "Periodic checkpoints disabled" : seconds("checkpoint_interval")],
    ["Timeout", seconds("checkpoint_timeout")],
    ["Minimum Pause Between Checkpoints", seconds("min_pause")],
    ["Maximum Concurrent Checkpoints", text("max_concurrent_checkpoints")],
    ["Unaligned Checkpoints", "Disabled: barriers lie between two commits, so there is nothing to align"],
    ["Persist Checkpoints Externally", option("on_cancel") === "delete" ? "Enabled (delete on cancellation)" : "Enabled (retain on cancellation)"],
    ["Tolerable Failed Checkpoints", text("tolerable_failed_checkpoints")],
    ["Checkpoints With Finished Tasks", "Enabled"],
    ["State Changelog", on(option("changelog"))],
    logged ? ["Changelog Storage", option("changelog_dir") ? text("changelog_dir") : facts.checkpoint_dir] : null,
    logged ? ["Changelog Periodic Materialization Interval", seconds("materialization_interval")] : null,
  ].filter(Boolean).map(([name, value]) => ({ name, value }));
  return table({
    id: "checkpoint-config", caption: "Configuration of the checkpoints", rows, rowKey: (one) => one.name,
    columns: [{ name: "Option", cell: (one) => one.name }, { name: "Value", cell: (one) => one.value, class: "words" }],
  });
}
