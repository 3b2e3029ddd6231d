// The first tab: the graph, the last ten minutes, and what is inside a step.

import { announce, h } from "./dom.js";
import { askForToken } from "./actions.js";
import { heatMap, lineChart } from "./charts.js";
import { flameGraph } from "./flame.js";
import { bytes, count, duration, percent, short } from "./format.js";
import { bar, jobGraph, lagOf, pressure } from "./graph.js";
import { ofJob, Refused, trigger } from "./server.js";
import { runs } from "./store.js";
import { table } from "./table.js";
import { changed, choice, choose, contentWidth, narrow } from "./ui.js";

const SECONDS = 10;

export function overview(store) {
  const { facts } = store;
  const vertex = facts.graph.find((one) => one.id === choice("vertex", null));
  return [
    h("section", { key: "graph", "aria-labelledby": "graph-title" },
      h("div", { class: "titles" }, h("h2", { id: "graph-title" }, "Graph"),
        h("p", { class: "legends" },
          h("span", { class: "legend part idle" }, "idle"), h("span", { class: "legend part pressed" }, "back-pressured"), h("span", { class: "legend part busy" }, "busy"))),
      jobGraph(facts),
      vertex ? null : h("p", { class: "note" }, "Choose a step to see its subtasks, its key groups and what its Python does.")),
    h("div", { key: "step", id: "step" }, vertex ? step(store, vertex) : null),
    h("section", { key: "recent", "aria-labelledby": "recent-title" },
      h("h2", { id: "recent-title" }, runs(facts) ? "Last ten minutes" : "Last ten minutes that are known"), recent(store)),
  ];
}

export function chartColumns(wanted) {
  const columns = narrow() ? 1 : wanted;
  return { columns, width: Math.floor((contentWidth() - (columns - 1) * 24) / columns) - (narrow() ? 2 : 34) };
}

function recent({ samples, checkpoints }) {
  const { width } = chartColumns(2);
  const of = (name) => samples.map((one) => ({ x: one.time_ms, y: one[name] }));
  const since = samples[0]?.time_ms ?? 0;
  const ended = checkpoints.filter((one) => one.status !== "in_progress" && one.trigger_time * 1000 >= since).reverse();
  const behind = samples.some((one) => one.offsets_behind !== null);
  return h("div", { class: "charts" },
    lineChart({ id: "rows", title: "Rows per second", width, format: short, area: true,
      series: [{ name: "read", class: "a", points: of("rows_per_second") }, { name: "given to sinks", class: "b", points: of("rows_out_per_second") }] }),
    lineChart({ id: "shares", title: "Busiest subtask", width, format: percent, highest: 1,
      series: [{ name: "busy", class: "busy", points: of("busy") }, { name: "back-pressured", class: "pressed", points: of("back_pressured") }] }),
    lineChart({ id: "lag", title: "Watermark lag", width, format: duration, series: [{ name: "lag", class: "a", points: of("watermark_lag_ms") }] }),
    lineChart({ id: "batch", title: "Batch duration", width, format: duration, series: [{ name: "batch", class: "a", points: of("batch_ms") }] }),
    lineChart({ id: "state", title: "State size", width, format: bytes, area: true, series: [{ name: "state", class: "a", points: of("state_bytes") }] }),
    lineChart({ id: "recent-checkpoints", title: "Duration of checkpoints", width, format: duration,
      series: [{ name: "checkpoint", class: "a", points: ended.map((one) => ({ x: one.trigger_time * 1000, y: one.end_to_end_ms, mark: one.status === "failed" })) }] }),
    behind ? lineChart({ id: "behind", title: "Offsets behind", width, format: short, series: [{ name: "behind", class: "a", points: of("offsets_behind") }] }) : null);
}

function step(store, vertex) {
  const { facts } = store;
  const subtasks = facts.subtasks.filter((one) => one.vertex === vertex.id);
  return h("section", { class: "step", "aria-labelledby": "step-title" },
    h("div", { class: "titles" },
      h("h2", { id: "step-title" }, "Step ", h("span", { class: "code" }, vertex.name), h("small", null, vertex.description)),
      h("button", { type: "button", class: "quiet", "aria-label": "Close the step", on: { click: () => choose("vertex", null) } }, "×")),
    h("h3", null, "Subtasks"),
    subtaskTable(facts, vertex, subtasks),
    h("h3", null, "Key groups"),
    keyGroups(facts, vertex),
    h("h3", null, "Flame graph"),
    flame(store, vertex, subtasks));
}

function subtaskTable(facts, vertex, subtasks) {
  const number = (name, get, format, hint) => ({ name, number: true, value: get, cell: (one) => format(get(one)), hint });
  return table({
    id: "subtasks." + vertex.id,
    caption: "Subtasks of " + vertex.name,
    rows: subtasks,
    rowKey: (one) => one.index,
    empty: "The job does not run, so it has no subtasks.",
    columns: [
      number("Subtask", (one) => one.index, String),
      { name: "Load", cell: (one) => h("span", { class: "shares", role: "img", "aria-label": "busy " + percent(one.busy) + ", back-pressured " + percent(one.back_pressured) }, bar({ busy: one.busy, pressed: one.back_pressured })) },
      number("Busy", (one) => one.busy, percent),
      number("Back-pressured", (one) => one.back_pressured, (share) => percent(share) + " " + pressure(share), "OK up to 10 %, LOW up to 50 %, HIGH above"),
      number("Idle", (one) => Math.max(0, 1 - one.busy - one.back_pressured), percent),
      number("Rows in/s", (one) => one.rows_in_per_second, short),
      number("Rows out/s", (one) => one.rows_out_per_second, short),
      number("Rows in", (one) => one.rows_in, count),
      number("Rows out", (one) => one.rows_out, count),
      number("Bytes in", (one) => one.bytes_in, bytes),
      number("Bytes out", (one) => one.bytes_out, bytes),
      number("State", (one) => one.state_bytes, bytes),
      number("In memory", (one) => one.memory_bytes, bytes),
      number("Keys", (one) => one.estimated_keys, short, "an estimate"),
      number("Cache hits", (one) => one.cache_hit_ratio, percent),
      number("Watermark lag", (one) => lagOf(facts, one.watermark_ms), duration),
      { name: "Task manager", value: (one) => one.task_manager, cell: (one) => one.task_manager },
      { name: "Process", value: (one) => one.pid, cell: (one) => one.host + " · " + one.pid },
    ],
  });
}

/** The heat map of a step's key groups, with its figures in words. */
export function keyGroups(facts, vertex) {
  const rows = facts.key_group_rows[vertex.id] ?? [];
  const total = rows.reduce((a, b) => a + b, 0);
  if (!total) return h("p", { class: "empty" }, "No rows yet.");
  const mean = total / rows.length;
  const top = rows.map((value, group) => ({ value, group })).sort((a, b) => b.value - a.value)[0];
  const words = "The fullest of " + rows.length + " key groups, " + top.group + ", took " + count(top.value) + " rows: " + (top.value / mean).toFixed(1) + " times the mean of " + count(mean) + ".";
  return [
    h("p", { key: "words", class: "note" }, words),
    heatMap({ id: "groups." + vertex.id, title: "Rows per key group", values: rows, width: contentWidth() - (narrow() ? 4 : 34), format: short, describe: words,
      name: (group) => "key group " + group }),
  ];
}

function flame(store, vertex, subtasks) {
  const name = "flame." + vertex.id;
  const taken = choice(name, null);
  const slots = subtasks.map((one) => one.index);
  const subtask = choice(name + ".subtask", slots[0] ?? 0);
  const running = taken?.running;
  return [
    h("div", { key: "form", class: "row" },
      h("label", null, "Subtask ", h("select", { value: String(subtask), on: { change: (event) => choose(name + ".subtask", Number(event.target.value)) } },
        slots.map((one) => h("option", { key: one, value: one }, String(one))))),
      h("button", { type: "button", disabled: !store.steerable || running || !slots.length, on: { click: () => sample(store, name, subtask) } }, "Sample for " + SECONDS + " seconds"),
      running ? h("span", { role: "status" }, h("progress", { "aria-label": "Sampling" }), " sampling the Python of slot " + subtask + " …") : null),
    taken?.error ? h("p", { key: "error", class: "bad", role: "alert" }, taken.error) : null,
    taken?.folded
      ? [h("p", { key: "which", class: "note" }, "Slot " + taken.subtask + ". A slot runs this subtask of every step."),
         flameGraph({ id: name, folded: taken.folded, width: contentWidth() - (narrow() ? 4 : 34) })]
      : running ? null : h("p", { key: "note", class: "note" }, "Shows where the Python of a slot spends its time. Sampling costs the slot a few percent while it lasts."),
  ];
}

async function sample(store, name, subtask) {
  choose(name, { ...choice(name, {}), running: true, error: null });
  try {
    const folded = await trigger("POST", ofJob(store.id, "flamegraph"), { subtask, seconds: SECONDS }, (id) => ofJob(store.id, "flamegraph", id), () => {});
    choose(name, { folded, subtask });
    announce("The flame graph of slot " + subtask + " is there.");
  } catch (error) {
    choose(name, { error: error.message });
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) askForToken(error.message, () => sample(store, name, subtask));
  }
  changed();
}
