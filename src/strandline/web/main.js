// The page: which part is shown, and how it is kept up to date.

import { h, render } from "./dom.js";
import { askForToken } from "./actions.js";
import { clock } from "./format.js";
import { jobView } from "./job.js";
import { jobList, lookAtHealth } from "./jobs.js";
import { Refused, takeTokenFromAddress, Unreachable } from "./server.js";
import { JobStore, listJobs } from "./store.js";
import { changed, forgetChoices, onChange } from "./ui.js";

const EVERY_MS = 1000;

const page = { jobs: null, store: null, tab: "", sub: undefined, problem: null, since: null, updated: null };
let timer = null;
let running = false;
let again = false;

function route() {
  takeTokenFromAddress();
  const parts = location.hash.startsWith("#/") ? location.hash.slice(2).split("/").map(decoded) : [];
  const [where, id, tab, sub] = parts;
  if (location.hash === "#main") return; // the link that skips the header
  if (where === "jobs" && id) {
    if (page.store?.id !== id) {
      forgetChoices();
      page.store = new JobStore(id);
      page.problem = null;
    }
    page.tab = tab ?? "overview";
    page.sub = sub;
  } else {
    page.store = null;
  }
  changed();
  refresh();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Asks the server once; a call while one is on its way asks again after it. */
async function refresh() {
  if (running) {
    again = true;
    return;
  }
  clearTimeout(timer);
  running = true;
  const began = performance.now();
  const store = page.store;
  try {
    if (store) await store.refresh();
    else {
      page.jobs = await listJobs();
      lookAtHealth(page.jobs);
    }
    settle(null);
  } catch (error) {
    if (store === page.store) settle(error);
  }
  running = false;
  changed();
  if (again) {
    again = false;
    refresh();
  } else if (!document.hidden) {
    timer = setTimeout(refresh, Math.max(100, EVERY_MS - (performance.now() - began)));
  }
}

function settle(error) {
  if (error && !(error instanceof Unreachable) && !(error instanceof Refused)) console.error(error);
  if (!error) page.updated = Date.now();
  page.since = error ? page.since ?? Date.now() : null;
  page.problem = error;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else refresh();
});
window.addEventListener("hashchange", route);
window.addEventListener("resize", changed);

function draw() {
  const began = performance.now();
  const { store, problem } = page;
  const facts = store?.facts;
  document.title = (facts ? facts.name + " · " + (facts.driver_lost ? "driver lost" : facts.status) : "Jobs") + " – Strandline";
  document.body.classList.toggle("stale", problem instanceof Unreachable);
  render(document.getElementById("bar"),
    h("a", { class: "brand", href: "#/" }, h("span", { class: "logo", "aria-hidden": "true" }), "Strandline"),
    h("nav", { "aria-label": "Where you are" }, store ? [h("a", { key: "jobs", href: "#/" }, "Jobs"), h("span", { key: "sep", "aria-hidden": "true" }, "/"), h("span", { key: "name", class: "here", "aria-current": "page" }, facts?.name ?? store.id)] : null),
    h("span", { class: "updated" }, page.updated ? "updated " + clock(page.updated) : ""));
  render(document.getElementById("notices"), notice(problem));
  render(document.getElementById("main"), content());
  page.drawn = performance.now() - began;
  const place = location.hash;
  if (place !== page.place && facts) {
    page.place = place;
    for (const tab of document.querySelectorAll("[role=tab][aria-selected=true]")) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function notice(problem) {
  if (!problem) return null;
  if (problem instanceof Unreachable) {
    return h("p", { class: "notice" }, h("b", null, "The server cannot be reached"), " since " + clock(page.since) + " (" + problem.message + "). " +
      (page.updated ? "What you see is from " + clock(page.updated) + ". " : "") + "The page goes on trying every second. If the driver ended, its server ended with it: ", h("code", null, "strandline ui CHECKPOINT_DIR"), " shows jobs that ended.");
  }
  if (problem instanceof Refused && (problem.status === 401 || problem.status === 403)) {
    return h("p", { class: "notice" }, problem.message + " ", h("button", { type: "button", on: { click: () => askForToken(problem.message, refresh) } }, "Give the token"));
  }
  if (problem instanceof Refused) return h("p", { class: "notice" }, problem.message);
  return h("p", { class: "notice" }, "The page has an error of its own: " + problem.message);
}

function content() {
  if (page.store) {
    if (page.store.facts) return jobView(page.store, page.tab, page.sub);
    return h("p", { class: "loading" }, page.problem ? ["Nothing is known of this job. ", h("a", { href: "#/" }, "All jobs")] : "Loading …");
  }
  if (page.jobs) return jobList(page.jobs);
  return h("p", { class: "loading" }, page.problem ? "No jobs could be loaded." : "Loading …");
}

// For measurements: how long the last drawing took.
globalThis.strandlinePage = { get drawnMs() { return page.drawn; }, get updated() { return page.updated; } };

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
onChange(draw);
route();
