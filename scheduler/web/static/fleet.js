// The fleet as it is now: figures, map, table, and what an operator may do to a node.

import { follow, send } from "./api.js";
import { attribute, confirmed, el, figure, replace, text } from "./dom.js";
import { milliseconds, number, percent, span } from "./format.js";
import { FleetMap } from "./map.js";
import { attempt, begin, caller, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */
/** @typedef {import("./types").NodeNow} NodeNow */

const SLOW = 1.5;

const figures = {
  images: figure("images a second"),
  first: figure("first answer, median"),
  final: figure("answer that stands, median"),
  alive: figure("nodes alive"),
  jobs: figure("unfinished jobs"),
};

const map = new FleetMap();
const doubt = el("p", { class: "trouble", hidden: true }, "No node is heard. The scheduler looks for the fault in itself or in its network first.");
const empty = el("p", { class: "card", hidden: true }, "No node has registered. ", el("code", {}, "terrace end --scheduler URL"), " starts an end device.");
const more = el("p", { class: "muted", hidden: true });
let now = 0;

/** @type {Table<NodeNow>} */
const table = new Table(
  "Nodes",
  [
    { title: "Node", kind: "name", show: (cell, node) => text(cell, node.node_id) },
    { title: "Tier", show: (cell, node) => text(cell, node.tier) },
    { title: "State", kind: "state", show: state },
    { title: "Do", kind: "do", show: actions },
    { title: "Tasks", kind: "number", show: (cell, node) => text(cell, node.queued_images ? `${node.outstanding} (${number(node.queued_images)} images wait)` : node.outstanding) },
    { title: "Images/s", kind: "number", show: (cell, node) => text(cell, number(node.images_per_s)) },
    { title: "ms/image", kind: "number", show: speed },
    { title: "Budget", kind: "number", show: (cell, node) => text(cell, node.images_per_minute ? `${number(node.images_per_minute)}/min` : "–") },
    { title: "Network", show: network },
    { title: "Trust", show: (cell, node) => text(cell, node.trusted ? "pixels" : "features") },
    { title: "Version", show: (cell, node) => text(cell, node.version) },
    { title: "Last seen", show: (cell, node) => text(cell, node.last_seen === null ? "now" : `${span(now - node.last_seen)} ago`) },
  ],
  (node) => node.node_id,
  (row, node) => {
    attribute(row, "data-testid", "node");
    attribute(row, "data-node", node.node_id);
    attribute(row, "data-health", node.health);
  },
);

/** @param {HTMLElement} cell @param {NodeNow} node */
function network(cell, node) {
  text(cell, node.accuracy === null ? node.network : `${node.network} (${percent(node.accuracy)})`);
  attribute(cell, "title", node.models.join(", "));
}

/** @param {HTMLElement} cell @param {NodeNow} node */
function state(cell, node) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }), el("span", { class: "reason" }));
  const [health, reason] = cell.children;
  attribute(health, "data-health", node.health);
  text(health, node.health);
  text(reason, node.reason);
  attribute(reason, "title", node.reason);
}

/** @param {HTMLElement} cell @param {NodeNow} node */
function speed(cell, node) {
  const lately = node.ms_per_image;
  const ratio = lately === null ? 1 : lately / node.own_ms_per_image;
  text(cell, `${number(lately ?? node.own_ms_per_image)}${lately === null ? "" : ` (${ratio.toFixed(1)}×)`}`);
  attribute(cell, "class", ratio > SLOW ? "number slow" : "number");
  attribute(cell, "title", `${number(node.own_ms_per_image)} ms by its own measurement at its start`);
}

/** @param {HTMLElement} cell @param {NodeNow} node */
function actions(cell, node) {
  if (!caller.operates) return;
  const gone = node.health === "dead" || node.health === "removed";
  const kind = `${node.health === "removed" ? "resume" : node.draining ? "undrain" : gone ? "" : "drain"} ${gone ? "forget" : "remove"}`;
  if (cell.dataset.kind === kind) return;
  const focused = cell.contains(document.activeElement);
  cell.dataset.kind = kind;
  const path = `/v1/devices/${encodeURIComponent(node.node_id)}`;
  /** @type {Record<string, [string, string, () => Promise<unknown>]>} */
  const known = {
    drain: ["Drain", "Give NODE no new tasks, until you undrain it? Those that it has are finished.", () => send("POST", `${path}/drain`)],
    undrain: ["Undrain", "", () => send("DELETE", `${path}/drain`)],
    resume: ["Let in", "", () => send("DELETE", `${path}/drain`)],
    remove: ["Remove", "Remove NODE? Its tasks go to others, and it is kept out until you let it in again.", () => send("DELETE", path)],
    forget: ["Forget", "Strike NODE off the list?", () => send("DELETE", `${path}?forget=true`)],
  };
  const buttons = kind.split(" ").filter(Boolean).map((each) => {
    const [title, question, act] = known[each];
    const change = async () => {
      if (!question || (await confirmed(question.replace("NODE", node.node_id), title))) await act();
    };
    return el("button", { type: "button", "aria-label": `${title} ${node.node_id}`, click: () => attempt(change) }, title);
  });
  replace(cell, ...buttons);
  if (focused) buttons[0].focus();
}

/** @param {FleetSnapshot} fleet */
function show(fleet) {
  now = fleet.at;
  const { first = 0, finer = 0, fallback = 0, first_p50_ms, final_p50_ms } = fleet.figures;
  text(figures.images.value, number(Math.max(first ?? 0, (finer ?? 0) + (fallback ?? 0))));
  text(figures.first.value, milliseconds(first_p50_ms));
  text(figures.final.value, milliseconds(final_p50_ms));
  const shown = fleet.nodes.filter((node) => node.health === "alive").length;
  const well = fleet.nodes.length === fleet.known ? shown : (fleet.figures.alive ?? shown);
  text(figures.alive.value, well === fleet.known ? number(well) : `${number(well)} of ${number(fleet.known)}`);
  text(more, `${number(fleet.nodes.length)} of ${number(fleet.known)} nodes are shown, those that are not well before others.`);
  more.hidden = fleet.nodes.length === fleet.known;
  text(figures.jobs.value, number(fleet.unfinished));
  doubt.hidden = !fleet.doubting;
  empty.hidden = fleet.nodes.length > 0;
  map.update(fleet);
  table.update(fleet.nodes);
  if (!performance.getEntriesByName("fleet").length) performance.mark("fleet");
}

begin(() => {
  main.append(
    el("div", { class: "figures" }, ...Object.values(figures).map((each) => each.element)),
    doubt,
    empty,
    el("div", { class: "card" }, map.element, legend()),
    el("h2", {}, "Nodes"),
    more,
    table.element,
  );
  follow("/v1/fleet/events", { snapshot: show });
});

function legend() {
  const kinds = { alive: "alive", suspect: "suspect", draining: "draining", dead: "dead", removed: "removed" };
  return el("p", { class: "legend" }, ...Object.entries(kinds).map(([health, words]) => el("span", { class: "health", "data-health": health }, words)), el("span", {}, "thicker lines: more images go up"));
}
