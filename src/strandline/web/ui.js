// What a person chose in the page (sorting, pages, open rows), and the request to draw again.

const chosen = new Map();
let redraw = () => {};
let asked = false;

/** `draw` is called once before the next frame, however often `changed` is called. */
export function onChange(draw) {
  redraw = draw;
}

export function changed() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    redraw();
  });
}

/** What was chosen under that name, or `otherwise`. */
export function choice(name, otherwise) {
  return chosen.has(name) ? chosen.get(name) : otherwise;
}

export function choose(name, value) {
  chosen.set(name, value);
  changed();
}

export function toggle(name) {
  choose(name, !choice(name, false));
}

/** Choices about a job do not outlive a look at another one. */
export function forgetChoices() {
  chosen.clear();
}

/** The width that charts may use. */
export function contentWidth() {
  return Math.max(280, document.getElementById("main").clientWidth - (narrow() ? 24 : 48));
}

export function narrow() {
  return window.matchMedia("(max-width: 700px)").matches;
}
