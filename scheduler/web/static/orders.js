// Buttons for what an operator does to a node, or to all nodes of a site.

import { confirmed, el, replace } from "./dom.js";
import { attempt } from "./shell.js";

/**
 * What a button says, the question before it acts ("" for none; NAME stands for the name), and what it does.
 * @typedef {[string, string, () => Promise<unknown>]} Order
 */

/**
 * Shows the buttons that are possible now. The focus stays among them.
 * @param {HTMLElement} place @param {string} name of what they act on @param {Record<string, Order>} known @param {string[]} possible names of orders
 */
export function showOrders(place, name, known, possible) {
  const kind = `${name} ${possible.join(" ")}`;
  if (place.dataset.kind === kind) return;
  const focused = place.contains(document.activeElement);
  place.dataset.kind = kind;
  const buttons = possible.map((each) => {
    const [title, question, act] = known[each];
    const change = async () => {
      if (!question || (await confirmed(question.replace("NAME", () => name), title))) await act();
    };
    return el("button", { type: "button", "aria-label": `${title} ${name}`, click: () => attempt(change) }, title);
  });
  replace(place, ...buttons);
  if (focused) buttons[0]?.focus();
}
