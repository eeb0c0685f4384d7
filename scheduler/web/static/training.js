// The list of training runs, newest first.

import { follow, get, root } from "./api.js";
import { attribute, el, text } from "./dom.js";
import { day, number, percent } from "./format.js";
import { jobState } from "./jobparts.js";
import { stepsBar } from "./runparts.js";
import { atMost, attempt, begin, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").RunSummary} RunSummary */

const PAGE = 100;
const PAUSE_MS = 2000;

/** @type {Map<string, RunSummary>} by id, the newest first */
let known = new Map();
/** @type {string | null} where the next page begins */
let cursor = null;

const older = el("button", { type: "button", hidden: true, click: () => attempt(readOlder) }, "Show older");
const none = el(
  "p",
  { class: "card", hidden: true, "data-testid": "no-runs" },
  "No network has been trained on this fleet. ",
  el("code", {}, "terrace train"),
  " has the commands.",
);

/** @type {Table<RunSummary>} */
const table = new Table(
  "Training runs",
  [
    { title: "Network", kind: "name", show: link },
    { title: "Strategy", show: (cell, run) => (text(cell, run.strategy), attribute(cell, "title", run.strategy)) },
    { title: "State", kind: "state", show: jobState },
    { title: "Steps", kind: "bar", show: stepsBar },
    { title: "Loss", kind: "number", show: (cell, run) => text(cell, number(run.loss)) },
    { title: "Accuracy", kind: "number", show: (cell, run) => text(cell, percent(run.accuracy)) },
    { title: "Workers", kind: "number", show: (cell, run) => text(cell, number(run.worker_count)) },
    { title: "Begun", kind: "number", show: (cell, run) => text(cell, day(run.created_at)) },
  ],
  (run) => run.id,
  (row, run) => {
    attribute(row, "data-testid", "run");
    attribute(row, "data-run", run.id);
    attribute(row, "data-state", run.state);
  },
);

/** @param {HTMLElement} cell @param {RunSummary} run */
function link(cell, run) {
  if (!cell.firstChild) cell.append(el("a", { href: `${root}/ui/training/${encodeURIComponent(run.id)}` }));
  const [anchor] = cell.children;
  text(anchor, run.network);
  attribute(anchor, "title", [run.id, run.owner ? `of ${run.owner}` : ""].filter(Boolean).join(", "));
}

function show() {
  table.update([...known.values()]);
  table.element.hidden = known.size === 0;
  none.hidden = known.size > 0;
  older.hidden = cursor === null;
}

/** @param {string | null} after @returns {Promise<import("./types").RunPage>} */
function page(after) {
  const query = new URLSearchParams({ limit: String(PAGE) });
  if (after) query.set("cursor", after);
  return get(`/v1/runs?${query}`);
}

/** The newest, before those that are here already. */
async function readNewest() {
  const { runs, next_cursor } = await page(null);
  if (known.size <= runs.length) cursor = next_cursor;
  const rest = [...known].filter(([id]) => !runs.some((run) => run.id === id));
  known = new Map([...runs.map((run) => /** @type {const} */ ([run.id, run])), ...rest]);
  show();
}

async function readOlder() {
  const { runs, next_cursor } = await page(cursor);
  cursor = next_cursor;
  for (const run of runs) known.set(run.id, run);
  show();
}

begin(async () => {
  main.append(none, table.element, el("p", { class: "buttons" }, older));
  await readNewest();
  const again = atMost(PAUSE_MS, readNewest);
  follow("/v1/fleet/events", { snapshot: again }, { reopened: again });
});
