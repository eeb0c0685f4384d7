// Events of the fleet: what each is called, and a table of them.

import { root } from "./api.js";
import { attribute, el, hinted, text } from "./dom.js";
import { clock, day } from "./format.js";
import { Table } from "./table.js";

/** @typedef {import("./types").FleetEvent} FleetEvent */

/** Kind of an event, and the words for it. @type {Record<string, [string, string]>} */
export const KINDS = {
  joined: ["good", "joined"],
  recovered: ["good", "recovered"],
  resumed: ["good", "takes tasks again"],
  began: ["plain", "job began"],
  ended: ["plain", "job ended"],
  escalated: ["decision", "escalates"],
  rerouted: ["decision", "rerouted"],
  limited: ["decision", "limited"],
  drained: ["decision", "drained"],
  fallback: ["fault", "fallback"],
  reassigned: ["fault", "reassigned"],
  suspect: ["fault", "suspect"],
  dead: ["fault", "dead"],
  removed: ["fault", "removed"],
};

/** @returns {Table<FleetEvent>} */
export function eventTable() {
  return new Table(
    "Events",
    [
      { title: "When", show: (cell, event) => (text(cell, clock(event.at)), attribute(cell, "title", day(event.at))) },
      { title: "What", show: what },
      { title: "Node", kind: "name", show: (cell, event) => hinted(cell, event.node ?? "") },
      { title: "Job", show: job },
      { title: "Tasks", kind: "number", show: (cell, event) => text(cell, event.count > 1 ? event.count : "") },
      { title: "Why", kind: "why", show: (cell, event) => hinted(cell, event.text) },
    ],
    (event) => String(event.id),
    (row, event) => {
      attribute(row, "data-testid", "event");
      attribute(row, "data-kind", event.kind);
    },
  );
}

/** @param {HTMLElement} cell @param {FleetEvent} event */
function what(cell, event) {
  const [kind, words] = KINDS[event.kind] ?? ["plain", event.kind];
  if (!cell.firstChild) cell.append(el("span", { class: "event", "data-kind": kind }, words));
}

/** @param {HTMLElement} cell @param {FleetEvent} event */
function job(cell, event) {
  if (event.job === null || cell.firstChild) return;
  // Interactive requests are no jobs that could be looked at.
  cell.append(event.job.startsWith("live-") ? "request" : el("a", { href: `${root}/ui/jobs/${encodeURIComponent(event.job)}` }, event.job));
}
