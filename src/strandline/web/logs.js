// The ends of the logs of the job's processes.

import { h } from "./dom.js";
import { askForToken } from "./actions.js";
import { get, ofJob, Refused } from "./server.js";
import { changed, choice, choose } from "./ui.js";

const EVERY_MS = 2000;
const LOCKED = "Logs may hold data, so the server shows them only to those who have its token.";
const state = { job: null, processes: null, log: null, error: null, asked: 0, wanted: undefined, running: false, refused: false };

export function logs(store, wanted) {
  if (state.job !== store.id) Object.assign(state, { job: store.id, processes: null, log: null, error: null, asked: 0, refused: false });
  const process = wanted ?? state.processes?.[0];
  const follow = choice("logs.follow", true);
  if (!state.refused && (state.asked === 0 || state.wanted !== process || (follow && Date.now() - state.asked >= EVERY_MS))) load(store, process);
  return h("section", { "aria-labelledby": "logs-title" },
    h("h2", { id: "logs-title" }, "Logs"),
    state.processes?.length ? controls(store, process) : null,
    state.refused ? locked(store) : state.error ? h("p", { class: "bad", role: "alert" }, state.error) : null,
    state.processes?.length === 0 ? h("p", { class: "empty" }, "No process has a log here.") : null,
    state.log ? text(state.log, follow) : null);
}

function controls(store, process) {
  return h("div", { class: "row" },
    h("label", null, "Process ", h("select", { key: state.processes.length + ":" + process, value: process ?? "", on: { change: (event) => open(store, event.target.value) } },
      state.processes.map((name) => h("option", { key: name, value: name }, name)))),
    h("label", null, "Only lines with ", h("input", { type: "search", value: choice("logs.filter", ""), on: { input: (event) => choose("logs.filter", event.target.value) } })),
    h("label", { class: "radio" }, h("input", { type: "checkbox", checked: true, on: { change: (event) => choose("logs.follow", event.target.checked) } }), h("span", null, "Follow")));
}

function locked(store) {
  return h("div", { class: "row" }, h("p", { class: "log-help" }, LOCKED),
    h("button", { type: "button", class: "primary", on: { click: () => token(store) } }, "Give the token"));
}

function text(log, follow) {
  const wanted = choice("logs.filter", "").toLowerCase();
  const lines = log.text.split("\n");
  const shown = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  if (follow) requestAnimationFrame(bottom);
  return [
    log.cut ? h("p", { key: "cut", class: "note" }, "The end of a longer log. More of it: ", h("code", null, "strandline logs JOB --lines 5000")) : null,
    h("pre", { key: "log-" + log.process, id: "log", class: "log", tabindex: "0", role: "region", "aria-label": "Log of " + log.process }, shown.join("\n") || (wanted && log.text ? "No line matches." : "The log is empty.")),
  ];
}

// Somebody who scrolled up reads, and is left alone.
function bottom() {
  const log = document.getElementById("log");
  if (!log) return;
  const before = log.__bottom;
  if (before === undefined || log.scrollTop + log.clientHeight >= before - 24) log.scrollTop = log.scrollHeight;
  log.__bottom = log.scrollHeight;
}

function open(store, process) {
  location.hash = "#/jobs/" + encodeURIComponent(store.id) + "/logs/" + encodeURIComponent(process);
}

function token(store) {
  askForToken(LOCKED, () => {
    Object.assign(state, { refused: false, error: null, asked: 0 });
    load(store, undefined);
    changed();
  });
}

async function load(store, process) {
  if (state.running) return;
  state.running = true;
  state.asked = Date.now();
  state.wanted = process;
  try {
    const { processes } = await get(ofJob(store.id, "logs"));
    const name = process ?? processes[0];
    const log = name === undefined ? null : await get(ofJob(store.id, "logs", name));
    if (state.job === store.id) Object.assign(state, { processes, log, error: null, wanted: name });
  } catch (error) {
    state.error = error.message;
    state.refused = error instanceof Refused && error.status === 401;
  }
  state.running = false;
  changed();
}
