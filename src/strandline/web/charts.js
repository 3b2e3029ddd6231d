// Charts as SVG: lines, bars, heat maps and timelines. Each has a text that says the same for screen readers.

import { h } from "./dom.js";
import { clock } from "./format.js";
import { choice, choose } from "./ui.js";

const LEFT = 56;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;

/** Round values between 0 and `highest` for the lines of a grid. */
export function ticks(highest, about = 3) {
  if (!(highest > 0)) return [0, 1];
  const raw = highest / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const out = [];
  for (let value = 0; value < highest + step * 0.999; value += step) out.push(value);
  return out;
}

/** At most `limit` points: of each bucket the one with the highest value, so that no peak is lost. */
export function thin(points, limit) {
  if (points.length <= limit) return points;
  const out = [];
  const size = points.length / limit;
  for (let at = 0; at < limit; at++) {
    let best = null;
    for (let i = Math.floor(at * size); i < Math.floor((at + 1) * size); i++) {
      if (best === null || (points[i].y ?? -1) > (points[best].y ?? -1)) best = i;
    }
    if (best !== null) out.push(points[best]);
  }
  return out;
}

function words(title, series, format) {
  const parts = series.map(({ name, points }) => {
    const values = points.map((one) => one.y).filter((one) => one !== null && one !== undefined);
    if (!values.length) return name + ": no figures";
    const highest = values.reduce((a, b) => Math.max(a, b));
    const lowest = values.reduce((a, b) => Math.min(a, b));
    return name + ": newest " + format(values.at(-1)) + ", lowest " + format(lowest) + ", highest " + format(highest);
  });
  return title + ". " + parts.join(". ") + ".";
}

/**
 * Lines over time. `series`: {name, points: [{x: milliseconds, y, mark}], class}. A point with `mark` is drawn as a red dot.
 * A null value interrupts the line.
 */
export function lineChart({ id, title, series, width, height = 150, format, xFormat = clock, area = false, highest: atLeast = 0 }) {
  const drawn = series.map((one) => ({ ...one, points: thin(one.points, Math.max(50, Math.floor((width - LEFT) / 2))) }));
  const all = drawn.flatMap((one) => one.points);
  const values = all.map((one) => one.y).filter((one) => one !== null && one !== undefined);
  const legend = h("figcaption", { key: "caption" }, h("span", { class: "chart-title" }, title),
    series.length > 1 ? series.map((one) => h("span", { class: "legend " + one.class, key: one.name }, one.name)) : null,
    h("span", { class: "reading", key: "reading" }, reading(id, drawn, format, xFormat)));
  if (!values.length) return h("figure", { class: "chart", key: id }, legend, h("p", { class: "empty" }, "No figures yet."));
  const lines = ticks(Math.max(atLeast, values.reduce((a, b) => Math.max(a, b))));
  const top = lines.at(-1);
  const x0 = all.reduce((a, b) => Math.min(a, b.x), Infinity);
  const x1 = all.reduce((a, b) => Math.max(a, b.x), -Infinity);
  const x = (value) => LEFT + (x1 > x0 ? ((value - x0) / (x1 - x0)) * (width - LEFT - RIGHT) : (width - LEFT - RIGHT) / 2);
  const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
  const hover = choice("hover", null);
  const at = hover?.id === id ? drawn[0].points[hover.index] : null;
  const svg = h("svg", {
    width, height, viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": words(title, series, format),
    on: {
      pointermove: (event) => point(event, id, drawn[0].points, x),
      pointerleave: () => choose("hover", null),
    },
  },
    lines.map((value) => [
      h("line", { key: "grid" + value, class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      h("text", { key: "tick" + value, class: "tick end", x: LEFT - 6, y: y(value) + 4 }, format(value)),
    ]),
    [0, 0.5, 1].map((share) =>
      h("text", { key: "x" + share, class: "tick " + ["start", "middle", "end"][share * 2], x: LEFT + share * (width - LEFT - RIGHT), y: height - 4 },
        x1 > x0 || share === 0.5 ? xFormat(x0 + share * (x1 - x0)) : "")),
    drawn.map((one) => [
      area && one === drawn[0] ? h("path", { key: "area" + one.name, class: "area " + one.class, d: path(one.points, x, y, y(0)) }) : null,
      h("path", { key: "line" + one.name, class: "line " + one.class, d: path(one.points, x, y) }),
      one.points.filter((p) => p.mark).map((p) => h("circle", { key: "mark" + p.x, class: "mark", cx: x(p.x), cy: y(p.y), r: 3 })),
    ]),
    at ? h("line", { key: "cursor", class: "cursor", x1: x(at.x), x2: x(at.x), y1: TOP, y2: height - BOTTOM }) : null);
  return h("figure", { class: "chart", key: id }, legend, svg);
}

function reading(id, series, format, xFormat) {
  const hover = choice("hover", null);
  if (hover?.id === id && series[0]?.points[hover.index]) {
    const at = series[0].points[hover.index];
    return xFormat(at.x) + " · " + series.map((one) => (one.points[hover.index] ? format(one.points[hover.index].y) : "")).join(" / ");
  }
  return series.map((one) => format(one.points.at(-1)?.y)).join(" / ");
}

function point(event, id, points, x) {
  const box = event.currentTarget.getBoundingClientRect();
  const at = event.clientX - box.left;
  let best = 0;
  for (let i = 1; i < points.length; i++) if (Math.abs(x(points[i].x) - at) < Math.abs(x(points[best].x) - at)) best = i;
  const hover = choice("hover", null);
  if (hover?.id !== id || hover.index !== best) choose("hover", { id, index: best });
}

function path(points, x, y, base) {
  let d = "";
  let first = null;
  let last = null;
  const close = () => (base !== undefined && last ? "L" + x(last.x).toFixed(1) + " " + base + "L" + x(first.x).toFixed(1) + " " + base + "Z" : "");
  for (const one of points) {
    if (one.y === null || one.y === undefined) {
      d += close();
      last = null;
      continue;
    }
    if (!last) first = one;
    d += (last ? "L" : "M") + x(one.x).toFixed(1) + " " + y(one.y).toFixed(1);
    last = one;
  }
  return d + close();
}

/** A line without axes, for a corner. The text beside it says the value, so it is hidden from screen readers. */
export function sparkline({ points, width = 72, height = 18, name = "" }) {
  const some = thin(points.map((y, x) => ({ x, y })), width / 2);
  const values = some.map((one) => one.y ?? 0);
  const top = values.reduce((a, b) => Math.max(a, b), 0) || 1;
  const last = some.at(-1)?.x || 1;
  const x = (value) => (value / last) * width;
  const y = (value) => height - 2 - (value / top) * (height - 4);
  return h("svg", { class: "sparkline " + name, width, height, viewBox: "0 0 " + width + " " + height, "aria-hidden": "true" },
    h("path", { class: "area a", d: path(some, x, y, height) }), h("path", { class: "line a", d: path(some, x, y) }));
}

/** Upright bars, one for each value; of more than the width can show, the highest of each bucket. */
export function barChart({ id, title, values, names, width, height = 120, format, line }) {
  const bars = thin(values.map((y, x) => ({ x, y })), Math.floor((width - LEFT - RIGHT) / 4));
  const lines = ticks(values.reduce((a, b) => Math.max(a, b), line?.value ?? 0), 2);
  const y = (value) => TOP + (1 - value / lines.at(-1)) * (height - TOP - BOTTOM);
  const step = Math.min(64, (width - LEFT - RIGHT) / Math.max(1, bars.length));
  const wide = Math.min(48, step * 0.8);
  const label = words(title, [{ name: plain(bars.length, values.length), points: values.map((one) => ({ y: one })) }], format);
  return h("figure", { class: "chart", key: id },
    h("figcaption", null, h("span", { class: "chart-title" }, title)),
    h("svg", { width, height, viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": label },
      lines.map((value) => [
        h("line", { key: "grid" + value, class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        h("text", { key: "tick" + value, class: "tick end", x: LEFT - 6, y: y(value) + 4 }, format(value)),
      ]),
      bars.map((one, at) =>
        h("rect", { key: "bar" + at, class: "bar-rect", x: LEFT + (at + 0.5) * step - wide / 2, width: wide, y: y(one.y), height: Math.max(0, y(0) - y(one.y)) },
          h("title", null, names(one.x) + ": " + format(one.y)))),
      line ? [
        h("line", { key: "mean", class: "mean", x1: LEFT, x2: width - RIGHT, y1: y(line.value), y2: y(line.value) }),
        h("text", { key: "meanname", class: "tick end", x: width - RIGHT, y: y(line.value) - 4 }, line.name),
      ] : null,
      bars.length ? [
        h("text", { key: "first", class: "tick middle", x: LEFT + step / 2, y: height - 4 }, names(bars[0].x)),
        h("text", { key: "last", class: "tick middle", x: LEFT + (bars.length - 0.5) * step, y: height - 4 }, bars.length > 1 ? names(bars.at(-1).x) : ""),
      ] : null));
}

function plain(shown, all) {
  return shown < all ? all + " values, " + shown + " bars" : all + " values";
}

/** A map of values: one cell each, the darker the higher. `name(index)` names a cell. */
export function heatMap({ id, title, values, width, name, format, describe }) {
  const columns = Math.min(values.length, values.length > 512 ? 128 : values.length > 64 ? 64 : 32, Math.floor(width / 9));
  const cell = Math.min(28, width / Math.max(1, columns));
  const rows = Math.ceil(values.length / columns);
  const tall = Math.min(cell, 20);
  const top = values.reduce((a, b) => Math.max(a, b), 0) || 1;
  return h("figure", { class: "chart heat", key: id },
    h("figcaption", null, h("span", { class: "chart-title" }, title),
      h("span", { class: "scale", "aria-hidden": "true" }, "0", h("span", { class: "ramp" }), format(top))),
    h("svg", { width: cell * columns, height: rows * tall, viewBox: "0 0 " + cell * columns + " " + rows * tall, role: "img", "aria-label": describe },
      values.map((value, at) =>
        h("rect", { key: "c" + at, class: "cell", x: (at % columns) * cell, y: Math.floor(at / columns) * tall, width: cell - 1, height: tall - 1, rx: 1.5,
          "fill-opacity": (0.06 + 0.94 * (value / top)).toFixed(3) },
          h("title", null, name(at) + ": " + format(value))))));
}

/** One line for each row: parts one after the other from `start`. `rows`: {name, start, parts: [{name, class, length}]}; `marks`: {name, at, class}. */
export function timeline({ id, title, rows, marks = [], width, format, describe }) {
  const label = 92;
  const lineHeight = 18;
  const end = Math.max(1, ...rows.map((row) => row.start + row.parts.reduce((a, one) => a + one.length, 0)), ...marks.map((one) => one.at));
  const lines = ticks(end, 4).filter((value) => value <= end);
  const x = (value) => label + (value / end) * (width - label - RIGHT - 30);
  const height = rows.length * lineHeight + BOTTOM + TOP;
  const parts = [...new Map(rows.flatMap((row) => row.parts).map((one) => [one.name, one.class])).entries()];
  return h("figure", { class: "chart", key: id },
    h("figcaption", null, h("span", { class: "chart-title" }, title),
      parts.map(([name, style]) => h("span", { class: "legend part " + style, key: name }, name)),
      marks.map((one) => h("span", { class: "legend mark-line " + one.class, key: one.name }, one.name + " " + format(one.at)))),
    h("svg", { width, height, viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": describe },
      lines.map((value) => [
        h("line", { key: "grid" + value, class: "grid", x1: x(value), x2: x(value), y1: TOP, y2: height - BOTTOM }),
        h("text", { key: "tick" + value, class: "tick middle", x: x(value), y: height - 4 }, format(value)),
      ]),
      rows.map((row, at) => {
        let from = row.start;
        const y = TOP + at * lineHeight;
        return [
          h("text", { key: "name" + at, class: "tick end", x: label - 8, y: y + 13 }, row.name),
          row.parts.map((one) => {
            const rect = h("rect", { key: one.name + at, class: "part " + one.class, x: x(from), y: y + 3, height: lineHeight - 6,
              width: Math.max(one.length > 0 ? 1 : 0, x(from + one.length) - x(from)) },
              h("title", null, row.name + ": " + one.name + " " + format(one.length)));
            from += one.length;
            return rect;
          }),
        ];
      }),
      marks.map((one) => h("line", { key: "mark" + one.name, class: "mark-line " + one.class, x1: x(one.at), x2: x(one.at), y1: TOP - 4, y2: height - BOTTOM }))));
}
