// How a training run is shown, in the list as on its own page.

import { number, percent } from "./format.js";
import { shareBar } from "./jobparts.js";

/** @typedef {import("./types").RunSummary} RunSummary */

const FINAL = ["stopped", "finished", "failed"];

/** @param {RunSummary} run */
export function over(run) {
  return FINAL.includes(run.state);
}

/** What a run says that hands out no work yet; "" for others. @param {import("./types").Run} run */
export function waitsFor(run) {
  const { missing, wants } = run;
  return missing === null || wants.start_at === null ? "" : `Waits for workers: ${wants.start_at - missing} of ${wants.start_at} ready`;
}

/** @param {HTMLElement} cell @param {RunSummary} run */
export function stepsBar(cell, run) {
  const words = `${number(run.done)} of ${number(run.steps)} steps are done (${percent(run.done / run.steps)})`;
  shareBar(cell, words, run.steps, 0, Math.min(run.done, run.steps));
}
