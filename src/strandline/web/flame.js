// A flame graph of sampled stacks: the wider a function, the more samples it was seen in. A click shows what is below it.

import { h } from "./dom.js";
import { percent, plural } from "./format.js";
import { choice, choose } from "./ui.js";

const LINE = 20;

const IDLE = "idle";

/** The tree of stacks that are folded as `root;…;leaf`; without the samples in which nothing ran. */
export function tree(stacks) {
  const root = { name: "all", path: "", samples: 0, own: 0, children: new Map() };
  for (const [stack, samples] of Object.entries(stacks)) {
    if (stack === IDLE) continue;
    root.samples += samples;
    let at = root;
    for (const name of stack.split(";")) {
      if (!at.children.has(name)) at.children.set(name, { name, path: at.path + ";" + name, samples: 0, own: 0, children: new Map() });
      at = at.children.get(name);
      at.samples += samples;
    }
    at.own += samples;
  }
  return root;
}

function find(node, path) {
  if (node.path === path) return node;
  for (const child of node.children.values()) {
    if (path === child.path || path.startsWith(child.path + ";")) return find(child, path);
  }
  return null;
}

function depth(node) {
  return 1 + Math.max(0, ...[...node.children.values()].map(depth));
}

export function flameGraph({ id, folded, width }) {
  const root = tree(folded.stacks);
  const idle = folded.stacks[IDLE] ?? 0;
  if (!root.samples) return h("p", { class: "empty" }, "No Python ran in the slot while it was sampled: it was idle all the time.");
  const zoom = choice(id + ".zoom", "");
  const top = find(root, zoom) ?? root;
  const boxes = [];
  lay(top, 0, 0, width, boxes);
  const height = Math.min(60, depth(top)) * LINE;
  const show = (path) => () => choose(id + ".zoom", path);
  return h("div", { key: id, class: "flame" },
    h("p", { class: "note" }, plural(folded.samples, "sample") + " in " + folded.seconds.toFixed(1) + " s" + (idle ? ", idle in " + percent(idle / (idle + root.samples)) + " of them; the graph shows the rest. " : ". "),
      top === root ? "Choose a function to look inside." : [
        "Inside ", h("b", null, top.name), ", which was in " + percent(top.samples / root.samples) + " of the samples. ",
        h("button", { type: "button", on: { click: show("") } }, "Show all"),
      ]),
    h("svg", { width, height, viewBox: "0 0 " + width + " " + height, role: "group", "aria-label": "Flame graph; the table below lists the same functions." },
      boxes.map(({ node, x, y, w }) => {
        const label = node.name + ": " + percent(node.samples / root.samples) + ", " + plural(node.samples, "sample");
        return h("g", { key: node.path || "all", class: "frame tone" + tone(node.name), role: "button", tabindex: w > 24 ? "0" : "-1", "aria-label": label,
          on: { click: show(node.path), keydown: (event) => pressed(event, show(node.path)) } },
          h("title", null, label),
          h("rect", { x, y, width: Math.max(0.5, w - 1), height: LINE - 1, rx: 2 }),
          w > 34 ? h("text", { x: x + 4, y: y + 14 }, cut(node.name, w)) : null);
      })),
    functions(root));
}

function pressed(event, act) {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act();
}

function lay(node, level, x, width, boxes) {
  if (width < 1 || level >= 60) return;
  boxes.push({ node, x, y: level * LINE, w: width });
  let at = x;
  for (const child of [...node.children.values()].sort((a, b) => b.samples - a.samples)) {
    const wide = (child.samples / node.samples) * width;
    lay(child, level + 1, at, wide, boxes);
    at += wide;
  }
}

function cut(name, width) {
  const room = Math.floor((width - 8) / 6.6);
  return name.length <= room ? name : name.slice(0, Math.max(1, room - 1)) + "…";
}

function tone(name) {
  let sum = 0;
  for (let i = 0; i < name.length; i++) sum = (sum * 31 + name.charCodeAt(i)) % 997;
  return sum % 5;
}

function share(value) {
  return value < 0.1 ? (value * 100).toFixed(1) + " %" : percent(value);
}

// The same as a table, for readers who do not see the graph.
function functions(root) {
  const totals = new Map();
  const walk = (node, above) => {
    const entry = totals.get(node.name) ?? { name: node.name, own: 0, all: 0 };
    entry.own += node.own;
    if (!above.has(node.name)) entry.all += node.samples;
    totals.set(node.name, entry);
    const names = new Set(above).add(node.name);
    for (const child of node.children.values()) walk(child, names);
  };
  for (const child of root.children.values()) walk(child, new Set());
  const rows = [...totals.values()].sort((a, b) => b.own - a.own).slice(0, 10);
  return h("div", { class: "table" }, h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Functions by time of their own" },
    h("table", null,
      h("caption", null, "Functions by time of their own"),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Function"), h("th", { scope: "col", class: "number" }, "Own"), h("th", { scope: "col", class: "number" }, "With callees"))),
      h("tbody", null, rows.map((row) => h("tr", { key: row.name },
        h("th", { scope: "row", class: "code" }, row.name),
        h("td", { class: "number" }, share(row.own / root.samples)),
        h("td", { class: "number" }, share(row.all / root.samples))))))));
}
