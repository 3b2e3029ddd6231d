// The options of the job, and the process that runs it.

import { h } from "./dom.js";
import { NONE } from "./format.js";
import { definitions, table } from "./table.js";
import { choice, choose } from "./ui.js";

export function configuration({ facts }) {
  const { driver } = facts;
  const wanted = choice("config.filter", "").toLowerCase();
  const rows = Object.entries(facts.config).map(([name, value]) => ({ name, value: worded(value) }))
    .filter((one) => (one.name + " " + one.value).toLowerCase().includes(wanted)).sort((a, b) => (a.name < b.name ? -1 : 1));
  return [
    h("section", { key: "driver", "aria-labelledby": "driver-title" }, h("h2", { id: "driver-title" }, "Driver"),
      definitions([["Host", driver.host || NONE], ["Process", driver.pid || NONE], ["User", driver.user || NONE], ["Strandline", driver.strandline || NONE], ["Spark", driver.spark || NONE],
        ["Python", driver.python || NONE], ["Job ID", h("span", { class: "path" }, facts.id)], ["Run", h("span", { class: "path" }, facts.run)], ["Checkpoints", h("span", { class: "path" }, facts.checkpoint_dir || NONE)]])),
    h("section", { key: "options", "aria-labelledby": "options-title" }, h("h2", { id: "options-title" }, "Configuration"),
      h("p", { class: "row" }, h("label", null, "Filter ", h("input", { type: "search", value: choice("config.filter", ""), on: { input: (event) => choose("config.filter", event.target.value) } })),
        h("span", { class: "note" }, "Secrets are left out.")),
      table({ id: "config", caption: "Options of the job", rows, rowKey: (one) => one.name, empty: "No option matches.",
        columns: [{ name: "Option", value: (one) => one.name, cell: (one) => h("code", null, one.name) }, { name: "Value", cell: (one) => one.value, class: "words" }] })),
  ];
}

function worded(value) {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
