// What the state of a source means to people, on its tile as on its own page.

import { root } from "./api.js";
import { number, size, span } from "./format.js";

/** @typedef {import("./types").SourceNow} SourceNow */
/** @typedef {import("./types").HeardSource} HeardSource */
/** @typedef {{mark: string, word: string, reason: string, trouble: boolean}} Condition */

/** A running source of which the scheduler gets nothing for this time is silent. */
const SILENT_S = 900;
const FULL = 0.8;

/** @type {Record<string, string>} */
const DEVICE = { dead: "device is dead", removed: "device is removed", suspect: "device is suspect", gone: "device is gone" };

/** @param {{node: string, source: string}} of */
export function keyOf({ node, source }) {
  return `${node}/${source}`;
}

/** @param {{node: string, source: string}} of */
export function historyOf({ node, source }) {
  return `${root}/ui/live/${encodeURIComponent(node)}/${encodeURIComponent(source)}`;
}

/**
 * @param {{node: string, source: string}} of @param {number} sequence @param {number} [pixels] on its longer side
 */
export function pictureOf({ node, source }, sequence, pixels) {
  const path = `/v1/observations/${encodeURIComponent(node)}/${encodeURIComponent(source)}/${sequence}/picture`;
  return `${root}${path}${pixels ? `?size=${pixels}` : ""}`;
}

/** With the moments that ages are counted from. @param {SourceNow[]} sources @param {number} now seconds @returns {HeardSource[]} */
export function heard(sources, now) {
  return sources.map((each) => ({ ...each, heardAt: each.heard_s === null ? null : now - each.heard_s }));
}

/** How a source is, and whether somebody should look after it. @param {HeardSource} source @param {number} now seconds @returns {Condition} */
export function condition(source, now) {
  const { state, reason, heardAt, spool_bytes: bytes, spool_size_bytes: room } = source;
  const health = source.health ?? "gone";
  const silent = heardAt === null ? 0 : now - heardAt;
  if (health in DEVICE) return { mark: health === "suspect" ? "suspect" : "dead", word: DEVICE[health], reason: heardAt === null ? "" : `last heard ${span(silent)} ago`, trouble: true };
  if (state === "waiting") return { mark: "dead", word: "waiting after a failure", reason, trouble: true };
  if (bytes !== null && room && bytes >= FULL * room) return { mark: "full", word: "spool nearly full", reason: `${number(Math.min(100, (100 * bytes) / room))} % of ${size(room)}`, trouble: true };
  if (state === "paused" || state === "finished") return { mark: state, word: state, reason, trouble: false };
  if (silent >= SILENT_S) return { mark: "suspect", word: `silent for ${span(silent)}`, reason, trouble: true };
  return { mark: state === "running" ? "alive" : "starting", word: state || "state unknown", reason, trouble: false };
}

/** What waits in the spool of its device. @param {SourceNow} source */
export function waitingWords({ waiting_answers: answers, waiting_pictures: pictures }) {
  if (answers === null || pictures === null) return "spool unknown";
  const parts = [answers > 0 && counted(answers, "answer"), pictures > 0 && counted(pictures, "picture")].filter(Boolean);
  return parts.length ? `${parts.join(" and ")} ${answers + pictures === 1 ? "waits" : "wait"}` : "nothing waits";
}

/** @param {number} count @param {string} what */
function counted(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}

/** @param {SourceNow} source */
export function budgetWords({ spent_bytes: spent, bytes_per_day: budget }) {
  if (spent === null) return "bytes unknown";
  if (budget === null) return "no budget";
  return spent < budget ? `${size(budget - spent)} left today` : "no bytes left today";
}
