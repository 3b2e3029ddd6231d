// Dialogs of the browser's own kind: they keep the focus inside, close with Escape, and give the focus back.

import { h, render } from "./dom.js";

/**
 * Asks before something is done. `fields` describes inputs; `confirm` gets the form's values. Returns nothing: what follows is
 * the caller's. The dialog is removed when it is closed.
 */
export function ask({ title, text, fields = [], action, danger = false, confirm }) {
  const dialog = document.createElement("dialog");
  const before = document.activeElement;
  dialog.setAttribute("aria-labelledby", "dialog-title");
  dialog.setAttribute("aria-describedby", "dialog-text");
  dialog.className = "dialog";
  document.getElementById("dialogs").append(dialog);
  const close = () => dialog.close();
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (before?.isConnected) before.focus();
  });
  const submit = (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.currentTarget));
    close();
    confirm(values);
  };
  render(dialog,
    h("form", { method: "dialog", on: { submit } },
      h("h2", { id: "dialog-title" }, title),
      h("div", { id: "dialog-text" }, [text].flat().map((one) => h("p", null, one))),
      fields,
      h("div", { class: "buttons" },
        h("button", { type: "button", on: { click: close } }, "Do nothing"),
        h("button", { type: "submit", class: danger ? "danger" : "primary" }, action))));
  dialog.showModal();
  (dialog.querySelector("input, select") ?? dialog.querySelector("button[type=submit]")).focus();
}

export function textField({ name, label, hint, value = "", type = "text", ...more }) {
  return h("p", { class: "field", key: name },
    h("label", { for: "field-" + name }, label),
    h("input", { id: "field-" + name, name, type, value, autocomplete: "off", spellcheck: "false", "aria-describedby": hint ? "hint-" + name : null, ...more }),
    hint ? h("small", { id: "hint-" + name }, hint) : null);
}

export function radioField({ name, label, choices }) {
  return h("fieldset", { class: "field", key: name }, h("legend", null, label),
    choices.map(([value, text], index) =>
      h("label", { key: value, class: "radio" }, h("input", { type: "radio", name, value, checked: index === 0 }), h("span", null, text))));
}

export function checkField({ name, label, hint }) {
  return h("p", { class: "field", key: name },
    h("label", { class: "radio" }, h("input", { type: "checkbox", name, value: "yes" }), h("span", null, label)),
    hint ? h("small", null, hint) : null);
}
