// Tabs as the ARIA practices describe them: arrow keys, Home and End move; each tab has an address.

import { h } from "./dom.js";

/** `tabs`: {id, name, href}. `content` describes the panel of the current one. */
export function tabs({ id, label, tabs: all, current, content, level = "" }) {
  return h("div", { class: "tabs " + level, key: id },
    h("div", { role: "tablist", "aria-label": label, class: "tablist", on: { keydown: move } },
      all.map((tab) =>
        h("a", {
          key: tab.id,
          id: id + "-tab-" + tab.id,
          role: "tab",
          href: tab.href,
          "aria-selected": String(tab.id === current),
          "aria-controls": id + "-panel",
          tabindex: tab.id === current ? "0" : "-1",
          on: { keydown: press },
        }, tab.name, tab.badge ? h("span", { class: "badge" }, tab.badge) : null))),
    h("div", { key: "panel-" + current, id: id + "-panel", role: "tabpanel", class: "panel", "aria-labelledby": id + "-tab-" + current }, content));
}

function press(event) {
  if (event.key !== " ") return;
  event.preventDefault();
  event.currentTarget.click();
}

function move(event) {
  const all = [...event.currentTarget.querySelectorAll("[role=tab]")];
  const at = all.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  const next = all[(to + all.length) % all.length];
  next.focus();
  next.click();
}
