// The graph of a job: sources, steps and sinks in columns, coloured by what their subtasks do.

import { h } from "./dom.js";
import { bytes, duration, percent, short } from "./format.js";
import { choice, choose, contentWidth, narrow } from "./ui.js";

const WIDE = 236;
const TALL = { source: 128, step: 178, sink: 112, "one of the sinks": 82 };
const GAP = 56;

/** Shares of the subtasks of a step: the highest ones, as Flink's graph shows them, and the mean ones. */
export function shares(subtasks) {
  if (!subtasks.length) return null;
  const mean = (name) => subtasks.reduce((sum, one) => sum + one[name], 0) / subtasks.length;
  const most = (name) => subtasks.reduce((top, one) => Math.max(top, one[name]), 0);
  return { busy: mean("busy"), pressed: mean("back_pressured"), maxBusy: most("busy"), maxPressed: most("back_pressured") };
}

/** Flink's words for a back-pressured share. */
export function pressure(share) {
  return share > 0.5 ? "HIGH" : share > 0.1 ? "LOW" : "OK";
}

export function lagOf(facts, watermark) {
  if (watermark === null || watermark === undefined) return null;
  const { watermark_ms: whole, watermark_lag_ms: lag } = facts.figures ?? {};
  const now = whole !== null && whole !== undefined && lag !== null && lag !== undefined ? whole + lag : facts.taken_ms;
  return Math.max(0, now - watermark);
}

function columnsOf(graph) {
  const level = new Map();
  for (const vertex of graph) level.set(vertex.id, Math.max(0, ...vertex.inputs.map((id) => (level.get(id) ?? 0) + 1)));
  const last = Math.max(0, ...level.values());
  const columns = Array.from({ length: last + 1 }, () => []);
  for (const vertex of graph) columns[level.get(vertex.id)].push(vertex);
  return columns;
}

/** Flow is to the right on a laptop and downwards on a phone. */
export function jobGraph(facts) {
  if (!facts.graph.length) return h("p", { class: "empty" }, "The graph is not known.");
  const sinks = facts.graph.filter((one) => one.kind === "sink").length;
  const columns = columnsOf(facts.graph.map((one) => ({ ...one, size: one.kind === "sink" && sinks > 1 ? "one of the sinks" : one.kind })));
  const places = narrow() ? downwards(columns, contentWidth() - 6) : rightwards(columns, contentWidth() - 6);
  const all = [...places.values()];
  const width = Math.max(...all.map((one) => one.x + one.wide));
  const height = Math.max(...all.map((one) => one.y + one.tall));
  const px = (value) => value + "px";
  return h("div", { class: "graph-scroller", tabindex: "0", role: "region", "aria-label": "Graph of the job" },
    h("div", { class: "graph", style: { width: px(width), height: px(height) } },
      h("svg", { width, height, viewBox: "0 0 " + width + " " + height, "aria-hidden": "true" },
        facts.graph.flatMap((vertex) => vertex.inputs.filter((id) => places.has(id)).map((id) =>
          h("path", { key: id + vertex.id, class: "edge", d: edge(places.get(id), places.get(vertex.id), narrow()) })))),
      h("ol", { class: "nodes" }, facts.graph.map((vertex) => {
        const { x, y, wide, tall } = places.get(vertex.id);
        return h("li", { key: vertex.id, style: { left: px(x), top: px(y), width: px(wide), height: px(tall) } }, node(facts, vertex));
      }))));
}

function rightwards(columns, room) {
  const between = 20;
  const gap = Math.max(28, Math.min(GAP, (room - columns.length * WIDE) / Math.max(1, columns.length - 1)));
  const tallOf = (column) => column.reduce((sum, one) => sum + TALL[one.size] + between, -between);
  const height = Math.max(...columns.map(tallOf));
  const places = new Map();
  columns.forEach((column, across) => {
    let y = (height - tallOf(column)) / 2;
    for (const vertex of column) {
      places.set(vertex.id, { x: across * (WIDE + gap), y, wide: WIDE, tall: TALL[vertex.size] });
      y += TALL[vertex.size] + between;
    }
  });
  return places;
}

function downwards(columns, room) {
  const between = 12;
  const wideOf = (column) => Math.max(150, Math.min(300, (room - (column.length - 1) * between) / column.length));
  const width = Math.max(...columns.map((column) => column.length * (wideOf(column) + between) - between));
  const places = new Map();
  let y = 0;
  for (const column of columns) {
    const wide = wideOf(column);
    const left = (width - column.length * (wide + between) + between) / 2;
    column.forEach((vertex, at) => places.set(vertex.id, { x: left + at * (wide + between), y, wide, tall: TALL[vertex.size] }));
    y += Math.max(...column.map((one) => TALL[one.size])) + 34;
  }
  return places;
}

function edge(from, to, down) {
  if (down) {
    const [x1, y1, x2, y2] = [from.x + from.wide / 2, from.y + from.tall, to.x + to.wide / 2, to.y];
    return `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;
  }
  const [x1, y1, x2, y2] = [from.x + from.wide, from.y + from.tall / 2, to.x, to.y + to.tall / 2];
  return `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
}

function node(facts, vertex) {
  const head = [
    h("span", { class: "kind" }, vertex.kind, vertex.kind === "step" ? h("span", { class: "times" }, "× " + vertex.parallelism) : null),
    h("span", { class: "name", title: vertex.name }, vertex.name),
    h("span", { class: "what", title: vertex.description }, vertex.description || " "),
  ];
  if (vertex.kind !== "step") return h("div", { class: "node " + vertex.kind }, head, lines(outside(facts, vertex)));
  const subtasks = facts.subtasks.filter((one) => one.vertex === vertex.id);
  const share = shares(subtasks);
  const figures = facts.figures?.steps?.[vertex.name];
  const rate = subtasks.reduce((sum, one) => sum + one.rows_in_per_second, 0);
  const chosen = choice("vertex", null) === vertex.id;
  return h("button", { type: "button", class: "node step " + colour(share), "aria-pressed": String(chosen), "aria-controls": "step",
    on: { click: () => choose("vertex", chosen ? null : vertex.id) } },
    head,
    h("span", { class: "shares", "aria-hidden": "true" }, share ? bar(share) : null),
    lines([
      share ? ["Busy (max)", percent(share.maxBusy)] : null,
      share ? ["Back-pressured (max)", percent(share.maxPressed)] : null,
      ["Rows/s", subtasks.length ? short(rate) : "–"],
      ["Watermark lag", figures?.watermark_ms === null || !figures ? "–" : duration(lagOf(facts, figures.watermark_ms))],
      ["State", figures ? bytes(figures.state_bytes) : "–"],
    ]));
}

/** Busy, back-pressured and idle as one bar in Flink's colours. */
export function bar({ busy, pressed }) {
  const idle = Math.max(0, 1 - busy - pressed);
  return [["busy", busy], ["pressed", pressed], ["idle", idle]].map(([name, share]) =>
    h("span", { key: name, class: "share " + name, style: { "flex-grow": share.toFixed(3) } }));
}

function colour(share) {
  if (!share) return "unknown";
  if (share.maxPressed > 0.5) return "is-pressed";
  return share.maxBusy > 0.5 ? "is-busy" : "is-idle";
}

function outside(facts, vertex) {
  const peers = facts.graph.filter((one) => one.kind === vertex.kind);
  const only = peers.length === 1;
  // rates of sources and rows of sinks are known in all, not of each
  if (vertex.kind === "sink") return only ? [["Rows/s", short(facts.figures?.rows_out_per_second)], ["Rows", short(facts.figures?.rows_out)]] : [];
  const known = facts.figures?.sources ?? [];
  const source = known.length === peers.length ? known[peers.indexOf(vertex)] : null; // a source may read several streams
  return [
    only ? ["Rows/s", short(facts.figures?.rows_per_second)] : null,
    ["Rows", short(source?.rows)],
    source?.offsets_behind !== null && source?.offsets_behind !== undefined ? ["Offsets behind", short(source.offsets_behind)] : null,
  ];
}

function lines(pairs) {
  return h("span", { class: "lines" }, pairs.filter(Boolean).map(([name, value]) =>
    h("span", { key: name, class: "line-pair" }, h("span", null, name + " "), h("b", null, value))));
}
