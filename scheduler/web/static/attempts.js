// The attempts of a job over time: one line per end device, one bar per attempt.

import { attribute, el, replace, svg } from "./dom.js";
import { milliseconds, number } from "./format.js";

/** @typedef {import("./types").Attempt & {why?: string}} Attempt */
/** @typedef {{attempt: Attempt, x: number, width: number, y: number}} Bar */

const NAME_PX = 110;
const BAR_PX = 10;
const LANE_PX = 13;
const GAP_PX = 12;
const AXIS_PX = 26;
const LEAST_PX = 3;
const TICKS_PX = 110;

/** Colour and pattern by outcome. */
const LOOKS = {
  ok: "done",
  running: "running",
  fallback: "fallback",
  rerouted: "fallback",
  refused: "refused",
  error: "broken",
  lost: "broken",
  unreachable: "broken",
  cancelled: "void",
  late: "void",
};
const MEANINGS = {
  done: "answered",
  running: "under way",
  fallback: "no answer from above: sent again, or the first one stands",
  refused: "not now",
  broken: "failed: sent again",
  void: "not needed any more",
};

/** @param {Attempt} attempt @returns {keyof typeof MEANINGS} */
export function look(attempt) {
  return /** @type {any} */ (LOOKS)[attempt.outcome] ?? "broken";
}

/**
 * Where the bars are. Attempts on one device at a time are in lanes, one below the other.
 * @param {Attempt[]} attempts @param {number} now in ms since 1970 @param {number} width in pixels
 */
export function arranged(attempts, now, width) {
  const begins = attempts.map((each) => Date.parse(each.started_at));
  const ends = attempts.map((each) => (each.ended_at === null ? now : Date.parse(each.ended_at)));
  const start = begins.reduce((least, at) => Math.min(least, at), Infinity);
  const span = Math.max(1, ends.reduce((most, at) => Math.max(most, at), -Infinity) - start);
  const perMs = (width - NAME_PX) / span;
  const lines = [];
  /** @type {Bar[]} */
  const bars = [];
  let y = GAP_PX / 2;
  const nodes = [...new Set(attempts.map((each) => each.node))].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  for (const node of nodes) {
    const here = attempts.map((_, index) => index).filter((index) => attempts[index].node === node);
    here.sort((one, other) => begins[one] - begins[other]);
    /** @type {number[]} where each lane is free from */
    const lanes = [];
    for (const index of here) {
      const x = NAME_PX + (begins[index] - start) * perMs;
      const wide = Math.min(width - NAME_PX, Math.max(LEAST_PX, (ends[index] - begins[index]) * perMs));
      const at = Math.min(x, width - wide);
      const free = lanes.findIndex((end) => end <= at);
      const lane = free < 0 ? lanes.length : free;
      lanes[lane] = at + wide + 1;
      bars.push({ attempt: attempts[index], x: at, width: wide, y: y + lane * LANE_PX });
    }
    lines.push({ node, y, height: lanes.length * LANE_PX });
    y += lanes.length * LANE_PX + GAP_PX;
  }
  return { lines, bars, span, height: y + AXIS_PX };
}

/**
 * How many attempts from the first on will stay as they are: all of tasks that are done, without a gap.
 * @param {Attempt[]} attempts by task
 */
export function settled(attempts) {
  let count = 0;
  for (let task = 0; count < attempts.length; task += 1) {
    let end = count;
    while (attempts[end]?.task === task) end += 1;
    const ofTask = attempts.slice(count, end);
    if (!ofTask.some(({ outcome }) => outcome === "ok") || ofTask.some(({ ended_at }) => ended_at === null)) break;
    count = end;
  }
  return count;
}

/** Times in ms at which there is a mark. @param {number} span in ms @param {number} most */
export function ticks(span, most) {
  const least = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least) ?? 10 * power;
  return Array.from({ length: Math.floor(span / step) + 1 }, (_, index) => index * step);
}

export class AttemptTimeline {
  constructor() {
    this.drawing = svg("svg", { class: "attempts", role: "img", "data-testid": "attempts" });
    this.legend = el("p", { class: "legend" });
    this.scrolled = el("div", { class: "scrolled", role: "region", "aria-label": "Attempts over time", tabindex: "0" }, this.drawing);
    this.element = el("div", { class: "card" }, this.scrolled, this.legend);
    /** @type {Attempt[]} */
    this.attempts = [];
    this.now = 0;
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** @param {Attempt[]} attempts @param {number} now in ms since 1970 */
  update(attempts, now) {
    this.attempts = attempts;
    this.now = now;
    this.draw();
  }

  draw() {
    const width = Math.max(300, this.scrolled.clientWidth - 2);
    const { lines, bars, span, height } = arranged(this.attempts, this.now, width);
    attribute(this.drawing, "viewBox", `0 0 ${width} ${height}`);
    attribute(this.drawing, "width", width);
    attribute(this.drawing, "height", height);
    attribute(this.drawing, "aria-label", `${number(bars.length)} attempts on ${number(lines.length)} end devices. The table below says the same.`);
    const bottom = height - AXIS_PX;
    const marks = ticks(span, (width - NAME_PX) / TICKS_PX).map((at) => {
      const x = NAME_PX + (at / span) * (width - NAME_PX);
      const late = x > width - 40;
      return svg("g", {}, svg("line", { x1: x, x2: x, y1: 0, y2: bottom }), svg("text", { x, y: bottom + 16, "text-anchor": late ? "end" : "middle" }, at ? milliseconds(at) : "0"));
    });
    replace(
      this.drawing,
      patterns(),
      svg("g", { class: "marks" }, ...marks),
      svg("g", { class: "names" }, ...lines.map(({ node, y }) => svg("text", { x: 0, y: y + BAR_PX }, svg("title", {}, node), shortened(node)))),
      svg("g", { class: "bars" }, ...bars.map(bar)),
    );
    const present = new Set(this.attempts.map(look));
    const words = Object.entries(MEANINGS).filter(([kind]) => present.has(/** @type {any} */ (kind)));
    replace(this.legend, ...words.map(([kind, meaning]) => el("span", { class: "meaning" }, sample(kind), meaning)));
  }
}

/** @param {Bar} bar */
function bar({ attempt, x, width, y }) {
  const { task, attempt: which, node, upstream, outcome, ms, reason, why, images, hedge } = attempt;
  const words = [
    `Task ${task}, attempt ${which}${hedge ? " (hedge)" : ""}: ${images} images on ${node}${upstream ? `, upstream ${upstream}` : ""}`,
    `${outcome}${ms === null ? "" : ` after ${milliseconds(ms)}`}${reason ? `: ${reason}` : ""}`,
    why ? `sent there: ${why}` : "",
  ];
  const kind = look(attempt);
  return svg("rect", { class: kind, "data-outcome": outcome, fill: `url(#look-${kind})`, x, y, width, height: BAR_PX, rx: 2 }, svg("title", {}, words.filter(Boolean).join("\n")));
}

/** @param {string} kind */
function sample(kind) {
  return svg("svg", { class: "attempts", width: 22, height: 12, "aria-hidden": "true" }, svg("g", { class: "bars" }, svg("rect", { class: kind, fill: `url(#look-${kind})`, x: 1, y: 1, width: 20, height: BAR_PX, rx: 2 })));
}

function patterns() {
  const pattern = (/** @type {string} */ kind, /** @type {string} */ lines) =>
    svg(
      "pattern",
      { id: `look-${kind}`, class: `look ${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 6, height: 6 }),
      svg("path", { d: lines }),
    );
  return svg(
    "defs",
    {},
    pattern("done", ""),
    pattern("running", "M 0 3 H 6"),
    pattern("fallback", "M 3 0 V 6"),
    pattern("refused", "M 2 3 H 4"),
    pattern("broken", "M -1 1 L 1 -1 M 0 6 L 6 0 M 5 7 L 7 5"),
    pattern("void", ""),
  );
}

/** @param {string} name */
function shortened(name) {
  return name.length > 14 ? `${name.slice(0, 13)}…` : name;
}
