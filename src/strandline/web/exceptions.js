// What went wrong, newest first: the cause in words, and the whole text on request.

import { h } from "./dom.js";
import { moment, plural } from "./format.js";
import { definitions, table } from "./table.js";

const KINDS = {
  run: "Run failed for good",
  restart: "Restart from the last checkpoint",
  slots: "Slots lost and rebuilt",
  checkpoint: "Checkpoint failed",
  rescale: "Rescale failed",
};

export function exceptions({ facts }) {
  const failures = [...facts.failures].reverse().map((one, index) => ({ ...one, key: facts.failures.length - index }));
  return h("section", { "aria-labelledby": "exceptions-title" },
    h("h2", { id: "exceptions-title" }, "Exceptions"),
    facts.error ? h("div", { class: "finding critical" }, h("h3", null, "The run ended with an error"), h("pre", null, facts.error)) : null,
    failures.length ? h("p", { class: "note" }, plural(failures.length, "failure") + " since the run began, newest first.") : null,
    table({
      id: "exceptions",
      caption: "Failures",
      rows: failures,
      rowKey: (one) => one.key,
      openName: (one) => "the failure at " + moment(one.time_ms),
      empty: "Nothing went wrong since the run began.",
      columns: [
        { name: "Time", value: (one) => one.time_ms, cell: (one) => moment(one.time_ms), class: "time" },
        { name: "What", value: (one) => one.kind, cell: (one) => KINDS[one.kind] ?? one.kind },
        { name: "Cause", value: (one) => one.cause, cell: (one) => one.cause, class: "words" },
        { name: "Subtasks", cell: (one) => subtasks(one.subtasks) },
      ],
      open: (one) => h("div", { class: "inside" },
        definitions([["Cause", one.cause], ["Subtasks", one.subtasks.join(", ") || "n/a"], one.checkpoint !== null ? ["Checkpoint", one.checkpoint] : null]),
        h("pre", { tabindex: "0" }, one.text || one.cause)),
    }));
}

function subtasks(numbers) {
  if (!numbers.length) return "–";
  return numbers.length > 8 ? numbers.slice(0, 8).join(", ") + " and " + (numbers.length - 8) + " more" : numbers.join(", ");
}
