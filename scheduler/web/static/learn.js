// Learn: pictures of which people say what they show, what devices keep, and the improvements of releases.

import { ApiError, follow, get, send } from "./api.js";
import { answerWords, words } from "./answers.js";
import { attribute, el, figure, hinted, replace, text } from "./dom.js";
import { day, number, percent } from "./format.js";
import { agreementWords, figureWords, keptWords, lettersSearch, meant, offers, roomWords, stateWords, troubleWords } from "./learnparts.js";
import { atMost, attempt, begin, main, tell } from "./shell.js";
import { keyOf, pictureOf } from "./sourceparts.js";
import { Table } from "./table.js";

/** @typedef {import("./types").Improvement} Improvement */
/** @typedef {import("./types").NodeLearning} NodeLearning */
/** @typedef {import("./types").SeenPicture} SeenPicture */
/** @typedef {import("./learnparts.js").Classes} Classes */

const PAUSE_MS = 3000;
const SMALL_PX = 96;
const PAGE = 50;

/** @type {Classes} */
let classes = { fine: [], superclasses: {} };
/** Pictures to label, the one that is shown first. @type {SeenPicture[]} */
let queue = [];
/** Pictures that were passed over, by their key. @type {Set<string>} */
const passed = new Set();
/** Pictures that were labelled here, the last one at the end. @type {SeenPicture[]} */
const done = [];
let busy = false;

const figures = { agreement: figure("tiers agree"), audited: figure("audited pictures"), labels: figure("labelled pictures") };

const picture = el("img", { class: "big", alt: "", error: () => void lose() });
const answers = el("dl", { class: "facts" });
const offered = el("div", { class: "buttons offers", "data-testid": "offers" });
const names = el("datalist", { id: "classes" });
const sought = el("input", { type: "search", id: "sought", list: "classes", autocomplete: "off", spellcheck: "false" });
const search = el("form", { class: "filters", submit: chooseSought }, el("label", { for: "sought" }, "Another class"), sought, names);
const undo = el("button", { type: "button", "data-testid": "undo", click: () => attempt(takeBack) }, "Undo (Backspace)");
const pass = el("button", { type: "button", "data-testid": "skip", click: () => void skip() }, "Skip (→)");
const withKeys = el("input", { type: "checkbox", id: "with-keys", checked: true });
const said = el("p", { class: "muted", role: "status", "aria-live": "polite", "data-testid": "said" });
const none = el("p", { hidden: true, "data-testid": "nothing" }, "No picture to label: the tiers agree on those that the scheduler has.");
const shown = el("div", { class: "labelling", hidden: true }, el("div", { class: "sight" }, picture), el("div", {}, answers, offered, search));
const card = el(
  "section",
  { class: "card", "data-testid": "to-label", "aria-label": "Picture to label" },
  shown,
  none,
  el("div", { class: "buttons" }, undo, pass, el("label", { class: "check", for: "with-keys" }, withKeys, "Label with keys")),
  said,
);

/** @type {Table<NodeLearning>} */
const nodes = new Table(
  "Devices that learn",
  [
    { title: "Node", kind: "name", show: (cell, each) => hinted(cell, each.node) },
    { title: "Agree", kind: "number", show: (cell, each) => text(cell, agreementWords(each)) },
    { title: "Kept", kind: "number", show: (cell, each) => text(cell, number(each.kept?.pictures)) },
    { title: "Of these", show: (cell, each) => text(cell, keptWords(each)) },
    { title: "Labelled", kind: "number", show: (cell, each) => text(cell, number(each.kept?.labelled)) },
    { title: "Room", kind: "number", show: (cell, each) => text(cell, roomWords(each)) },
    { title: "Trouble", kind: "why said", show: (cell, each) => hinted(cell, troubleWords(each)) },
  ],
  (each) => each.node,
  (row, each) => {
    attribute(row, "data-testid", "learning-node");
    attribute(row, "data-node", each.node);
  },
);
const ofNodes = el("section", { hidden: true }, el("h2", {}, "Devices"), nodes.element);

/** @type {Table<SeenPicture>} */
const labelled = new Table(
  "Labelled pictures",
  [
    { title: "Picture", kind: "picture", show: showSmall },
    { title: "Label", kind: "name", show: (cell, each) => hinted(cell, words(each.person ?? "")) },
    { title: "By", kind: "answer", show: (cell, each) => hinted(cell, each.person_by ?? "–") },
    { title: "At", kind: "number", show: (cell, each) => text(cell, day(each.person_at)) },
    { title: "Device", kind: "answer", show: (cell, each) => hinted(cell, answerWords(each.coarse)) },
    { title: "From above", kind: "answer", show: (cell, each) => hinted(cell, answerWords(each.fine)) },
    { title: "Source", kind: "answer", show: (cell, each) => hinted(cell, `${each.node} ${each.source} ${each.sequence}`) },
  ],
  nameOf,
  (row, each) => {
    attribute(row, "data-testid", "labelled");
    attribute(row, "data-number", each.sequence);
  },
);
const ofLabelled = el("section", { hidden: true }, el("h2", {}, "Labelled"), labelled.element);

/** @type {Table<Improvement>} */
const improvements = new Table(
  "Improvements",
  [
    { title: "Release", kind: "name", show: (cell, each) => hinted(cell, each.release) },
    { title: "State", kind: "answer", show: (cell, each) => hinted(cell, stateWords(each, Date.now() / 1000)) },
    { title: "Made", kind: "answer", show: (cell, each) => hinted(cell, each.new_release ?? "–") },
    { title: "Devices", kind: "number", show: (cell, each) => text(cell, number(each.devices)) },
    { title: "Old → new", kind: "why said", show: (cell, each) => hinted(cell, figureWords(each)) },
    { title: "Begun", kind: "number", show: (cell, each) => text(cell, day(each.created_at)) },
    { title: "By", kind: "answer", show: (cell, each) => hinted(cell, each.by ?? "–") },
    { title: "Why", kind: "why said", show: (cell, each) => hinted(cell, each.reason) },
  ],
  (each) => each.id,
  (row) => attribute(row, "data-testid", "improvement"),
);
const ofImprovements = el("section", { hidden: true }, el("h2", {}, "Improvements"), improvements.element);

/** @param {SeenPicture} of */
function nameOf(of) {
  return `${keyOf(of)}/${of.sequence}`;
}

/** @param {SeenPicture} of */
function labelPath({ node, source, sequence }) {
  return `/v1/observations/${encodeURIComponent(node)}/${encodeURIComponent(source)}/${sequence}/label`;
}

/** @param {HTMLElement} cell @param {SeenPicture} of */
function showSmall(cell, of) {
  if (!cell.firstChild) cell.append(el("img", { width: 58, height: 40, loading: "lazy", alt: `Picture ${of.sequence}`, src: pictureOf(of, of.sequence, SMALL_PX) }));
}

/** Shows the first picture of the queue. */
function show() {
  const [first, second] = queue;
  shown.hidden = !first;
  none.hidden = Boolean(first);
  pass.disabled = !first;
  undo.disabled = done.length === 0;
  card.dataset.shown = first ? nameOf(first) : "";
  if (!first) {
    picture.removeAttribute("src");
    return;
  }
  const address = pictureOf(first, first.sequence);
  attribute(picture, "src", address);
  attribute(picture, "alt", `Picture ${first.sequence} of ${first.source} on ${first.node}`);
  if (second) new Image().src = pictureOf(second, second.sequence);
  const facts = [
    ["Device", `${answerWords(first.coarse)}${first.unsure ? ", unsure" : ""}`],
    ["From above", first.fine ? `${words(first.fine.coarse_label)}: ${answerWords(first.fine)}, by ${first.fine.node}` : "–"],
    ["Picture", `${first.node} ${first.source} ${first.sequence}`],
    ["Taken", day(first.taken_at)],
  ];
  replace(answers, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const buttons = offers(classes, first).map(({ name, key }) =>
    el("button", { type: "button", "data-label": name, click: () => attempt(() => label(name)) }, el("kbd", {}, key), ` ${words(name)}`),
  );
  replace(offered, ...buttons);
}

/** @param {string} name of a class */
async function label(name) {
  const [of] = queue;
  if (!of || busy) return;
  busy = true;
  try {
    await send("PUT", labelPath(of), { label: name });
    done.push(of);
    text(said, `Picture ${of.sequence} of ${of.source}: ${words(name)}`);
    queue.shift();
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
    queue = []; // it is read again: others may be gone as well
    tell(error);
  } finally {
    busy = false;
  }
  sought.value = "";
  await more();
  again();
}

/** Takes the last label back, and shows its picture again. */
async function takeBack() {
  const of = done.at(-1);
  if (!of || busy) return;
  busy = true;
  try {
    await send("DELETE", labelPath(of));
  } finally {
    busy = false;
    done.pop();
  }
  queue = [of, ...queue.filter((each) => nameOf(each) !== nameOf(of))];
  text(said, `Picture ${of.sequence} of ${of.source}: no label`);
  show();
  again();
}

async function skip() {
  const of = queue.shift();
  if (of) passed.add(nameOf(of));
  await attempt(more);
}

/** Says that the scheduler has deleted the picture that is shown, and reads the list again: others may be gone as well. */
async function lose() {
  const [of] = queue;
  if (!of) return;
  passed.add(nameOf(of));
  text(said, `The scheduler no longer has picture ${of.sequence} of ${of.source} on ${of.node}.`);
  queue = [];
  await attempt(more);
}

/** Shows the next picture; asks for more of them before the queue is empty. */
async function more() {
  let cursor = "";
  while (queue.length === 0) {
    const page = await get(`/v1/learning/pictures?which=disagree&limit=${PAGE}${cursor}`);
    queue = page.observations.filter((/** @type {SeenPicture} */ each) => !passed.has(nameOf(each)));
    if (page.next_cursor === null) break;
    cursor = `&cursor=${encodeURIComponent(page.next_cursor)}`;
  }
  show();
}

/** @param {SubmitEvent} event */
function chooseSought(event) {
  event.preventDefault();
  const name = meant(classes.fine, sought.value);
  if (name !== null) void attempt(() => label(name)).then(() => sought.blur());
  else text(said, `No class, or more than one, begins with ${sought.value}.`);
}

/** @param {KeyboardEvent} event */
function pressed(event) {
  if (!withKeys.checked || event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (event.target instanceof Element && event.target.closest("input:not([type=checkbox]), select, textarea, dialog, .table")) return;
  const of = queue[0];
  const offer = of && offers(classes, of).find(({ key }) => key === event.key.toLowerCase());
  if (offer) void attempt(() => label(offer.name));
  else if (event.key === "Backspace") void attempt(takeBack);
  else if (event.key === "ArrowRight") void skip();
  else if (event.key === "/" || (lettersSearch(classes) && /^[a-z]$/i.test(event.key))) {
    sought.focus();
    if (event.key !== "/") return; // the browser types the letter into the field
  } else return;
  event.preventDefault();
}

async function read() {
  const [now, made, people] = await Promise.all([
    get("/v1/learning"),
    get("/v1/improvements"),
    get(`/v1/learning/pictures?which=labelled&limit=${PAGE}`),
  ]);
  text(figures.agreement.value, percent(now.agreement));
  text(figures.audited.value, number(now.audited));
  text(figures.labels.value, number(now.labels));
  nodes.update(now.nodes);
  ofNodes.hidden = now.nodes.length === 0;
  labelled.update(people.observations);
  ofLabelled.hidden = people.observations.length === 0;
  improvements.update(made.improvements);
  ofImprovements.hidden = made.improvements.length === 0;
  if (queue.length === 0) await more();
}

const again = atMost(PAUSE_MS, read);

begin(async () => {
  main.append(el("div", { class: "figures" }, ...Object.values(figures).map(({ element }) => element)), card, ofNodes, ofImprovements, ofLabelled);
  classes = (await get("/v1/models")).hierarchy;
  replace(names, ...classes.fine.map((name) => el("option", { value: words(name) })));
  await read();
  show();
  document.addEventListener("keydown", pressed);
  follow("/v1/fleet/events", { snapshot: again }, { reopened: again });
});
