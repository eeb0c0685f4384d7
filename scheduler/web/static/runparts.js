// How a training run is shown, in the list as on its own page.

import { number, percent } from "./format.js";
import { shareBar } from "./jobparts.js";

/** @typedef {import("./types").RunSummary} RunSummary */

const FINAL = ["stopped", "finished", "failed"];

/** @param {RunSummary} run */
export function over(run) {
  return FINAL.includes(run.state);
}

/** @param {HTMLElement} cell @param {RunSummary} run */
export function stepsBar(cell, run) {
  const words = `${number(run.done)} of ${number(run.steps)} steps are done (${percent(run.done / run.steps)})`;
  shareBar(cell, words, run.steps, 0, Math.min(run.done, run.steps));
}
