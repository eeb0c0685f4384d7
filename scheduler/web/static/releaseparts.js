// What a release, a guard and a change of releases mean to people, and the form that starts a trial.

import { send } from "./api.js";
import { attribute, el, svg, text } from "./dom.js";
import { milliseconds, number, percent, span } from "./format.js";
import { attempt } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").GuardNow} GuardNow */
/** @typedef {import("./types").ReleaseNow} ReleaseNow */
/** @typedef {import("./types").Rollout} Rollout */

/** Characters of a sha256 that tell two networks apart for people. */
const SHORT = 12;
const HOUR_S = 3600;
const MINUTE_S = 60;
const DAY_S = 86400;

/** @type {Record<GuardNow["name"], string>} */
const GUARDS = { agreement: "agreement with the tier above", p99: "99th percentile of the time", errors: "failed attempts" };
/** @type {Record<GuardNow["verdict"], string>} colour and shape of a verdict, as the state of a job has them */
const VERDICTS = { open: "queued", holds: "completed", fails: "failed" };
/** @type {Record<Rollout["kind"], string>} */
export const KINDS = { canary: "trial", promote: "to everyone at once", rollback: "roll-back", first: "the first release" };

/** @param {string} ref NAME@NUMBER */
export function path(ref) {
  return `/v1/releases/${encodeURIComponent(ref)}`;
}

/** @param {string} sha256 */
export function short(sha256) {
  return sha256.slice(0, SHORT);
}

/** Shows the start of a sha256, with a tooltip that has all of it. @param {Element} cell @param {string} sha256 */
export function digest(cell, sha256) {
  if (!cell.firstChild) cell.append(el("code"));
  text(cell.children[0], short(sha256));
  attribute(cell, "title", sha256);
}

/** An accuracy, and the number of pictures on which it was measured. @param {{accuracy: number | null, test_images?: number}} network */
export function accuracyWords({ accuracy, test_images: pictures }) {
  return accuracy !== null && pictures ? `${percent(accuracy)} of ${number(pictures)}` : percent(accuracy);
}

/** A span of hours with its minutes. @param {number} seconds */
export function exactly(seconds) {
  if (seconds < HOUR_S || seconds >= 2 * DAY_S) return span(seconds);
  const minutes = Math.round(seconds / MINUTE_S);
  return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
}

/** @param {HTMLElement} cell @param {{state: string}} release or change */
export function releaseState(cell, { state }) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }));
  const [shown] = cell.children;
  attribute(shown, "data-release-state", state);
  text(shown, state);
}

/** A figure of a guard, in its unit. @param {GuardNow} guard @param {number | null} value */
function inUnit({ name }, value) {
  return name === "p99" ? milliseconds(value) : percent(value);
}

/** What is compared with the limit. @param {GuardNow} guard @param {number | null} value */
function compared({ name }, value) {
  return value === null ? "–" : name === "errors" ? percent(value) : `${Number(value.toPrecision(3))}×`;
}

/** @param {GuardNow} guard */
function limit(guard) {
  return `${guard.name === "agreement" ? "at least" : "at most"} ${compared(guard, guard.limit)}`;
}

/** Draws a figure with its interval; the limit is in the middle, and the shaded side is beyond it. @param {HTMLElement} cell @param {GuardNow} guard */
function intervalBar(cell, guard) {
  const { value, low, high } = guard;
  if (!cell.firstChild) {
    const bar = svg("svg", { class: "interval", role: "img", viewBox: "0 0 120 16", preserveAspectRatio: "none" });
    bar.append(svg("rect", { class: "beyond", width: 60, height: 16 }), svg("line", { class: "limit", x1: 60, x2: 60, y1: 0, y2: 16 }), svg("line", { class: "range", y1: 8, y2: 8 }), svg("line", { class: "value", y1: 3, y2: 13 }));
    cell.append(bar, el("span", { class: "words" }));
  }
  const [bar, words] = cell.children;
  const [beyond, , range, point] = bar.children;
  const known = value !== null && low !== null && high !== null;
  const said = known ? `${compared(guard, value)} (${compared(guard, low)} to ${compared(guard, high)})` : "nothing to compare yet";
  text(words, said);
  attribute(bar, "aria-label", `${guard.name}: ${said}; ${limit(guard)}`);
  attribute(beyond, "x", guard.name === "agreement" ? 0 : 60);
  for (const line of [range, point]) attribute(line, "visibility", known ? null : "hidden");
  if (!known) return;
  const half = 1.1 * Math.max(Math.abs(value - guard.limit), Math.abs(low - guard.limit), Math.abs(high - guard.limit), guard.limit / 1000);
  const at = (/** @type {number} */ figure) => (60 + (60 * (figure - guard.limit)) / half).toFixed(1);
  attribute(range, "x1", at(low));
  attribute(range, "x2", at(high));
  attribute(point, "x1", at(value));
  attribute(point, "x2", at(value));
}

/** @param {HTMLElement} cell @param {GuardNow} guard */
function verdict(cell, { verdict: found }) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }));
  const [shown] = cell.children;
  attribute(shown, "data-state", VERDICTS[found]);
  text(shown, found);
}

/** @param {HTMLElement} cell @param {GuardNow} guard */
function samples(cell, guard) {
  const old = guard.name === "errors" ? "" : ` and ${number(guard.old_samples)}`;
  text(cell, `${number(guard.samples)}${old}`);
  attribute(cell, "title", `It needs ${number(guard.needs)}${old ? " of each release" : ""}.`);
}

/** @returns {Table<GuardNow>} */
export function guardTable() {
  return new Table(
    "Guards",
    [
      { title: "Guard", kind: "name", show: (cell, guard) => (text(cell, guard.name), attribute(cell, "title", GUARDS[guard.name])) },
      { title: "Verdict", kind: "state", show: verdict },
      { title: "Compared", kind: "compared", show: intervalBar },
      { title: "Limit", show: (cell, guard) => text(cell, limit(guard)) },
      { title: "New", kind: "number", show: (cell, guard) => text(cell, inUnit(guard, guard.new)) },
      { title: "Old", kind: "number", show: (cell, guard) => text(cell, inUnit(guard, guard.old)) },
      { title: "Samples", kind: "number", show: samples },
    ],
    (guard) => guard.name,
    (row, guard) => {
      attribute(row, "data-testid", "guard");
      attribute(row, "data-guard", guard.name);
      attribute(row, "data-verdict", guard.verdict);
    },
  );
}

/** One line of the form: a label, a field for a figure, and its unit. @param {string} id @param {string} words @param {string} unit @param {Record<string, string | number>} limits */
function field(id, words, unit, limits) {
  const input = el("input", { id, type: "number", required: true, ...limits });
  return { input, element: el("p", { class: "field" }, el("label", { for: id }, words), el("span", {}, input, ` ${unit}`)) };
}

/**
 * Asks how a release is to be tried, and starts that.
 * @param {string} ref NAME@NUMBER @param {() => Promise<unknown>} then
 */
export function askTrial(ref, then) {
  const canary = field("canary", "End devices that try it", "%", { value: 10, min: 0.1, max: 99.9, step: "any" });
  const agreement = field("agreement", "Agreement with the tier above, at least", "times the old one", { value: 0.97, min: 0.001, max: 1000, step: "any" });
  const p99 = field("p99", "99th percentile of the time, at most", "times the old one", { value: 1.3, min: 0.001, max: 1000, step: "any" });
  const errors = field("errors", "Failed attempts, at most", "%", { value: 0.5, min: 0.001, max: 100, step: "any" });
  const hours = field("hours", "Length of the trial", "hours", { value: 2, min: 0.001, max: 720, step: "any" });
  const fields = [canary, agreement, p99, errors, hours];
  const close = () => {
    dialog.close();
    dialog.remove();
  };
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const wanted = {
      canary: canary.input.valueAsNumber / 100,
      guards: { agreement: agreement.input.valueAsNumber, p99: p99.input.valueAsNumber, errors: errors.input.valueAsNumber / 100 },
      for_s: hours.input.valueAsNumber * HOUR_S,
    };
    close();
    await attempt(async () => {
      await send("POST", `${path(ref)}/start`, wanted);
      await then();
    });
  };
  const dialog = el(
    "dialog",
    { "aria-labelledby": "trial", "data-testid": "trial-form" },
    el(
      "form",
      { submit },
      el("h2", { id: "trial" }, `Try ${ref}`),
      el("p", { class: "muted" }, "A part of the end devices uses it. It goes to everyone if its guards hold, and is rolled back if one fails."),
      ...fields.map(({ element }) => element),
      el("div", { class: "buttons" }, el("button", { type: "submit", class: "strong" }, "Start the trial"), el("button", { type: "button", click: close }, "Cancel")),
    ),
  );
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    close();
  });
  document.body.append(dialog);
  dialog.showModal();
}
