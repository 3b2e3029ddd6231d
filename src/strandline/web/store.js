// What is known of the jobs: the list, and the facts of the job that is looked at, put together from partial answers.

import { get, getWithHeaders, ofJob } from "./server.js";

const KEPT_CHECKPOINTS = 10_000;
const KEPT_SAMPLES = 600;
const KEPT_DETAILS = 50;
const KEPT_DETAIL_MS = 10_000;

export class JobStore {
  constructor(id) {
    this.id = id;
    this.facts = null;
    this.steerable = false;
    this.checkpoints = []; // newest first
    this.samples = [];
    this.details = new Map(); // checkpoints with their subtasks, by id
  }

  /** Asks for what is new since the last time. */
  async refresh() {
    const query = new URLSearchParams({ subtasks: "false", checkpoints: String(KEPT_CHECKPOINTS) });
    if (this.facts) {
      query.set("after", String(this.firstUnsettled()));
      if (this.samples.length) query.set("samples_after", String(this.samples.at(-1).time_ms));
    }
    const [facts, headers] = await getWithHeaders(ofJob(this.id, "facts") + "?" + query);
    if (this.facts && this.facts.run !== facts.run) {
      this.forget();
      return this.refresh();
    }
    this.take(facts);
    this.steerable = headers.get("X-Strandline-Control") !== "no" && runs(facts);
  }

  forget() {
    this.facts = null;
    this.checkpoints = [];
    this.samples = [];
    this.details.clear();
  }

  take(facts) {
    const news = facts.checkpoints.history;
    if (news.length) {
      const first = news[0].id;
      const older = this.checkpoints.filter((one) => one.id < first);
      this.checkpoints = [...news].reverse().concat(older).slice(0, KEPT_CHECKPOINTS);
    }
    const since = this.samples.at(-1)?.time_ms ?? 0;
    this.samples = this.samples.concat(facts.samples.filter((one) => one.time_ms > since)).slice(-KEPT_SAMPLES);
    this.facts = facts;
  }

  /** The oldest checkpoint whose figures may still change. */
  firstUnsettled() {
    let first = this.checkpoints[0]?.id ?? 0;
    for (const one of this.checkpoints.slice(0, 100)) if (one.status === "in_progress") first = Math.min(first, one.id);
    return first;
  }

  /** The figures of a checkpoint's subtasks; null while they are on their way. `changed` is called when they are there. */
  detail(id, changed) {
    const known = this.details.get(id);
    const current = this.checkpoints.find((one) => one.id === id);
    // a completed one may be discarded later
    const settled = known?.value && known.value.status !== "in_progress" && Date.now() - known.time < KEPT_DETAIL_MS;
    if (!settled && !known?.asked && !(known?.error && current?.status !== "in_progress")) this.ask(id, changed);
    return this.details.get(id);
  }

  async ask(id, changed) {
    const entry = this.details.get(id) ?? { value: null };
    if (entry.time && Date.now() - entry.time < 900) return;
    entry.asked = true;
    entry.time = Date.now();
    this.details.set(id, entry);
    if (this.details.size > KEPT_DETAILS) this.details.delete(this.details.keys().next().value);
    try {
      entry.value = await get(ofJob(this.id, "facts", "checkpoints", String(id)));
      entry.error = null;
    } catch (error) {
      entry.error = error.message;
    }
    entry.asked = false;
    changed();
  }
}

export function runs(facts) {
  return !facts.driver_lost && !ended(facts);
}

export function ended(facts) {
  return ["finished", "stopped", "cancelled", "failed"].includes(facts.status);
}

/** Flink's list of the jobs. */
export async function listJobs() {
  return (await get("jobs/overview")).jobs;
}
