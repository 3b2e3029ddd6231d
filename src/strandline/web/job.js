// One job: its health in words, its main figures, its buttons and its tabs.

import { h } from "./dom.js";
import { actionButtons, operationList } from "./actions.js";
import { changes } from "./changes.js";
import { sparkline } from "./charts.js";
import { checkpoints, completion } from "./checkpoints.js";
import { configuration } from "./configuration.js";
import { exceptions } from "./exceptions.js";
import { bytes, clock, count, duration, moment, NONE, plural, short } from "./format.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { dataSkew } from "./skew.js";
import { ended, runs } from "./store.js";
import { tabs } from "./tabs.js";
import { choice, toggle } from "./ui.js";

const TABS = [
  ["overview", "Overview", overview],
  ["exceptions", "Exceptions", exceptions],
  ["skew", "Data Skew", dataSkew],
  ["checkpoints", "Checkpoints", checkpoints],
  ["configuration", "Configuration", configuration],
  ["rescales", "Rescales and recoveries", changes],
  ["logs", "Logs", logs],
];

export function jobView(store, tab, sub) {
  const { facts } = store;
  const [current, , view] = TABS.find(([id]) => id === tab) ?? TABS[0];
  return [
    h("section", { key: "head", class: "job-head", "aria-labelledby": "job-title" },
      h("div", { class: "job-line" },
        h("div", { class: "job-name" }, h("h1", { id: "job-title" }, facts.name), h("span", { class: "pill " + tone(facts) }, statusWords(facts)),
          h("span", { class: "since" }, sinceWords(facts))),
        actionButtons(store)),
      store.steerable ? null : h("p", { id: "why-not", class: "note" }, whyNot(store)),
      operationList(store.id),
      health(facts),
      figures(store)),
    tabs({
      id: "job", label: "Parts of the job " + facts.name, current,
      tabs: TABS.map(([id, name]) => ({ id, name, href: "#/jobs/" + encodeURIComponent(store.id) + "/" + id, badge: id === "exceptions" && facts.failures.length ? String(facts.failures.length) : null })),
      content: view(store, sub),
    }),
  ];
}

function statusWords(facts) {
  return facts.driver_lost ? "driver lost" : facts.status;
}

function tone(facts) {
  if (facts.driver_lost || facts.status === "failed") return "critical";
  if (facts.status === "running") return "good";
  return facts.status === "restarting" || facts.status === "rescaling" ? "warning" : "calm";
}

function sinceWords(facts) {
  if (facts.driver_lost) return "last seen " + moment(facts.taken_ms);
  if (ended(facts)) return "ended " + moment(facts.end_ms);
  return "since " + moment(facts.start_ms);
}

function whyNot({ facts }) {
  if (facts.driver_lost) return "The buttons are off: the driver is gone, so nobody can carry them out.";
  if (ended(facts)) return "The buttons are off: the run is over.";
  return "The buttons are off: the job runs elsewhere. Its own page is at " + (facts.driver.ui_url || "an address that is not known") + ".";
}

function health(facts) {
  const findings = facts.health;
  if (!findings.length) {
    const text = ended(facts) ? "The run is over." : facts.status === "running" ? "Healthy: no rule is broken." : "The job is " + facts.status + ".";
    return h("div", { key: "health", class: "health " + (facts.status === "running" ? "good" : "calm"), role: "status" }, h("h2", { class: "unseen" }, "Health"), h("p", null, text));
  }
  const all = choice("findings", false);
  const shown = all ? findings : findings.slice(0, 3);
  return h("div", { key: "health", class: "health" },
    h("h2", { class: "unseen" }, "Health"),
    h("p", { class: "unseen", role: "status" }, plural(findings.length, "finding") + ". Worst: " + findings[0].title),
    h("ul", { class: "findings" }, shown.map(finding)),
    findings.length > 3
      ? h("button", { type: "button", class: "quiet", "aria-expanded": String(all), on: { click: () => toggle("findings") } }, all ? "Show fewer" : "Show " + plural(findings.length - 3, "more finding"))
      : null);
}

function finding(one) {
  return h("li", { key: one.rule + one.subject, class: "finding " + one.severity },
    h("p", { class: "finding-title" }, h("span", { class: "severity" }, one.severity), h("b", null, one.title), one.subject ? h("span", { class: "subject" }, one.subject) : null),
    h("p", { class: "measured" }, one.text),
    h("p", { class: "remedy" }, h("b", null, "What to do: "), one.remedy));
}

/** What goes on that the other figures do not show yet: a restore, the first batch, a long batch. */
function goesOn(facts) {
  const { restoring, running_batch: batch, generation } = facts.figures ?? {};
  if (!runs(facts)) return null;
  if (restoring) return "Restoring: " + bytes(restoring.done_bytes) + " of " + bytes(restoring.total_bytes);
  if (!batch || !(batch.first || batch.running_ms >= 2000)) return null;
  return (batch.first ? "The first batch" : "Batch " + batch.number) + " of generation " + generation + " has been running for " + duration(batch.running_ms);
}

function figures(store) {
  const { facts, samples } = store;
  const f = facts.figures;
  const last = facts.checkpoints.last_completed;
  const of = (name) => samples.map((one) => one[name]);
  const behind = f?.sources?.some((one) => one.offsets_behind !== null) ? f.sources.reduce((sum, one) => sum + (one.offsets_behind ?? 0), 0) : null;
  const until = facts.end_ms ?? facts.taken_ms;
  return h("dl", { key: "figures", class: "figures" },
    figure("Rows/s", short(f?.rows_per_second), goesOn(facts) ?? "last minute; " + short(f?.rows) + " rows in all", sparkline({ points: of("rows_per_second") })),
    figure("Lag", behind !== null ? short(behind) + " offsets" : duration(f?.watermark_lag_ms), behind !== null ? "watermark " + duration(f.watermark_lag_ms) : f?.watermark_lag_ms === null ? "no watermark" : "of the watermark", sparkline({ points: of(behind !== null ? "offsets_behind" : "watermark_lag_ms") })),
    figure("State", bytes(f?.state_bytes), bytes(f?.state_memory_bytes) + " in memory", sparkline({ points: of("state_bytes") })),
    figure("Last checkpoint", last ? (runs(facts) ? duration(Math.max(0, until - completion(last))) + " ago" : clock(completion(last))) : "None",
      last ? "no. " + last.id + ", took " + duration(last.end_to_end_ms) : "", null),
    figure("Uptime", duration(until - facts.start_ms), plural(f?.restarts ?? 0, "restart"), null),
    figure("Parallelism", count(f?.parallelism), "generation " + (f?.generation ?? NONE), null));
}

function figure(name, value, more, picture) {
  return h("div", { key: name, class: "figure" }, h("dt", null, name), h("dd", { class: "value" }, value), h("dd", { class: "more" }, more), picture ? h("dd", { class: "picture" }, picture) : null);
}
