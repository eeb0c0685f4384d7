// How the training images of a run spread over its workers: who has which segments, and who feeds whom.

import { attribute, el, text } from "./dom.js";
import { percent } from "./format.js";
import { shareBar } from "./jobparts.js";
import { Table } from "./table.js";

/** @typedef {import("./types").RunWorker} RunWorker */
/** @typedef {import("./types").WorkerCopies} WorkerCopies */

/**
 * A worker in the tree, or the host, whose name is empty.
 * @typedef {object} Branch
 * @property {string} name
 * @property {WorkerCopies | null} copies null for the host
 * @property {number} depth how many sources stand above it
 * @property {string[]} feeds
 */

const HOST = "";
const DEEPEST = 12;

/**
 * The host, and below each source those that copy from it, in the order in which they were told; then those that copy
 * nothing. No worker stands twice, whatever the host says of them.
 * @param {RunWorker[]} workers
 * @returns {Branch[]} empty where nobody gets images from the run
 */
function branches(workers) {
  /** @type {Map<string, WorkerCopies>} */
  const known = new Map();
  for (const each of workers) if (each.copies) known.set(each.name, each.copies);
  if (known.size === 0) return [];
  /** @type {Map<string, string[]>} */
  const fed = new Map();
  for (const [name, { segment, source }] of known) {
    if (segment !== null && source !== null) fed.set(source, [...(fed.get(source) ?? []), name]);
  }
  /** @type {Branch[]} */
  const found = [];
  const seen = new Set();
  /** @param {string} name @param {number} depth */
  function add(name, depth) {
    if (seen.has(name)) return;
    seen.add(name);
    const feeds = fed.get(name) ?? [];
    found.push({ name, copies: known.get(name) ?? null, depth, feeds });
    for (const each of feeds) add(each, depth + 1);
  }
  add(HOST, 0);
  for (const [name, { segment }] of known) if (segment === null) add(name, 0);
  for (const name of known.keys()) add(name, 0);
  return found;
}

/** @param {string} name */
function called(name) {
  return name === HOST ? "the host" : name;
}

/** @param {HTMLElement} cell @param {Branch} branch */
function showName(cell, { name, depth }) {
  text(cell, called(name));
  attribute(cell, "title", called(name));
  cell.style.setProperty("--depth", String(Math.min(depth, DEEPEST)));
}

/** A worker that swaps segments has more than it is to have, or others. @param {HTMLElement} cell @param {Branch} branch */
function showHas(cell, { copies }) {
  text(cell, !copies ? "all" : copies.has ? `${copies.has} (${copies.holds})` : "none");
}

/** @param {HTMLElement} cell @param {Branch} branch */
function showWants(cell, { copies }) {
  text(cell, copies ? String(copies.wants) : "all");
}

/** @param {HTMLElement} cell @param {Branch} branch */
function showCopy(cell, { copies }) {
  const copying = copies !== null && copies.segment !== null;
  const words = copying ? `segment ${copies.segment} from ${called(copies.source ?? HOST)}, ${percent(copies.share)}` : "–";
  if (!cell.firstChild) cell.append(el("span"), el("span"));
  const [bar, said] = /** @type {HTMLElement[]} */ ([...cell.children]);
  text(said, words);
  bar.hidden = !copying;
  if (copying) shareBar(bar, words, 1, 0, copies.share);
}

/** @param {HTMLElement} cell @param {Branch} branch */
function showFeeds(cell, { copies, feeds }) {
  text(cell, feeds.length ? feeds.join(", ") : copies && !copies.serves ? "none: not reached, or not trusted" : "–");
}

/** @type {Table<Branch>} */
const table = new Table(
  "Training images",
  [
    { title: "Machine", kind: "name branch", show: showName },
    { title: "Has segments", show: showHas },
    { title: "Is to have", kind: "number", show: showWants },
    { title: "Copies now", kind: "copying", show: showCopy },
    { title: "Feeds now", show: showFeeds },
  ],
  (each) => each.name,
  (row, each) => {
    attribute(row, "data-testid", "copies");
    attribute(row, "data-machine", each.name);
  },
);

/** What stands on the page of a run. */
export const element = el(
  "section",
  { hidden: true, "data-testid": "data" },
  el("h2", {}, "Training images"),
  el("p", { class: "muted" }, "The segments of each worker, and the sources of its copies. A machine is shown below its source. A worker that swaps segments has more than its share."),
  table.element,
);

/** @param {RunWorker[]} workers */
export function showCopies(workers) {
  const found = branches(workers);
  element.hidden = found.length === 0;
  table.update(found);
}
