// How a job is shown, in the list as on its own page.

import { attribute, el, svg, text } from "./dom.js";
import { number } from "./format.js";

/** @typedef {import("./types").Job} Job */

export const STATES = ["queued", "running", "completed", "failed", "cancelled"];

/** What the answers of the end devices and those from above are called. @param {{flat: boolean}} job */
export function answerNames({ flat }) {
  return flat ? { lower: "first", upper: "upper" } : { lower: "coarse", upper: "fine" };
}

/** @param {HTMLElement} cell @param {{state: string, reason: string}} job or training run */
export function jobState(cell, job) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }), el("span", { class: "reason" }));
  const [state, reason] = cell.children;
  attribute(state, "data-state", job.state);
  text(state, job.state);
  text(reason, job.reason);
  attribute(reason, "title", job.reason || null);
}

/** How many images have a first answer, and how many a finer one. @param {HTMLElement} cell @param {Job} job */
export function progressBar(cell, job) {
  const { lower, upper } = answerNames(job);
  const words = [`${number(job.answered_coarse)} of ${number(job.images)} images have a ${lower} answer`];
  if (job.scheme !== "end") words.push(`${number(job.answered_fine)} a ${upper} one`);
  shareBar(cell, words.join(", "), job.images, job.answered_coarse, job.answered_fine);
}

/**
 * How much of a whole is done, pale to a first degree and full to a second one.
 * @param {HTMLElement} cell @param {string} words that say the same @param {number} whole @param {number} pale @param {number} full
 */
export function shareBar(cell, words, whole, pale, full) {
  if (!cell.firstChild) {
    const bar = svg("svg", { class: "progress", role: "img", viewBox: "0 0 100 10", preserveAspectRatio: "none" });
    bar.append(...["first", "finer"].map((name) => svg("rect", { class: name, height: 10, width: 0 })));
    cell.append(bar);
  }
  const [bar] = cell.children;
  const share = (/** @type {number} */ part) => ((100 * part) / Math.max(1, whole)).toFixed(1);
  attribute(bar, "aria-label", words);
  attribute(bar.children[0], "width", share(pale));
  attribute(bar.children[1], "width", share(full));
}
