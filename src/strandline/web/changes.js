// Rescales, recoveries and the statuses of the run.

import { h } from "./dom.js";
import { bytes, count, duration, moment } from "./format.js";
import { table } from "./table.js";

const number = (name, value, format, hint) => ({ name, number: true, value, cell: (one) => format(value(one)), hint });
const time = { name: "Time", value: (one) => one.time, cell: (one) => moment(one.time * 1000), class: "time" };

export function changes({ facts }) {
  const keyed = (some) => some.map((one, index) => ({ ...one, key: index })).reverse();
  return [
    h("section", { key: "rescales", "aria-labelledby": "rescales-title" }, h("h2", { id: "rescales-title" }, "Rescales"),
      table({
        id: "rescales", caption: "Rescales", rows: keyed(facts.rescalings), rowKey: (one) => one.key, empty: "The parallelism was not changed since the run began.",
        columns: [
          time,
          { name: "Parallelism", value: (one) => one.parallelism, cell: (one) => one.parallelism_before + " → " + one.parallelism },
          number("Duration", (one) => one.duration_ms, duration),
          number("Paused", (one) => one.pause_ms, duration, "no rows were processed"),
          number("of it: checkpoint", (one) => one.checkpoint_ms, duration),
          number("of it: slots", (one) => one.slots_ms, duration),
          number("Key groups moved", (one) => one.moved_key_groups, count),
          number("Read locally", (one) => one.local_bytes, bytes),
          number("Read from storage", (one) => one.durable_bytes, bytes),
          number("After batch", (one) => one.batch, count),
        ],
      })),
    h("section", { key: "recoveries", "aria-labelledby": "recoveries-title" }, h("h2", { id: "recoveries-title" }, "Recoveries"),
      table({
        id: "recoveries", caption: "Recoveries", rows: keyed(facts.recoveries), rowKey: (one) => one.key, empty: "Nothing had to be recovered since the run began.",
        columns: [
          time,
          { name: "What", class: "words", value: (one) => one.kind, cell: (one) => (one.kind === "restart" ? "All slots went back to the last checkpoint" : "Rebuilt " + slots(one.slots) + ", the others went on") },
          { name: "Reason", value: (one) => one.reason, cell: (one) => one.reason, class: "words" },
          number("Duration", (one) => one.duration_ms, duration),
          number("Read locally", (one) => one.local_bytes, bytes),
          number("Read from storage", (one) => one.durable_bytes, bytes),
          number("At batch", (one) => one.batch, count),
        ],
      })),
    h("section", { key: "statuses", "aria-labelledby": "statuses-title" }, h("h2", { id: "statuses-title" }, "Statuses"),
      table({
        id: "statuses", caption: "Statuses of the run", rows: keyed(facts.statuses), rowKey: (one) => one.key,
        columns: [
          { name: "Time", value: (one) => one.time_ms, cell: (one) => moment(one.time_ms), class: "time" },
          { name: "Status", value: (one) => one.status, cell: (one) => one.status },
          number("Lasted", (one) => (facts.statuses[one.key + 1]?.time_ms ?? facts.end_ms ?? facts.taken_ms) - one.time_ms, duration),
        ],
      })),
  ];
}

function slots(numbers) {
  const words = numbers.length > 8 ? numbers.slice(0, 8).join(", ") + " and " + (numbers.length - 8) + " more" : numbers.join(", ");
  return (numbers.length === 1 ? "slot " : "slots ") + words;
}
