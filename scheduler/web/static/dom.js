// Elements are made by these functions alone: texts become text, never markup, whatever a file or a class is called.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {string | number | Node | null | undefined | false} Child */
/** @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Properties */

/**
 * @param {Element} element
 * @param {Properties} properties attributes; functions listen to the event of their name
 * @param {Child[]} children
 */
function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") {
      element.addEventListener(name, value);
    } else {
      attribute(element, name, value);
    }
  }
  append(element, children);
  return element;
}

/** @param {Element} element @param {Child[]} children */
function append(element, children) {
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
}

// What turns the direction of writing: a name with it would be read as another one.
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

/** Attributes that people read. */
const READ = ["title", "aria-label"];

/** @param {string | number | true} words */
function harmless(words) {
  return String(words).replace(TURNS, "\ufffd");
}

/** @param {Child} child @returns {Node} */
function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(harmless(/** @type {string | number} */ (child)));
}

/**
 * Sets an attribute where it is another one: true is an empty one, false and null are none.
 * @param {Element} element @param {string} name @param {string | number | boolean | null | undefined} value
 */
export function attribute(element, name, value) {
  if (value === false || value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : READ.includes(name) ? harmless(value) : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Properties} [properties] @param {Child[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, properties = {}, ...children) {
  return /** @type {any} */ (filled(document.createElement(tag), properties, children));
}

/**
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag @param {Properties} [properties] @param {Child[]} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function svg(tag, properties = {}, ...children) {
  return /** @type {any} */ (filled(document.createElementNS(SVG, tag), properties, children));
}

/** Sets a text where it is another one. @param {Element} element @param {string | number} value */
export function text(element, value) {
  const wanted = harmless(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** @param {Element} element @param {Child[]} children */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Sets a text that may be cut, with a tooltip that has all of it. @param {Element} element @param {string} value of any length */
export function hinted(element, value) {
  text(element, value);
  attribute(element, "title", value || null);
}

/**
 * A value in large, with what it is.
 * @param {string} title
 */
export function figure(title) {
  const value = el("strong", {}, "–");
  const label = el("span", {}, title);
  return { element: el("div", { class: "figure" }, value, label), value, label };
}

/**
 * Asks before something that cannot be taken back lightly.
 * @param {string} question @param {string} yes what the button that does it says @param {string} [no] and the other one
 * @returns {Promise<boolean>}
 */
export function confirmed(question, yes, no = "Cancel") {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-labelledby": "question", "data-testid": "confirm" });
    const close = (/** @type {boolean} */ answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(false);
    });
    append(dialog, [
      el("p", { id: "question" }, question),
      el(
        "div",
        { class: "buttons" },
        el("button", { type: "button", class: "strong", click: () => close(true) }, yes),
        el("button", { type: "button", click: () => close(false) }, no),
      ),
    ]);
    document.body.append(dialog);
    dialog.showModal();
  });
}
