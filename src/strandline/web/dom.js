// Elements are described by `h` and brought up to date in place, so that focus, scrolling and selections survive a refresh.
// Texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Describes an element. `props`: `key`, `class`, `style` (an object), `on` (handlers by event), and attributes. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: flat(children), key: props?.key };
}

function flat(children) {
  const out = [];
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") out.push(child);
  }
  return out;
}

/** Makes the children of `parent` be what `children` describes. An element that has the focus keeps it. */
export function render(parent, ...children) {
  const focused = document.activeElement;
  patchChildren(parent, flat(children));
  if (focused && focused !== document.body && focused !== document.activeElement && focused.isConnected) {
    focused.focus({ preventScroll: true });
  }
}

function identity(node, index) {
  if (typeof node !== "object") return "#text" + index;
  return node.tag + (node.key === undefined ? "#" + index : ":" + node.key);
}

function patchChildren(parent, children) {
  const old = new Map();
  let number = 0;
  for (const node of parent.childNodes) old.set(node.__id ?? "#foreign" + number++, node);
  const taken = new Set();
  const wanted = children.map((child, index) => {
    let id = identity(child, index);
    while (taken.has(id)) id += "'"; // two things of one name
    taken.add(id);
    const node = old.get(id);
    old.delete(id);
    return [child, id, node];
  });
  for (const node of old.values()) node.remove();
  let cursor = parent.firstChild;
  for (const [child, id, existing] of wanted) {
    const node = existing ?? create(child, parent);
    node.__id = id;
    update(node, child);
    if (node === cursor) cursor = cursor.nextSibling;
    else parent.insertBefore(node, cursor);
  }
}

function create(child, parent) {
  if (typeof child !== "object") return document.createTextNode(String(child));
  const svg = child.tag === "svg" || parent.namespaceURI === SVG;
  const element = svg ? document.createElementNS(SVG, child.tag) : document.createElement(child.tag);
  element.__props = {};
  // what a person may have changed since is theirs
  if (child.props.value !== undefined) element.value = child.props.value;
  if (child.props.checked !== undefined) element.checked = child.props.checked;
  return element;
}

function update(node, child) {
  if (typeof child !== "object") {
    const text = String(child);
    if (node.data !== text) node.data = text;
    return;
  }
  const before = node.__props;
  node.__props = child.props;
  for (const name in before) if (!(name in child.props)) set(node, name, before[name], undefined);
  for (const name in child.props) {
    if (before[name] !== child.props[name]) set(node, name, before[name], child.props[name]);
  }
  patchChildren(node, child.children);
  if (child.tag === "select" && before.value === undefined && child.props.value !== undefined) {
    node.value = child.props.value; // its options exist only now
  }
}

function set(node, name, before, value) {
  if (name === "key" || name === "checked" || (name === "value" && node.localName !== "progress" && node.localName !== "option")) return;
  if (name === "on") listen(node, value ?? {});
  else if (name === "style") restyle(node, before ?? {}, value ?? {});
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}

function listen(node, handlers) {
  node.__handlers = handlers;
  node.__events ??= new Set();
  for (const event in handlers) {
    if (node.__events.has(event)) continue;
    node.__events.add(event);
    node.addEventListener(event, (e) => node.__handlers[event]?.(e));
  }
}

// Through the object model: the Content-Security-Policy forbids style attributes.
function restyle(node, before, style) {
  for (const name in before) if (!(name in style)) node.style.removeProperty(name);
  for (const name in style) if (before[name] !== style[name]) node.style.setProperty(name, style[name]);
}

/** Says something to screen readers. */
export function announce(text) {
  document.getElementById("announcements").textContent = text;
}
