// Sinks: the receivers of events, how far each has come, and the events that it did not take.

import { follow, get, send } from "./api.js";
import { attribute, el, figure, hinted, replace, text } from "./dom.js";
import { day, number, span } from "./format.js";
import { showOrders } from "./orders.js";
import { atMost, attempt, begin, caller, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").DeadLetter} DeadLetter */
/** @typedef {import("./types").SinkFilter} SinkFilter */
/** @typedef {import("./types").SinkNow} SinkNow */

const PAUSE_MS = 2000;

/** @type {SinkNow[]} by name */
let known = [];
/** @type {DeadLetter[]} of the chosen sink, by number */
let letters = [];
/** @type {number | null} after which the next page begins */
let next = null;

const figures = {
  sinks: figure("sinks"),
  troubles: figure("failing or paused"),
  waiting: figure("events wait"),
  dead: figure("dead letters"),
};
const none = el(
  "p",
  { class: "card", hidden: true, "data-testid": "no-sinks" },
  "No other system gets the events of this fleet. ",
  el("code", {}, "terrace sinks add"),
  " adds a webhook or an MQTT broker.",
);
const forbidden = el("p", { class: "card", "data-testid": "forbidden" }, "Only admins may see sinks.");
const said = el("p", { class: "said", role: "status", "data-testid": "said" });

/** @type {Table<SinkNow>} */
const sinks = new Table(
  "Sinks",
  [
    { title: "Sink", kind: "name", show: link },
    { title: "State", kind: "state", show: sinkState },
    { title: "Last error", kind: "why said", show: (cell, sink) => hinted(cell, sink.reason) },
    { title: "Do", kind: "do", show: (cell, sink) => showOrders(cell, sink.name, acts(sink), ["test", sink.state === "paused" ? "resume" : "pause", "remove"]) },
    { title: "Waiting", kind: "number", show: (cell, sink) => text(cell, number(sink.waiting)) },
    { title: "Lag", kind: "number", show: (cell, sink) => text(cell, span(sink.lag_s)) },
    { title: "Dead", kind: "number", show: (cell, sink) => text(cell, number(sink.dead)) },
    { title: "Kind", kind: "answer", show: (cell, sink) => hinted(cell, sink.kind) },
    { title: "Target", kind: "answer", show: (cell, sink) => hinted(cell, target(sink)) },
    { title: "Filter", kind: "answer", show: (cell, sink) => hinted(cell, filterWords(sink.filter)) },
    { title: "Delivered", kind: "number", show: (cell, sink) => text(cell, number(sink.delivered)) },
    { title: "Dropped", kind: "number", show: (cell, sink) => text(cell, number(sink.dropped)) },
  ],
  (sink) => sink.name,
  (row, sink) => {
    attribute(row, "data-testid", "sink");
    attribute(row, "data-sink", sink.name);
  },
);

/** @type {Table<DeadLetter>} */
const dead = new Table(
  "Dead letters",
  [
    { title: "Event", kind: "name", show: (cell, letter) => hinted(cell, letter.event.id) },
    { title: "Do", kind: "do", show: replayButton },
    { title: "Type", kind: "answer", show: (cell, letter) => hinted(cell, letter.event.type) },
    { title: "Happened", kind: "number", show: (cell, letter) => text(cell, day(letter.event.timestamp)) },
    { title: "Given up", kind: "number", show: (cell, letter) => text(cell, day(letter.at)) },
    { title: "Tries", kind: "number", show: (cell, letter) => text(cell, number(letter.attempts)) },
    { title: "Why", kind: "why said", show: (cell, letter) => hinted(cell, letter.reason) },
    { title: "Content", kind: "why", show: (cell, letter) => hinted(cell, JSON.stringify(letter.event.data)) },
  ],
  (letter) => letter.event.id,
  (row, letter) => {
    attribute(row, "data-testid", "letter");
    attribute(row, "data-letter", letter.event.id);
  },
);
const ofSink = el("select", { id: "of-sink", change: () => choose(ofSink.value) });
const replayAll = el("button", { type: "button", "data-testid": "replay-all", click: () => attempt(() => replay(null)) }, "Replay all");
const more = el("button", { type: "button", hidden: true, click: () => attempt(readMore) }, "Show more");
const ofDead = el(
  "section",
  { "data-testid": "dead" },
  el("h2", {}, "Dead letters"),
  el("div", { class: "filters" }, el("label", { for: "of-sink" }, "Of"), ofSink, replayAll),
  el("p", { class: "muted" }, "Events that the receiver refused, or did not take in time. A replay delivers them again."),
  dead.element,
  el("p", { class: "buttons" }, more),
);

/** @param {HTMLElement} cell @param {SinkNow} sink */
function link(cell, { name }) {
  if (!cell.firstChild) cell.append(el("a"));
  const [anchor] = cell.children;
  attribute(anchor, "href", `#sink=${encodeURIComponent(name)}`);
  hinted(anchor, name);
}

/** @param {HTMLElement} cell @param {SinkNow} sink */
function sinkState(cell, { state }) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }));
  const [shown] = cell.children;
  attribute(shown, "data-sink-state", state);
  text(shown, state);
}

/** Where the events go, as far as the options of its kind name that. @param {SinkNow} sink */
function target({ options }) {
  const { url, host, port } = options;
  if (url !== undefined) return String(url);
  return host === undefined ? JSON.stringify(options) : `${host}${port === undefined ? "" : `:${port}`}`;
}

/** @param {SinkFilter} filter */
function filterWords({ events, sources, labels, confidence }) {
  const parts = [
    events.length > 0 && events.join(", "),
    sources.length > 0 && `sources ${sources.join(", ")}`,
    labels.length > 0 && `labels ${labels.join(", ")}`,
    confidence !== null && `confidence ≥ ${number(confidence)}`,
  ];
  return parts.filter(Boolean).join(" · ") || "all events";
}

/** @param {string} name */
function path(name) {
  return `/v1/sinks/${encodeURIComponent(name)}`;
}

/** What an admin may do to a sink. @param {SinkNow} sink @returns {Record<string, import("./orders.js").Order>} */
function acts({ name }) {
  const change = (/** @type {"POST" | "DELETE"} */ method, /** @type {string} */ what) => async () => {
    await send(method, `${path(name)}${what}`);
    await read();
  };
  return {
    test: ["Test", "", () => test(name)],
    pause: ["Pause", "Deliver nothing to NAME until it is resumed? Its events wait, at most as long as events are kept.", change("POST", "/pause")],
    resume: ["Resume", "", change("DELETE", "/pause")],
    remove: ["Remove", "Remove NAME, with its events and its dead letters?", change("DELETE", "")],
  };
}

/** Sends a test event. @param {string} name */
async function test(name) {
  text(said, `${name} is tested …`);
  try {
    const { seconds } = await (await send("POST", `${path(name)}/test`)).json();
    text(said, `${name} took a test event in ${number(1000 * seconds)} ms.`);
  } catch (error) {
    text(said, "");
    throw error;
  }
}

/** @param {HTMLElement} cell @param {DeadLetter} letter */
function replayButton(cell, letter) {
  if (!cell.firstChild) cell.append(el("button", { type: "button", click: () => attempt(() => replay([letter.number])) }, "Replay"));
  const button = /** @type {HTMLButtonElement} */ (cell.firstElementChild);
  attribute(button, "aria-label", `Replay ${letter.event.id}`);
  button.disabled = letter.replaying;
}

/** Delivers dead letters of the chosen sink again. @param {number[] | null} numbers null: all */
async function replay(numbers) {
  const name = chosen();
  if (name === null) return;
  const { count } = await (await send("POST", `${path(name)}/replay`, { numbers })).json();
  text(said, `${number(count)} ${count === 1 ? "event is" : "events are"} delivered to ${name} again.`);
  await read();
}

/** The sink in the address; the first one with dead letters, unless there is such a sink. */
function chosen() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("sink");
  const found = known.find(({ name }) => name === wanted) ?? known.find((each) => each.dead > 0) ?? known[0];
  return found?.name ?? null;
}

/** @param {string} name */
function choose(name) {
  location.hash = `sink=${encodeURIComponent(name)}`;
}

function show() {
  text(figures.sinks.value, number(known.length));
  text(figures.troubles.value, number(known.filter(({ state }) => state !== "ok").length));
  text(figures.waiting.value, number(known.reduce((sum, { waiting }) => sum + waiting, 0)));
  text(figures.dead.value, number(known.reduce((sum, each) => sum + each.dead, 0)));
  none.hidden = known.length > 0;
  sinks.element.hidden = ofDead.hidden = known.length === 0;
  sinks.update(known);
  const names = known.map(({ name }) => name);
  if (ofSink.dataset.names !== names.join()) {
    ofSink.dataset.names = names.join();
    replace(ofSink, ...names.map((name) => el("option", { value: name }, name)));
  }
  ofSink.value = chosen() ?? "";
  dead.update(letters);
  dead.element.hidden = replayAll.hidden = letters.length === 0;
  more.hidden = next === null;
}

/** The dead letters of a sink. @param {string} name @param {number} after only those with higher numbers */
async function page(name, after) {
  return /** @type {{letters: DeadLetter[], next: number | null}} */ (await get(`${path(name)}/dead?after=${after}`));
}

async function read() {
  known = (await get("/v1/sinks")).sinks;
  await readLetters();
}

/** The first page again, so that letters that were delivered disappear. */
async function readLetters() {
  const name = chosen();
  ({ letters, next } = name === null ? { letters: [], next: null } : await page(name, 0));
  show();
}

async function readMore() {
  const name = chosen();
  if (name === null || next === null) return;
  const found = await page(name, next);
  letters = [...letters, ...found.letters];
  next = found.next;
  show();
}

begin(async () => {
  if (!caller.administers) {
    main.append(forbidden);
    return;
  }
  main.append(el("div", { class: "figures" }, ...Object.values(figures).map(({ element }) => element)), none, said, sinks.element, ofDead);
  await read();
  window.addEventListener("hashchange", () => attempt(readLetters));
  const again = atMost(PAUSE_MS, read);
  follow("/v1/fleet/events", { snapshot: again }, { reopened: again });
});
