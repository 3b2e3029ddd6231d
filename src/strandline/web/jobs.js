// The list of the jobs.

import { h } from "./dom.js";
import { duration, moment, NONE } from "./format.js";
import { get, ofJob } from "./server.js";
import { table } from "./table.js";
import { changed } from "./ui.js";

const EVERY_MS = 5000;
const LOOKED_AT = 25;
const healths = new Map(); // findings by id of a job

/** Flink's list has no health, so that it is asked for, of the first jobs, now and then. */
export function lookAtHealth(jobs) {
  for (const { jid } of jobs.slice(0, LOOKED_AT)) {
    const known = healths.get(jid);
    if (known && Date.now() - known.time < EVERY_MS) continue;
    healths.set(jid, { ...known, time: Date.now() });
    get(ofJob(jid, "health")).then((answer) => {
      healths.set(jid, { time: Date.now(), findings: answer.findings });
      changed();
    }, () => {}); // the list itself says when the server is gone
  }
}

export function jobList(jobs) {
  const running = jobs.filter((one) => !["FINISHED", "CANCELED", "FAILED", "SUSPENDED"].includes(one.state)).length;
  return h("section", { "aria-labelledby": "jobs-title" },
    h("h1", { id: "jobs-title" }, "Jobs"),
    h("p", { class: "note" }, jobs.length ? running + " of " + jobs.length + " running" : "This server shows no job yet."),
    table({
      id: "jobs",
      caption: "Jobs",
      rows: jobs,
      rowKey: (one) => one.jid,
      empty: "No job has registered itself. Start one with: strandline run APP.py",
      columns: [
        { name: "Job", value: (one) => one.name, class: "words", cell: (one) => h("a", { class: "job-link", href: "#/jobs/" + encodeURIComponent(one.jid) }, one.name) },
        { name: "Status", value: (one) => one.state, cell: (one) => h("span", { class: "pill " + flinkTone(one.state) }, one.state === "SUSPENDED" ? "driver lost" : one.state.toLowerCase()) },
        { name: "Health", class: "words", cell: (one) => healthWords(one.state, healths.get(one.jid)?.findings) },
        { name: "Started", value: (one) => one["start-time"], cell: (one) => moment(one["start-time"]), class: "time" },
        { name: "Duration", number: true, value: (one) => one.duration, cell: (one) => duration(one.duration) },
        { name: "Ended", value: (one) => one["end-time"], cell: (one) => (one["end-time"] > 0 ? moment(one["end-time"]) : "–"), class: "time" },
      ],
    }));
}

const ENDS = { SUSPENDED: ["critical", "The driver is gone"], FAILED: ["critical", "The run failed"], FINISHED: ["info", "–"], CANCELED: ["info", "–"] };

function healthWords(state, findings) {
  if (ENDS[state]) return h("span", { class: "tone-" + ENDS[state][0] }, ENDS[state][1]);
  if (!Array.isArray(findings)) return NONE;
  if (!findings.length) return h("span", { class: "tone-good" }, "Healthy");
  const [worst] = findings;
  return h("span", { class: "tone-" + worst.severity }, worst.title + (findings.length > 1 ? " (and " + (findings.length - 1) + " more)" : ""));
}

function flinkTone(state) {
  return { RUNNING: "good", FINISHED: "calm", CANCELED: "calm", FAILED: "critical", RESTARTING: "warning", FAILING: "critical", SUSPENDED: "critical" }[state] ?? "calm";
}
