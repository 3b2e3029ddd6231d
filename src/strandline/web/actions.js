// The buttons: what each will do in words, its confirmation, its progress and its result.

import { announce, h } from "./dom.js";
import { ask, checkField, radioField, textField } from "./dialog.js";
import { bytes, duration } from "./format.js";
import { keepToken, ofJob, Refused, trigger, Unreachable } from "./server.js";
import { changed } from "./ui.js";

const operations = [];
const KEPT = 6;
let number = 0;

const FORMATS = radioField({
  name: "format",
  label: "Format",
  choices: [
    ["CANONICAL", "Canonical: every state backend can restore it"],
    ["NATIVE", "Native: the backend's own files, faster"],
  ],
});

function folder(label, hint) {
  return textField({ name: "directory", label, hint, placeholder: "s3://bucket/savepoints" });
}

/** The buttons of a job. They are disabled with a reason when the job cannot be steered from here. */
export function actionButtons(store) {
  const { facts, steerable } = store;
  const busy = operations.some((one) => one.job === store.id && !one.done && one.exclusive);
  const button = (text, act, style = "") =>
    h("button", { key: text, type: "button", class: style, disabled: !steerable || busy, "aria-describedby": steerable ? null : "why-not", on: { click: () => act(store) } }, text);
  return h("div", { class: "actions", role: "group", "aria-label": "Change the job " + facts.name },
    button("Checkpoint", checkpoint), button("Savepoint", savepoint), button("Rescale", rescale),
    button("Stop", stop), button("Cancel", cancel, "danger"));
}

function checkpoint(store) {
  ask({
    title: "Take a checkpoint now?",
    text: "The job goes on. The checkpoint is taken at the next barrier and uploads what is new since the last one.",
    fields: [checkField({ name: "full", label: "Full: upload the whole state", hint: "State is now " + bytes(store.facts.figures?.state_bytes) + "." })],
    action: "Take a checkpoint",
    confirm: ({ full }) => run(store, "Checkpoint", {
      method: "POST", path: ["checkpoints"], body: { checkpointType: full ? "FULL" : "CONFIGURED" }, poll: "checkpoints",
      words: (done) => "Checkpoint " + (done.checkpointId ?? "") + " completed.",
    }),
  });
}

function savepoint(store) {
  ask({
    title: "Write a savepoint?",
    text: "The job goes on. The whole state (" + bytes(store.facts.figures?.state_bytes) + ") is written to a folder that you own and delete yourself.",
    fields: [folder("Directory", "Empty: the job's option savepoint_dir."), FORMATS],
    action: "Write the savepoint",
    confirm: ({ directory, format }) => run(store, "Savepoint", {
      method: "POST", path: ["savepoints"], body: { "target-directory": directory.trim() || null, "cancel-job": false, formatType: format }, poll: "savepoints",
      words: (done) => "Savepoint completed. Path: " + (done.location ?? "n/a"),
    }),
  });
}

function stop(store) {
  ask({
    title: "Stop the job " + store.facts.name + "?",
    text: [
      "The job takes a last checkpoint and ends. With a directory it writes a savepoint, too.",
      "To go on later: start the job again, or run it from the savepoint.",
    ],
    fields: [
      folder("Savepoint directory", "Empty: no savepoint, only the last checkpoint."), FORMATS,
      checkField({ name: "drain", label: "Drain: the job has done its work", hint: "Closes all windows and fires all event-time timers before. Do not drain a job that goes on later: its windows would be incomplete." }),
    ],
    action: "Stop the job",
    danger: true,
    confirm: ({ directory, format, drain }) => run(store, "Stop", {
      method: "POST", path: ["stop"], body: { targetDirectory: directory.trim() || null, formatType: format, drain: Boolean(drain) }, poll: "savepoints", exclusive: true, ends: true,
      words: (done) => (done.location ? "The job stopped. Savepoint: " + done.location : "The job stopped after a last checkpoint."),
    }),
  });
}

function cancel(store) {
  ask({
    title: "Cancel the job " + store.facts.name + "?",
    text: [
      "The job ends at once, without a last checkpoint. A later start goes on from checkpoint " + (store.facts.checkpoints.last_completed?.id ?? "n/a") + " and reads again what came after it.",
      "With the option on_cancel=\"delete\", the checkpoints are deleted. Stop keeps more.",
    ],
    action: "Cancel the job",
    danger: true,
    confirm: () => run(store, "Cancel", {
      method: "PATCH", path: [], query: "?mode=cancel", exclusive: true, ends: true, words: () => "The job is being cancelled. Its status says when it has ended.",
    }),
  });
}

function rescale(store) {
  const now = store.facts.figures?.parallelism ?? 1;
  ask({
    title: "Change the parallelism of " + store.facts.name + "?",
    text: "The job takes a checkpoint, pauses for seconds while key groups move to other subtasks, and goes on. It has " + now + " now.",
    fields: [textField({ name: "parallelism", label: "Subtasks per step", type: "number", value: String(now), min: "1", max: String(store.facts.config?.max_parallelism ?? 32768), required: true })],
    action: "Rescale",
    confirm: ({ parallelism }) => run(store, "Rescale to " + parallelism, {
      method: "PATCH", path: ["rescaling"], query: "?parallelism=" + encodeURIComponent(parallelism), poll: "rescaling", exclusive: true,
      words: () => "The job runs with " + parallelism + " subtasks per step.",
    }),
  });
}

async function run(store, name, request) {
  const operation = { number: ++number, job: store.id, name, began: Date.now(), text: "", exclusive: request.exclusive };
  operations.unshift(operation);
  operations.length = Math.min(operations.length, KEPT);
  announce(name + " began.");
  changed();
  try {
    const done = await trigger(
      request.method, ofJob(store.id, ...request.path) + (request.query ?? ""), request.body,
      (id) => ofJob(store.id, request.poll, id), (progress) => tell(operation, progress));
    end(operation, true, request.words(done));
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      operations.splice(operations.indexOf(operation), 1);
      askForToken(error.message, () => run(store, name, request));
    } else if (error instanceof Unreachable && request.ends) {
      end(operation, true, "The server does not answer any more. It ends with the driver; look at the job's status with: strandline status " + store.facts.name);
    } else if (error instanceof Unreachable) {
      end(operation, false, "The server cannot be reached (" + error.message + "), so the outcome is not known. Look at the job before you try again.");
    } else {
      end(operation, false, error.message);
    }
  }
  changed();
}

function tell(operation, progress) {
  if (progress && typeof progress === "object") {
    const { step = "", done, total, unit } = progress;
    const size = unit === "bytes" ? bytes : String;
    operation.share = total ? done / total : null;
    operation.text = step + (total ? " " + size(done) + " of " + size(total) : "");
  } else {
    operation.text = progress;
  }
  changed();
}

function end(operation, good, text) {
  Object.assign(operation, { done: true, good, text, ended: Date.now() });
  announce(operation.name + ": " + (good ? "" : "failed. ") + text.split("\n")[0]);
}

/** What was asked of the job from this page, newest first. */
export function operationList(id) {
  const mine = operations.filter((one) => one.job === id);
  if (!mine.length) return null;
  return h("ul", { class: "operations", "aria-label": "What was asked from this page" }, mine.map(shown));
}

function shown(operation) {
  const { number: key, name, done, good, text, began, ended, share } = operation;
  const [first, ...more] = text.split("\n");
  return h("li", { key, class: done ? (good ? "good" : "bad") : "running" },
    h("b", null, name), " ",
    done
      ? [h("span", { class: "outcome" }, (good ? "" : "Failed: ") + first), more.length ? h("details", { key: "more" }, h("summary", null, "Whole text"), h("pre", null, text)) : null]
      : [h("progress", { key: "bar", "aria-label": name, max: "1", ...(share === null || share === undefined ? {} : { value: share }) }), h("span", { class: "outcome" }, text || "working …")],
    h("span", { class: "took" }, duration((ended ?? Date.now()) - began)),
    done ? h("button", { type: "button", class: "quiet", "aria-label": "Remove this line about " + name, on: { click: () => remove(operation) } }, "×") : null);
}

function remove(operation) {
  operations.splice(operations.indexOf(operation), 1);
  changed();
}

/** Asks for the token, and goes on with it. */
export function askForToken(why, then) {
  ask({
    title: "The server wants a token",
    text: [why, "Every run has its own token. Its user gets it with the command strandline ui JOB, which prints the address of this page with the token."],
    fields: [textField({ name: "token", label: "Token", type: "password", required: true })],
    action: "Go on",
    confirm: ({ token }) => {
      keepToken(token.trim());
      then();
    },
  });
}
