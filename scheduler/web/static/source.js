// One source: how it is, who may see it, and what it saw.

import { answerWords, words } from "./answers.js";
import { ApiError, follow, get, root, send } from "./api.js";
import { attribute, confirmed, el, hinted, replace, text } from "./dom.js";
import { clock, day, number, percent, size, span } from "./format.js";
import { atMost, attempt, begin, caller, main } from "./shell.js";
import { mapOf } from "./siteparts.js";
import { budgetWords, heard, keyOf, pictureOf, waitingWords } from "./sourceparts.js";
import { Table } from "./table.js";
import { Tile } from "./tile.js";
import { whileVisible } from "./visible.js";

/** @typedef {import("./types").SeenPicture} SeenPicture */
/** @typedef {import("./types").ObservationPage} ObservationPage */

const PAGE = 200;
const MOST_ROWS = 20000;
/** Pages that are read at a time for one row that fits the filters. */
const MOST_PAGES = 10;
const PAUSE_MS = 1000;
const THUMBNAIL = 64;
const SURE = [95, 90, 75, 50, 25];

const [node, name] = location.pathname.split("/").slice(-2).map(decodeURIComponent);
const here = { node, source: name };
const address = `/v1/devices/${encodeURIComponent(node)}/sources/${encodeURIComponent(name)}/pause`;
const rightsAddress = `/v1/sources/${encodeURIComponent(node)}/${encodeURIComponent(name)}/rights`;

/** @type {Map<number, SeenPicture>} those that fit the filters, by number */
const rows = new Map();
/** @type {string | null} where the next page begins */
let cursor = null;
/** Counts the searches, so that the answer to an earlier one is dropped. */
let searches = 0;
/** The names of classes by the name of their superclass. @type {Map<string, Set<string>>} */
let below = new Map();
/** The names of classes and superclasses, by how they are written here. @type {Map<string, string>} */
let known = new Map();
/** @type {import("./types").HeardSource | null} */
let source = null;
/** @type {Tile | null} */
let tile = null;

const now = el("ul", { class: "tiles single", "aria-label": "Now" });
const facts = {
  Device: el("span"),
  Site: el("a"),
  "Last heard": el("span"),
  Spool: el("span"),
  "Waits there": el("span"),
  "Bytes of the last 24 hours": el("span"),
  Owner: el("span"),
  Readers: el("span"),
};
const pause = el("button", { type: "button", hidden: true, click: () => attempt(askPause) });
const owner = el("input", { id: "owner", autocomplete: "off", maxlength: 63 });
const readers = el("input", { id: "readers", autocomplete: "off", placeholder: "bob, carol" });
const saved = el("span", { role: "status" });
const rights = el(
  "details",
  { hidden: true, "data-testid": "rights" },
  el("summary", {}, "Who may see it"),
  el(
    "form",
    { class: "card", submit: (/** @type {SubmitEvent} */ event) => (event.preventDefault(), attempt(saveRights)) },
    el("p", { class: "muted" }, "Names of tokens. Readers see what the source saw; the owner also pauses it and chooses readers. Operators see all sources."),
    el("label", { for: "owner" }, "Owner"),
    owner,
    el("label", { for: "readers" }, "Readers, with commas between them"),
    readers,
    el("button", { type: "submit", class: "strong" }, "Save"),
    saved,
  ),
);

const list = el("dl", { class: "facts" }, ...Object.entries(facts).map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value))));
const about = el("div", { class: "source", hidden: true }, now, el("div", {}, list, el("p", { class: "buttons" }, pause), rights));
const unknown = el("p", { class: "card", hidden: true, "data-testid": "no-source" }, `No device has a source ${name} now that you may see.`);

const classes = el("datalist", { id: "classes" });
const label = el("input", { type: "search", list: "classes", placeholder: "any class", autocomplete: "off", change: () => attempt(restart) });
const sure = el("select", { change: () => attempt(restart) }, el("option", { value: "" }, "any"), ...SURE.map((each) => el("option", { value: each / 100 }, `${each} %`)));
const amended = el("input", { type: "checkbox", change: () => attempt(restart) });
const older = el("button", { type: "button", hidden: true, click: () => attempt(() => readOlder(searches)) }, "Show older");
const shownOf = el("p", { class: "muted", "data-testid": "shown-of" });
const files = ["jsonl", "csv"].map((format) => ({ format, link: el("a", { class: "button", download: `${node}-${name}.${format}`, "data-testid": `download-${format}` }, `Download ${format.toUpperCase()}`) }));

/** @type {Table<SeenPicture>} */
const table = new Table(
  "Observations",
  [
    { title: "#", kind: "number", show: (cell, row) => text(cell, number(row.sequence)) },
    { title: "Taken", kind: "number", show: (cell, row) => text(cell, moment(row.taken_at)) },
    { title: "Picture", kind: "picture", show: picture },
    { title: "Device says", kind: "answer", show: (cell, row) => hinted(cell, answerWords(row.coarse)) },
    { title: "Better answer", kind: "answer", show: (cell, row) => hinted(cell, answerWords(row.fine)) },
    { title: "Amended", kind: "changed", show: changed },
    { title: "Tier", show: (cell, row) => text(cell, row.answered_by ?? "") },
    { title: "Node", show: (cell, row) => text(cell, (row.fine ?? row.coarse)?.node ?? "") },
    { title: "Why no better answer", kind: "why", show: (cell, row) => hinted(cell, row.damaged ?? row.fallback ?? (row.waits ? "it waits for one" : "")) },
    { title: "File", kind: "file", show: (cell, row) => hinted(cell, row.name ?? "") },
  ],
  (row) => String(row.sequence),
  (row, seen) => {
    attribute(row, "data-testid", "observation");
    attribute(row, "data-number", seen.sequence);
    attribute(row, "data-label", seen.label);
    attribute(row, "data-revision", seen.revision);
  },
);

/** Without the date, if that is today. @param {string | null} at */
function moment(at) {
  const written = day(at);
  const [today] = day(Date.now() / 1000).split(" ");
  return written.startsWith(today) ? clock(at) : written;
}

/** @param {HTMLElement} cell @param {SeenPicture} row */
function picture(cell, row) {
  if (!row.picture || cell.dataset.asked) return;
  cell.dataset.asked = "yes";
  const image = el("img", { loading: "lazy", alt: `Picture ${number(row.sequence)}`, width: 34, height: 34, error: () => replace(cell) });
  image.src = pictureOf(here, row.sequence, THUMBNAIL);
  replace(cell, el("a", { href: pictureOf(here, row.sequence), target: "_blank", rel: "noopener" }, image));
}

/** Whether the later answer says the same as the device. @param {HTMLElement} cell @param {SeenPicture} row */
function changed(cell, { revision, coarse, fine }) {
  const other = coarse && fine && fine.coarse_label !== coarse.label && fine.label !== coarse.label;
  text(cell, revision === 0 ? "" : other ? "corrected" : fine ? "confirmed" : "yes");
  attribute(cell, "title", revision === 0 ? null : other ? `The device said ${words(coarse.label)}; it is ${words(fine.coarse_label)}.` : `revision ${revision}`);
  cell.classList.toggle("corrected", revision > 0 && Boolean(other));
}

function chosen() {
  const written = label.value.trim();
  return known.get(written.toLowerCase()) ?? written;
}

/** What the filters ask for. */
function wanted() {
  const query = new URLSearchParams(here);
  if (chosen()) query.set("label", chosen());
  if (sure.value) query.set("below", sure.value);
  if (amended.checked) query.set("amended", "true");
  return query;
}

/** The same for a picture that comes by itself. @param {SeenPicture} seen */
function fits(seen) {
  const like = chosen();
  const named = !like || seen.label === like || Boolean(seen.label && below.get(like)?.has(seen.label));
  return named && (!sure.value || (seen.confidence !== null && seen.confidence < Number(sure.value))) && (!amended.checked || seen.revision > 0);
}

let drawing = 0;
/** With the next picture that the browser draws, however many observations come till then. */
function show() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    const sorted = [...rows.values()].sort((one, other) => other.sequence - one.sequence);
    for (const { sequence } of sorted.splice(MOST_ROWS)) rows.delete(sequence);
    const [newest] = table.items;
    table.update(sorted, newest ? sorted.findIndex(({ sequence }) => sequence === newest.sequence) : 0);
    table.element.hidden = sorted.length === 0;
    table.element.classList.toggle("nameless", !sorted.some((seen) => seen.name));
    older.hidden = cursor === null || sorted.length >= MOST_ROWS;
    const narrowed = chosen() || sure.value || amended.checked;
    if (sorted.length >= MOST_ROWS) text(shownOf, `The newest ${number(MOST_ROWS)} are shown; the files to download have all.`);
    else if (sorted.length) text(shownOf, `${number(sorted.length)} shown`);
    else if (cursor !== null) text(shownOf, "Nothing is like that so far. Older observations may be.");
    else text(shownOf, narrowed ? "Nothing is like that." : "This source has seen nothing yet.");
  });
}

/** @param {SeenPicture[]} some */
function take(some) {
  for (const seen of some) {
    if ((rows.get(seen.sequence)?.revision ?? 0) > seen.revision) continue;
    if (fits(seen)) rows.set(seen.sequence, seen);
    else rows.delete(seen.sequence);
  }
  show();
}

/** @param {string | null} after @returns {Promise<ObservationPage>} */
function page(after) {
  const query = wanted();
  query.set("limit", String(PAGE));
  if (after) query.set("cursor", after);
  return get(`/v1/observations?${query}`);
}

/** Reads on until something fits. @param {number} search that it belongs to */
async function readOlder(search) {
  older.disabled = true;
  try {
    for (let read = 0; read < MOST_PAGES; read += 1) {
      const { observations, next_cursor } = await page(cursor);
      if (search !== searches) return;
      cursor = next_cursor;
      for (const seen of observations) rows.set(seen.sequence, seen);
      show();
      if (observations.length || cursor === null) return;
    }
  } finally {
    older.disabled = false;
  }
}

/** The newest ones, as the filters are now. */
async function restart() {
  const query = wanted();
  for (const { format, link } of files) {
    attribute(link, "href", `${root}/v1/observations/export?format=${format}${format === "csv" ? "&bom=true" : ""}&${query}`);
  }
  searches += 1;
  const search = searches;
  cursor = null;
  rows.clear();
  try {
    const { observations, next_cursor } = await page(null);
    if (search !== searches) return;
    cursor = next_cursor;
    for (const seen of observations) rows.set(seen.sequence, seen);
  } finally {
    if (search === searches) show();
  }
  if (!rows.size && cursor !== null) await readOlder(search);
}

/** After a time without events. Rows stay where the newest ones follow on them. */
const catchUp = atMost(PAUSE_MS, async () => {
  const search = searches;
  const { observations, next_cursor } = await page(null);
  if (search !== searches) return;
  if (next_cursor !== null && !observations.some(({ sequence }) => rows.has(sequence))) {
    rows.clear();
    cursor = next_cursor;
  }
  take(observations);
});

/** @param {import("./types").SourceList} told */
function showSource({ sources }) {
  const [found] = heard(sources.filter((each) => keyOf(each) === keyOf(here)), Date.now() / 1000);
  source = found ?? null;
  about.hidden = !source;
  unknown.hidden = Boolean(source);
  if (!source) return;
  if (!tile) {
    tile = new Tile(source, false);
    now.append(tile.element);
    tile.inSight(true);
  }
  tile.update(source);
  showFacts();
  const may = caller.operates || (source.owner !== null && source.owner === caller.name);
  pause.hidden = !may;
  rights.hidden = !may || caller.name === null;
  fillRights();
  text(pause, source.state === "paused" ? "Resume" : "Pause");
  const row = source.last_picture === null ? undefined : rows.get(source.last_picture);
  if (row && !row.picture) take([{ ...row, picture: true }]);
}

function showFacts() {
  if (!source) return;
  const { heardAt, spool_bytes, spool_size_bytes, spent_bytes, bytes_per_day } = source;
  text(facts.Device, source.health ? `${node} (${source.health})` : node);
  hinted(facts.Site, source.site ?? "");
  attribute(facts.Site, "href", source.site && mapOf(source.site));
  /** @type {HTMLElement} */ (facts.Site.closest("div")).hidden = !source.site;
  text(facts["Last heard"], heardAt === null ? "never" : `${span(Date.now() / 1000 - heardAt)} ago`);
  text(facts.Spool, spool_bytes === null ? "unknown" : `${size(spool_bytes)}${spool_size_bytes ? ` of ${size(spool_size_bytes)} (${percent(spool_bytes / spool_size_bytes)})` : ""}`);
  text(facts["Waits there"], waitingWords(source));
  text(facts["Bytes of the last 24 hours"], spent_bytes === null ? "unknown" : `${size(spent_bytes)}${bytes_per_day === null ? "" : ` of ${size(bytes_per_day)}`}, ${budgetWords(source)}`);
  text(facts.Owner, source.owner ?? "none");
  text(facts.Readers, source.readers.join(", ") || "none");
}

async function askPause() {
  const paused = source?.state === "paused";
  if (!paused && !(await confirmed(`Pause ${name}? It takes no pictures until you resume it.`, "Pause"))) return;
  await send(paused ? "DELETE" : "POST", address);
}

/** Only while it is closed: what somebody writes is not written over. */
function fillRights() {
  if (rights.open || !source) return;
  owner.value = source.owner ?? "";
  owner.disabled = !caller.operates;
  readers.value = source.readers.join(", ");
  text(saved, "");
}

async function saveRights() {
  const names = readers.value.split(/[\s,]+/).filter(Boolean);
  text(saved, "");
  await send("PUT", rightsAddress, { owner: owner.value.trim() || null, readers: names });
  text(saved, "Saved.");
}

function live() {
  whileVisible(() => {
    const query = new URLSearchParams(here);
    const one = (/** @type {SeenPicture} */ seen) => take([seen]);
    const ends = [
      follow(`/v1/sources/events?${query}`, { snapshot: showSource }),
      follow(`/v1/observations/events?${query}`, { observation: one, amended: one }, { connected: (well) => well && catchUp() }),
    ];
    const timer = window.setInterval(() => {
      tile?.draw();
      showFacts();
    }, PAUSE_MS);
    return () => {
      window.clearInterval(timer);
      ends.forEach((end) => end());
    };
  });
}

begin(async () => {
  text(/** @type {Element} */ (main.querySelector("h1")), name);
  document.title = `${name} · Terrace`;
  main.append(
    el("p", {}, el("a", { href: `${root}/ui/live` }, "All sources")),
    about,
    unknown,
    el("h2", {}, "What it saw"),
    el("div", { class: "filters" }, el("label", {}, "Class ", label), classes, el("label", {}, "Less sure than ", sure), el("label", {}, amended, " Only amended"), ...files.map(({ link }) => link)),
    shownOf,
    table.element,
    el("p", { class: "buttons" }, older),
  );
  const { hierarchy } = await get("/v1/info");
  /** @type {string[]} */
  const coarse = hierarchy.coarse;
  below = new Map(coarse.map((each, index) => [each, new Set(hierarchy.fine.filter((/** @type {string} */ _, /** @type {number} */ fine) => hierarchy.parent[fine] === index))]));
  known = new Map([...coarse, ...hierarchy.fine].map((each) => [words(each).toLowerCase(), each]));
  classes.append(...[...known.keys()].sort().map((each) => el("option", { value: each })));
  try {
    await restart();
  } catch (error) {
    if (!(error instanceof ApiError && [400, 404].includes(error.status))) throw error;
    unknown.hidden = false;
    return;
  }
  live();
});
