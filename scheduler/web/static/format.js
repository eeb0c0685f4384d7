// Figures and times as people read them.

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 10) return String(Number(value.toPrecision(2)));
  return Math.round(value).toLocaleString("en");
}

/** @param {number | null | undefined} ms */
export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`;
}

/** @param {number} seconds a span */
export function span(seconds) {
  if (seconds < MINUTE) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < HOUR) return `${Math.round(seconds / MINUTE)} min`;
  if (seconds < 2 * DAY) return `${Math.round(seconds / HOUR)} h`;
  return `${Math.round(seconds / DAY)} days`;
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1e6) return `${number(bytes / 1e3)} kB`;
  return `${number(bytes / 1e6)} MB`;
}

/** @param {number | null | undefined} share */
export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;
}

/** @param {number | string | null | undefined} at seconds since 1970, or ISO 8601 */
export function clock(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(typeof at === "number" ? at * 1000 : at);
  return date.toLocaleTimeString("en-GB");
}

/** @param {number | string | null | undefined} at seconds since 1970, or ISO 8601 */
export function day(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(typeof at === "number" ? at * 1000 : at);
  return `${date.toLocaleDateString("sv")} ${date.toLocaleTimeString("en-GB")}`;
}
