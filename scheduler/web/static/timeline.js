// Faults and decisions as they happened, on one axis with throughput and latencies.

import { follow, get } from "./api.js";
import { attribute, el, replace, svg } from "./dom.js";
import { eventTable, KINDS } from "./events.js";
import { clock, milliseconds, number } from "./format.js";
import { axisStyle, colour } from "./plots.js";
import { attempt, begin, main } from "./shell.js";

/** @typedef {import("./types").FleetEvent} FleetEvent */
/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */
/** @typedef {import("./types").History} History */

const RANGES = { 15: "15 minutes", 60: "1 hour", 1440: "1 day" };
const MOST_EVENTS = 4000;
const ROW_PX = 17;
const LEAST_S = 60;
const CLUSTER_PX = 9;
/** Seconds that the clock of the page and the one of the scheduler may differ. */
const BEGUN_S = 2;

/** @type {Record<string, string>} */
const GROUPS = { fault: "faults", decision: "decisions", good: "arrivals", plain: "jobs" };

/** @type {{title: string, show: (value: number | null) => string, series: [string, string, string][]}[]} */
const CHARTS = [
  {
    title: "Images per second",
    show: number,
    series: [
      ["first", "first answer", "--suspect"],
      ["finer", "finer answer", "--alive"],
      ["sent_up", "sent up", "--accent"],
    ],
  },
  {
    title: "Latency",
    show: milliseconds,
    series: [
      ["first_p50_ms", "first, median", "--suspect"],
      ["first_p99_ms", "first, 99th percentile", "--suspect"],
      ["final_p50_ms", "answer that stands, median", "--alive"],
      ["final_p99_ms", "answer that stands, 99th percentile", "--alive"],
    ],
  },
];

/** @type {History} */
let history = { start: 0, step_s: 1, columns: {}, events: [] };
let minutes = 15;
/** Seconds since 1970; null while the newest are shown. @type {[number, number] | null} */
let zoom = null;
/** @type {uPlot[]} */
let plots = [];

const lane = svg("svg", { class: "lane", role: "img", "aria-label": "Events" });
const charts = el("div", { class: "charts" });
const figure = el("div", { class: "card", "data-testid": "timeline" }, el("h2", {}, "What happened"), lane, charts);
const chosen = el("select", { id: "kinds", change: showEvents }, el("option", { value: "" }, "all events"), ...Object.entries(GROUPS).map(([kind, words]) => el("option", { value: kind }, words)));

const table = eventTable();

async function load() {
  history = await get(`/v1/history?minutes=${minutes}`);
  draw();
}

/** The range that is shown, in seconds since 1970. @returns {[number, number]} */
function range() {
  if (zoom) return zoom;
  const end = history.start + times().length * history.step_s;
  return [Math.max(end - minutes * 60, Math.min(history.start, end - LEAST_S)), end];
}

function times() {
  const rows = history.columns.first?.length ?? 0;
  return Array.from({ length: rows }, (_, index) => history.start + index * history.step_s);
}

/** @param {(typeof CHARTS)[number]} chart @returns {any} */
function data(chart) {
  return [times(), ...chart.series.map(([name]) => history.columns[name])];
}

/** Makes the charts anew: their colours and sizes do not follow the page by themselves. */
function build() {
  for (const plot of plots) plot.destroy();
  const axis = axisStyle();
  replace(charts);
  plots = CHARTS.map((chart) => {
    const holder = el("div", {}, el("h2", {}, chart.title));
    charts.append(holder);
    return new uPlot(
      {
        width: Math.max(280, charts.clientWidth),
        height: 190,
        cursor: { sync: { key: "timeline" }, drag: { x: true, y: false, setScale: false } },
        scales: { x: { time: true, range: () => range() }, y: { range: (_plot, _low, high) => [0, Math.max(1, (high ?? 0) * 1.05)] } },
        axes: [{ ...axis, values: (_plot, values) => values.map((value) => clock(value).slice(0, range()[1] - range()[0] > 300 ? 5 : 8)), space: 80 }, { ...axis, size: 64, values: (_plot, values) => values.map((value) => (value === null ? "" : chart.show(value))) }],
        series: [
          { label: "Time", value: (_plot, value) => (value ? clock(value) : "–") },
          ...chart.series.map(([name, label, hue]) => ({
            label,
            stroke: colour(hue),
            width: 1.5,
            dash: name.includes("p99") || name === "sent_up" ? [5, 4] : undefined,
            value: (/** @type {uPlot} */ _plot, /** @type {number | null} */ value) => chart.show(value),
          })),
        ],
        hooks: {
          drawClear: [shadeBefore],
          draw: [showLane],
          setSelect: [
            (plot) => {
              if (plot.select.width < 4) return;
              zoomTo(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
              plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
        },
      },
      data(chart),
      holder,
    );
  });
  for (const plot of plots) plot.over.addEventListener("dblclick", () => zoomTo(null));
}

/** The scheduler's start, if it is in the range that is shown: nothing is known of the time before. @returns {number | null} */
function begunAt() {
  const begun = (history.columns.first?.length ?? 0) < (minutes * 60) / history.step_s - BEGUN_S;
  return begun && history.start > range()[0] ? Math.min(history.start, range()[1]) : null;
}

/** Shades the time before the scheduler's start, and says so where there is room. @param {uPlot} plot */
function shadeBefore(plot) {
  const begun = begunAt();
  if (begun === null) return;
  const { ctx, bbox } = plot;
  const width = plot.valToPos(begun, "x", true) - bbox.left;
  ctx.save();
  ctx.globalAlpha = 0.45;
  ctx.fillStyle = colour("--line");
  ctx.fillRect(bbox.left, bbox.top, width, bbox.height);
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour("--muted");
  ctx.font = `${13 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  const words = `history begins ${clock(begun)}`;
  if (ctx.measureText(words).width + 16 < width) ctx.fillText(words, bbox.left + width - 8, bbox.top + 18 * devicePixelRatio);
  ctx.restore();
}

/** @param {number | null} from null: the newest @param {number} [to] */
function zoomTo(from, to = 0) {
  zoom = from === null ? null : [from, Math.max(to, from + 2 * history.step_s)];
  whole.hidden = zoom === null;
  draw();
}

/** Makes what is shown shorter or longer, around its middle. @param {number} factor */
function zoomBy(factor) {
  const [from, to] = range();
  const half = ((to - from) / 2) * factor;
  if (2 * half >= minutes * 60) zoomTo(null);
  else zoomTo((from + to) / 2 - half, (from + to) / 2 + half);
}

function draw() {
  plots.forEach((plot, index) => plot.setData(data(CHARTS[index])));
  showEvents();
}

/** @returns {FleetEvent[]} oldest first */
function inRange() {
  const [from, to] = range();
  return history.events.filter((event) => event.at >= from && (zoom === null || event.at <= to));
}

/** The marks of the events: one for those that would lie upon each other. */
function showLane() {
  const [plot] = plots;
  if (!plot) return;
  const left = plot.over.offsetLeft;
  const width = plot.over.clientWidth;
  const rows = Object.keys(GROUPS);
  const high = ROW_PX * rows.length;
  attribute(lane, "viewBox", `0 0 ${left + width + 12} ${high}`);
  attribute(lane, "width", left + width + 12);
  attribute(lane, "height", high);
  /** @type {Map<string, FleetEvent[]>} */
  const clusters = new Map();
  for (const event of inRange()) {
    const x = left + plot.valToPos(Math.min(event.at, range()[1]), "x");
    const [kind] = KINDS[event.kind] ?? ["plain"];
    const key = `${Math.round(x / CLUSTER_PX) * CLUSTER_PX} ${kind}`;
    clusters.set(key, [...(clusters.get(key) ?? []), event]);
  }
  const begun = begunAt();
  const beginning = begun === null ? left : Math.min(left + width, left + plot.valToPos(begun, "x"));
  lane.replaceChildren(
    ...(beginning > left ? [svg("rect", { class: "before", "data-testid": "before", x: left, y: 0, width: beginning - left, height: high }), svg("title", {}, "before the scheduler's start")] : []),
    ...rows.map((kind, index) => svg("text", { x: 0, y: 13 + ROW_PX * index }, GROUPS[kind])),
    ...[...clusters].map(([key, events]) => {
      const [x, kind] = key.split(" ");
      const words = events.slice(-5).map((event) => `${clock(event.at)} ${KINDS[event.kind]?.[1] ?? event.kind} ${event.node ?? event.job ?? ""} ${event.text}`);
      const mark = svg("path", { class: "mark", "data-kind": kind, d: MARKS[/** @type {keyof typeof MARKS} */ (kind)], transform: `translate(${x} ${9 + ROW_PX * rows.indexOf(kind)})` });
      mark.append(svg("title", {}, `${events.length > 5 ? `${events.length} events, the last of them:\n` : ""}${words.join("\n")}`));
      return mark;
    }),
  );
}

/** Told apart without colours as well. */
const MARKS = {
  fault: "M -5 -4 L 5 -4 L 0 5 Z",
  decision: "M 0 -5 L 5 0 L 0 5 L -5 0 Z",
  good: "M 4 0 A 4 4 0 1 1 -4 0 A 4 4 0 1 1 4 0 Z",
  plain: "M -3 -4 L 3 -4 L 3 4 L -3 4 Z",
};

function showEvents() {
  const wanted = chosen.value;
  const shown = inRange().filter((event) => !wanted || (KINDS[event.kind]?.[0] ?? "plain") === wanted);
  table.update(shown.reverse());
  attribute(figure, "data-events", shown.length);
  nothing.hidden = shown.length > 0;
}

/** @param {FleetEvent} event */
function happened(event) {
  if (history.events.some((known) => known.id === event.id)) return;
  history.events.push(event);
  if (history.events.length > MOST_EVENTS) history.events.shift();
  draw();
}

/** Adds the second that has just ended. @param {FleetSnapshot} fleet */
function second(fleet) {
  if (history.step_s > 1 || !Object.keys(fleet.figures).length) return;
  const number = Math.floor(fleet.at) - 1 - history.start;
  const rows = history.columns.first?.length ?? 0;
  if (number < rows) return;
  if (number > rows + 5 || !rows) {
    attempt(load);
    return;
  }
  for (const [name, column] of Object.entries(history.columns)) {
    while (column.length < number) column.push(null);
    column.push(fleet.figures[name] ?? null);
    if (column.length > minutes * 60) column.shift();
  }
  history.start += Math.max(0, number + 1 - minutes * 60);
  draw();
}

const nothing = el("p", { class: "muted", hidden: true }, "Nothing of this kind has happened in this time.");
const whole = el("button", { type: "button", hidden: true, click: () => zoomTo(null) }, "Show all");

begin(async () => {
  const span = el(
    "select",
    {
      id: "span",
      change: () => {
        minutes = Number(span.value);
        zoom = null;
        attempt(load);
      },
    },
    ...Object.entries(RANGES).map(([value, words]) => el("option", { value }, words)),
  );
  main.append(
    el(
      "div",
      { class: "buttons tools" },
      el("label", { for: "span" }, "The last"),
      span,
      el("button", { type: "button", click: () => zoomBy(0.5) }, "Zoom in"),
      el("button", { type: "button", click: () => zoomBy(2) }, "Zoom out"),
      whole,
      el("span", { class: "muted" }, "Drag over a chart to zoom."),
    ),
    figure,
    el("div", { class: "buttons tools" }, el("h2", {}, "Events"), el("label", { for: "kinds", class: "hidden" }, "Which"), chosen),
    nothing,
    table.element,
  );
  build();
  await load();
  new ResizeObserver(() => {
    for (const plot of plots) plot.setSize({ width: Math.max(280, charts.clientWidth), height: plot.height });
  }).observe(charts);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (build(), draw()));
  if (!history.columns.first?.length) setTimeout(() => attempt(load), 1500);
  follow("/v1/fleet/events", { snapshot: second, happened }, { reopened: () => attempt(load) });
});
