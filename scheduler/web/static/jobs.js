// The list of jobs, newest first: those of the last days, and what becomes of the unfinished ones as it happens.

import { ApiError, follow, get, root } from "./api.js";
import { attribute, el, hinted, replace, text } from "./dom.js";
import { day, number, percent } from "./format.js";
import { jobState, progressBar, STATES } from "./jobparts.js";
import { atMost, attempt, begin, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").Job} Job */
/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */

const PAGE = 200;
const AT_ONCE = 10;
const PAUSE_MS = 1000;
const MOST = 20000;

/** @type {Map<string, Job>} by id */
const known = new Map();
/** @type {Set<string>} ids of jobs that have changed since they were read */
const stale = new Set();
/** @type {string | null} where the next page begins */
let cursor = null;
let now = Date.now() / 1000;

const state = el("select", { change: () => attempt(restart) }, el("option", { value: "" }, "all"), ...STATES.map((name) => el("option", { value: name }, name)));
const search = el("input", { type: "search", placeholder: "name or id", autocomplete: "off", input: show });
const older = el("button", { type: "button", hidden: true, click: () => attempt(readOlder) }, "Show older");
const shownOf = el("span", { class: "muted", role: "status" });
const none = el("p", { class: "card", hidden: true });

/** @type {Table<Job>} */
const table = new Table(
  "Jobs",
  [
    { title: "Job", kind: "name", show: link },
    { title: "State", kind: "state", show: jobState },
    { title: "Answered", kind: "bar", show: progressBar },
    { title: "Images", kind: "number", show: (cell, job) => text(cell, number(job.images)) },
    { title: "Images/s", kind: "number", show: (cell, job) => text(cell, number(speed(job))) },
    { title: "Coarse right", kind: "number", show: (cell, job) => text(cell, right(job, job.coarse_accuracy)) },
    { title: "Fine right", kind: "number", show: (cell, job) => text(cell, right(job, job.fine_accuracy)) },
    { title: "Site", kind: "site", show: (cell, job) => hinted(cell, job.site ?? "any") },
    { title: "Scheme", show: (cell, job) => text(cell, job.scheme) },
    { title: "Submitted", kind: "number", show: (cell, job) => text(cell, day(job.created_at)) },
  ],
  (job) => job.id,
  (row, job) => {
    attribute(row, "data-testid", "job");
    attribute(row, "data-job", job.id);
    attribute(row, "data-state", job.state);
  },
);

/** @param {HTMLElement} cell @param {Job} job */
function link(cell, job) {
  if (!cell.firstChild) cell.append(el("a", { href: `${root}/ui/jobs/${encodeURIComponent(job.id)}` }));
  const [anchor] = cell.children;
  text(anchor, job.name || job.id);
  attribute(anchor, "title", [job.name ? `${job.name} (${job.id})` : "", job.owner ? `of ${job.owner}` : ""].filter(Boolean).join(", ") || null);
}

/** @param {Job} job */
function unfinished(job) {
  return job.state === "queued" || job.state === "running";
}

/** Of an unfinished job, from what the fleet tells of it each second. @param {Job} job */
function speed(job) {
  if (!unfinished(job) || job.started_at === null) return job.images_per_s;
  const elapsed = now - Date.parse(job.started_at) / 1000;
  return elapsed > 0 ? job.answered_coarse / elapsed : null;
}

/** @param {Job} job @param {number | null} share */
function right(job, share) {
  return unfinished(job) ? "–" : percent(share);
}

function show() {
  const wanted = search.value.trim().toLowerCase();
  const found = [...known.values()].filter(
    (job) => (!state.value || job.state === state.value) && [job.id, job.name ?? "", job.site ?? ""].some((each) => each.toLowerCase().includes(wanted)),
  );
  found.sort((one, other) => (one.id < other.id ? 1 : -1));
  table.element.toggleAttribute("data-sited", found.some(({ site }) => site));
  table.update(found);
  table.element.hidden = found.length === 0;
  none.hidden = found.length > 0;
  const narrowed = Boolean(wanted || state.value);
  if (narrowed) text(none, cursor ? "None of the jobs that are shown is like that; older ones may be." : "No job is like that.");
  else if (!none.querySelector("code")) replace(none, "No job has been submitted. ", el("code", {}, "terrace classify photos/"), " submits one.");
  text(shownOf, found.length ? `${number(found.length)} shown` : "");
  older.hidden = cursor === null;
}

/** @param {Job[]} jobs */
function merge(jobs) {
  for (const job of jobs) {
    known.set(job.id, job);
    stale.delete(job.id);
  }
  if (known.size > MOST) {
    const oldest = [...known.keys()].sort().slice(0, known.size - MOST);
    oldest.forEach((id) => known.delete(id));
    cursor = [...known.keys()].reduce((least, id) => (id < least ? id : least));
  }
  show();
}

/** @param {string | null} after @returns {Promise<import("./types").JobPage>} */
function page(after) {
  const query = new URLSearchParams({ limit: String(PAGE) });
  if (after) query.set("cursor", after);
  if (state.value) query.set("state", state.value);
  return get(`/v1/jobs?${query}`);
}

async function restart() {
  const wanted = state.value;
  const { jobs, next_cursor } = await page(null);
  if (state.value !== wanted) return;
  known.clear();
  cursor = next_cursor;
  merge(jobs);
}

async function readOlder() {
  const { jobs, next_cursor } = await page(cursor);
  cursor = next_cursor;
  merge(jobs);
}

const readStale = atMost(PAUSE_MS, async () => {
  if (stale.size > AT_ONCE) merge((await get(`/v1/jobs?limit=${PAGE}`)).jobs);
  await Promise.all([...stale].slice(0, AT_ONCE).map(readOne));
  if (stale.size) readStale();
});

/** @param {string} id */
async function readOne(id) {
  try {
    merge([await get(`/v1/jobs/${encodeURIComponent(id)}`)]);
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
    stale.delete(id);
    known.delete(id);
  }
}

/** @param {string} id */
function changed(id) {
  if (stale.size < MOST) stale.add(id);
  readStale();
}

/** @param {FleetSnapshot} fleet */
function live(fleet) {
  now = fleet.at;
  const running = new Map(fleet.jobs.map((job) => [job.id, job]));
  for (const [id, job] of running) {
    const before = known.get(id);
    if (before?.state !== job.state) changed(id);
    else Object.assign(before, job);
  }
  if (fleet.unfinished === running.size) {
    for (const job of known.values()) {
      if (unfinished(job) && !running.has(job.id)) changed(job.id);
    }
  }
  show();
}

begin(async () => {
  main.append(
    el("div", { class: "filters" }, el("label", {}, "State ", state), el("label", {}, "Find ", search), shownOf),
    none,
    table.element,
    el("p", { class: "buttons" }, older),
  );
  await restart();
  follow(
    "/v1/fleet/events",
    {
      snapshot: live,
      happened: (/** @type {import("./types").FleetEvent} */ event) => {
        if (event.job && (event.kind === "began" || event.kind === "ended")) changed(event.job);
      },
    },
    { reopened: () => attempt(async () => merge((await page(null)).jobs)) },
  );
});
