// One training run: how far it is, its curves, its workers, and how to join or stop it.

import { ApiError, follow, get, root, send } from "./api.js";
import { element as ofCopies, showCopies } from "./copies.js";
import { attribute, confirmed, el, figure, replace, text } from "./dom.js";
import { clock, day, number, percent, size, span } from "./format.js";
import { jobState } from "./jobparts.js";
import { Joining } from "./joining.js";
import { axisStyle, colour } from "./plots.js";
import { over, stepsBar, waitsFor } from "./runparts.js";
import { attempt, begin, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").Run} Run */
/** @typedef {import("./types").RunProgress} RunProgress */
/** @typedef {import("./types").RunWorker} RunWorker */

const MOST_POINTS = 1500;

/** @type {Record<string, string>} what becomes of a worker by an order */
const AFTER = { pause: "paused", drop: "dropped", trust: "trusted", resume: "active" };
/** @type {Record<string, string>} */
const WORDS = { pause: "Pause", drop: "Drop", trust: "Trust", resume: "Resume" };

const path = `/v1/runs/${location.pathname.split("/").at(-1) ?? ""}`;
/** @type {Run} */
let run;
/** @type {uPlot[]} */
let plots = [];

/** @type {{title: string, name: "loss" | "accuracy" | "bytes_moved" | "staleness", hue: string, show: (value: number | null) => string, range: (low: number, high: number) => [number, number]}[]} */
const CURVES = [
  { title: "Loss", name: "loss", hue: "--suspect", show: number, range: (_low, high) => [0, high > 0 ? high * 1.05 : 1] },
  { title: "Accuracy", name: "accuracy", hue: "--alive", show: percent, range: () => [0, 1] },
  { title: "Bytes of updates and weights", name: "bytes_moved", hue: "--accent", show: (value) => (value === null ? "–" : size(value)), range: (_low, high) => [0, high > 0 ? high * 1.05 : 1] },
  { title: "Staleness, on average", name: "staleness", hue: "--draining", show: number, range: (_low, high) => [0, high > 0 ? high * 1.05 : 1] },
];

const head = el("div", { class: "job-head", "data-testid": "run-head" });
const bar = el("div", { class: "bar" });
const counts = el("p", { class: "counts", "data-testid": "counts" });
const figures = {
  loss: figure("loss"),
  accuracy: figure("accuracy"),
  speed: figure("steps a second, on average"),
  workers: figure("workers"),
};
const facts = { Id: el("code"), Strategy: el("span"), Owner: el("span"), Host: el("code"), Begun: el("span"), Took: el("span") };
const stop = el("button", { type: "button", "data-testid": "stop", click: () => attempt(askStop) }, "Stop the run");
const curves = el("div", { class: "curves", "data-testid": "curves" });
const overUpdates = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox", "data-testid": "over-updates", change: () => (build(), draw()) }));
const axis = el("p", { class: "filters" }, el("label", {}, overUpdates, "Curves over updates"));
const joining = new Joining();
const invite = el("button", { type: "button", "data-testid": "work", click: () => attempt(() => joining.invite()) }, "Invite one machine");
const join = el("section", {}, el("h2", {}, "Join"), joining.element, el("p", { class: "buttons" }, invite));
const noWorkers = el("p", { class: "muted" });
const config = el("pre", { tabindex: "0", "aria-label": "Configuration" });
const result = el("pre", { tabindex: "0", "aria-label": "Result", "data-testid": "result" });
const ofResult = el("section", {}, el("h2", {}, "Result"), result);

/** @type {Table<RunWorker>} */
const workers = new Table(
  "Workers",
  [
    { title: "Worker", kind: "name", show: (cell, each) => (text(cell, each.name), attribute(cell, "title", each.name)) },
    { title: "Updates", kind: "number", show: (cell, each) => text(cell, number(each.updates)) },
    { title: "Staleness", kind: "number", show: (cell, each) => text(cell, number(each.staleness)) },
    { title: "Sent", kind: "number", show: (cell, each) => text(cell, size(each.bytes_sent)) },
    { title: "Received", kind: "number", show: (cell, each) => text(cell, size(each.bytes_received)) },
    { title: "Silent for", kind: "number", show: (cell, each) => text(cell, span(each.idle_s)) },
    { title: "Score", kind: "number score", show: (cell, each) => text(cell, percent(each.score)) },
    { title: "State", kind: "state", show: standing },
    { title: "Operator", kind: "do", show: orders },
  ],
  (each) => each.name,
  (row, each) => {
    attribute(row, "data-testid", "worker");
    attribute(row, "data-worker", each.name);
    attribute(row, "data-standing", each.standing);
  },
);

/** @param {HTMLElement} cell @param {RunWorker} each */
function standing(cell, each) {
  const state = each.left && !["dropped", "quarantined"].includes(each.standing) ? "left" : each.standing;
  jobState(cell, { state, reason: each.wish ? `${WORDS[each.wish]}: on its way` : "" });
}

/** @param {HTMLElement} cell @param {RunWorker} each */
function orders(cell, each) {
  const first = each.standing === "active" ? "pause" : "resume";
  const wanted = over(run) ? [] : [first, "drop", "trust"].filter((order) => AFTER[order] !== each.standing);
  const shown = wanted.join();
  if (cell.dataset.orders !== shown) {
    const focused = cell.contains(document.activeElement);
    cell.dataset.orders = shown;
    replace(cell, ...wanted.map((order) => el("button", { type: "button", "aria-label": `${WORDS[order]} ${each.name}`, click: () => attempt(() => say(each.name, order)) }, WORDS[order])));
    if (focused) cell.querySelector("button")?.focus();
  }
  for (const button of cell.querySelectorAll("button")) button.disabled = each.wish !== null;
}

/** @param {string} name of a worker @param {string} order */
async function say(name, order) {
  if (order === "drop" && !(await confirmed(`Drop ${name} from this run? It is told to go, and none of its name is let in again.`, "Drop it", "Keep it"))) return;
  const answer = await send("PUT", `${path}/workers/${encodeURIComponent(name)}`, { order });
  run = { ...run, workers: (await answer.json()).workers };
  show();
}

function show() {
  const title = `${run.network} with ${run.strategy}`;
  text(/** @type {Element} */ (main.querySelector("h1")), title);
  document.title = `${title} · Terrace`;
  jobState(head, run);
  stepsBar(bar, run);
  text(counts, waitsFor(run) || `${number(run.done)} of ${number(run.steps)} steps (${percent(run.done / run.steps)}) · version ${number(run.version)} of the weights`);
  const took = (Date.parse(run.finished_at ?? run.heard_at) - Date.parse(run.created_at)) / 1000;
  text(figures.loss.value, number(run.loss));
  text(figures.accuracy.value, percent(run.accuracy));
  text(figures.speed.value, took > 0 ? number(run.done / took) : "–");
  text(figures.workers.value, number(over(run) ? run.workers.filter((each) => each.updates > 0).length : run.worker_count));
  text(facts.Id, run.id);
  text(facts.Strategy, run.strategy);
  text(facts.Owner, run.owner ?? "–");
  text(facts.Host, run.url);
  text(facts.Begun, day(run.created_at));
  text(facts.Took, span(took));
  stop.hidden = over(run);
  stop.disabled = run.state === "stopping";
  join.hidden = over(run) || run.state === "stopping";
  attribute(workers.element, "data-judged", judged());
  workers.update(run.workers);
  workers.element.hidden = run.workers.length === 0;
  noWorkers.hidden = run.workers.length > 0;
  text(noWorkers, over(run) ? "No worker has contributed." : "No worker has joined yet.");
  showCopies(over(run) ? [] : run.workers.filter((each) => !each.left));
}

/** Whether the run has a table [trust]: without one a score says nothing of a worker. */
function judged() {
  return Boolean(/** @type {any} */ (run.config.strategy)?.trust);
}

/** What changes with the state alone. */
function showRest() {
  joining.show(run);
  invite.hidden = run.owner === null;
  text(config, JSON.stringify(run.config, null, 2));
  ofResult.hidden = run.result === null;
  text(result, JSON.stringify(run.result, null, 2));
}

/** @param {(typeof CURVES)[number]} curve @returns {any} */
function data({ name }) {
  const points = run.curve.filter((point) => point[name] !== null && !(overUpdates.checked && point.updates === null));
  return [points.map(place), points.map((point) => point[name])];
}

/** Where a point is: seconds since 1970, or updates. @param {import("./types").CurvePoint} point @returns {number} */
function place(point) {
  return overUpdates.checked ? (point.updates ?? 0) : Date.parse(point.at) / 1000;
}

/** What all charts show. @returns {[number, number]} as `place` */
function whole() {
  const [begin, end] = [run.curve.at(0), run.curve.at(-1)];
  const first = overUpdates.checked ? 0 : begin ? place(begin) : Date.parse(run.created_at) / 1000;
  return [first, Math.max(end ? place(end) : first, first + 1)];
}

/** @param {number | null} value of `place` */
function placed(value) {
  return overUpdates.checked ? number(value) : value ? clock(value) : "–";
}

/** Makes the charts anew: their colours and sizes do not follow the page by themselves. */
function build() {
  for (const plot of plots) plot.destroy();
  replace(curves);
  // All cards before the first chart: how wide one is depends on how many there are.
  const holders = CURVES.map(({ title }) => el("div", { class: "card" }, el("h2", {}, title)));
  curves.append(...holders);
  plots = CURVES.map((curve, index) => {
    const holder = holders[index];
    return new uPlot(
      {
        width: inside(holder),
        height: 220,
        cursor: { drag: { x: false, y: false } },
        scales: { x: { time: !overUpdates.checked, range: whole }, y: { range: (_plot, low, high) => curve.range(low ?? 0, high ?? 0) } },
        axes: [{ ...axisStyle(), values: (_plot, values) => values.map(placed), space: 90 }, { ...axisStyle(), size: 76, values: (_plot, values) => values.map((value) => curve.show(value)) }],
        series: [
          { label: overUpdates.checked ? "Updates" : "Time", value: (_plot, value) => placed(value) },
          { label: curve.title, stroke: colour(curve.hue), width: 1.5, value: (_plot, value) => curve.show(value) },
        ],
      },
      data(curve),
      holder,
    );
  });
}

/** The width that a card has for what is in it. @param {HTMLElement} card */
function inside(card) {
  const { paddingLeft, paddingRight } = getComputedStyle(card);
  return Math.max(220, card.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
}

function draw() {
  plots.forEach((plot, index) => plot.setData(data(CURVES[index])));
  attribute(curves, "data-points", run.curve.length);
}

/** @param {RunProgress} news */
function take(news) {
  run = { ...run, ...news };
  if (news.point) run.curve = [...run.curve, news.point];
  show();
  draw();
  if (run.curve.length > MOST_POINTS) attempt(async () => (run = await get(path)));
}

async function askStop() {
  const question = `Stop this run? Its host ends it with its next report; what it has learned stays there.`;
  if (await confirmed(question, "Stop the run", "Let it run")) await send("DELETE", path);
}

/** Until the run ends. */
function live() {
  const end = follow(`${path}/events`, {
    state: (/** @type {Run} */ now) => {
      run = now;
      show();
      showRest();
      draw();
      if (over(run)) end();
    },
    report: take,
  });
}

begin(async () => {
  try {
    run = await get(path);
  } catch (error) {
    if (!(error instanceof ApiError && [400, 404].includes(error.status))) throw error;
    main.append(el("p", { class: "card", "data-testid": "no-run" }, "There is no such training run. It may have been too long ago: runs are kept for a week after their end unless set otherwise. "), el("p", {}, el("a", { href: `${root}/ui/training` }, "All training runs")));
    return;
  }
  main.append(
    head,
    bar,
    counts,
    el("div", { class: "figures" }, ...Object.values(figures).map(({ element }) => element)),
    axis,
    curves,
    el("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "buttons" }, stop),
    join,
    el("section", {}, el("h2", {}, "Workers"), noWorkers, workers.element),
    ofCopies,
    ofResult,
    el("details", {}, el("summary", {}, "Configuration"), config),
  );
  show();
  showRest();
  build();
  draw();
  new ResizeObserver(() => {
    for (const plot of plots) plot.setSize({ width: inside(/** @type {HTMLElement} */ (plot.root.parentElement)), height: plot.height });
  }).observe(curves);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (build(), draw()));
  if (!over(run)) live();
});
