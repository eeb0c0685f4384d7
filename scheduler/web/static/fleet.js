// The fleet as it is now: figures, map, table, and what an operator may do to a node. In a fleet with sites the page
// begins with a list of them, and shows the map of the one in its address.

import { ApiError, follow, get, send } from "./api.js";
import { attribute, el, figure, hinted, text } from "./dom.js";
import { milliseconds, number, percent, span } from "./format.js";
import { FleetMap } from "./map.js";
import { showOrders } from "./orders.js";
import { attempt, begin, caller, main } from "./shell.js";
import { fragment, NO_SITE, siteInAddress, siteWords, total } from "./siteparts.js";
import { SiteTiles } from "./sitetiles.js";
import { SiteHead, SiteNews } from "./siteview.js";
import { Table } from "./table.js";

/** @typedef {import("./types").FleetEvent} FleetEvent */
/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */
/** @typedef {import("./types").NodeNow} NodeNow */

const SLOW = 1.5;

const figures = {
  images: figure("images a second"),
  first: figure("first answer, median"),
  final: figure("answer that stands, median"),
  alive: figure("nodes alive"),
  jobs: figure("unfinished jobs"),
  planned: figure("of the tasks planned for the cloud (Eq. 5)"),
  cloud: figure("of the images went to the cloud"),
};

const map = new FleetMap();
const doubt = el("p", { class: "trouble", hidden: true }, "No node is heard. The scheduler looks for the fault in itself or in its network first.");
const empty = el("p", { class: "card", hidden: true }, "No node has registered. ", el("code", {}, "terrace end --scheduler URL"), " starts an end device.");
const more = el("p", { class: "muted", hidden: true });
const sites = new SiteTiles();
const head = new SiteHead();
const news = new SiteNews();
const unknown = el("p", { class: "card", hidden: true, "data-testid": "no-site" });
const hollow = el("span", { hidden: true }, "hollow: of another site, or shared");
const chart = el("div", { class: "card" }, map.element, legend());
let now = 0;
/** The site that is shown: null for all, `NO_SITE` for the nodes of none. @type {string | null} */
let shown = null;
/** Puts the focus where somebody who followed a link goes on reading. @type {(() => void) | null} */
let focus = null;

/** @type {Table<NodeNow>} */
const table = new Table(
  "Nodes",
  [
    { title: "Node", kind: "name", show: (cell, node) => hinted(cell, node.node_id) },
    { title: "Tier", show: (cell, node) => text(cell, node.tier) },
    { title: "Site", kind: "site", show: place },
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
function place(cell, { site }) {
  if (!cell.firstChild) cell.append(el("a"));
  const [anchor] = cell.children;
  attribute(anchor, "href", fragment(site ?? NO_SITE));
  hinted(anchor, siteWords(site));
}

/** @param {HTMLElement} cell @param {NodeNow} node */
function network(cell, node) {
  text(cell, node.accuracy === null ? node.network : `${node.network} (${percent(node.accuracy)})`);
  const files = node.digests ?? [];
  attribute(cell, "title", [node.models.join(", "), files.length > 0 && `sha256 ${files.join(", ")}`].filter(Boolean).join("; "));
}

/** @param {HTMLElement} cell @param {NodeNow} node */
function state(cell, node) {
  if (!cell.firstChild) cell.append(el("span", { class: "health" }), el("span", { class: "reason" }));
  const [health, reason] = cell.children;
  attribute(health, "data-health", node.health);
  text(health, node.health);
  hinted(reason, node.reason);
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
  const path = `/v1/devices/${encodeURIComponent(node.node_id)}`;
  showOrders(
    cell,
    node.node_id,
    {
      drain: ["Drain", "Give NAME no new tasks, until you undrain it? Those that it has are finished.", () => send("POST", `${path}/drain`)],
      undrain: ["Undrain", "", () => send("DELETE", `${path}/drain`)],
      resume: ["Let in", "", () => send("DELETE", `${path}/drain`)],
      remove: ["Remove", "Remove NAME? Its tasks go to others, and it is kept out until you let it in again.", () => send("DELETE", path)],
      forget: ["Forget", "Strike NAME off the list?", () => send("DELETE", `${path}?forget=true`)],
    },
    [...(node.health === "removed" ? ["resume"] : node.draining ? ["undrain"] : gone ? [] : ["drain"]), gone ? "forget" : "remove"],
  );
}

/** @param {FleetSnapshot} fleet */
function show(fleet) {
  now = fleet.at;
  const sited = fleet.sites.length > 0;
  const one = sited ? shown : null;
  const own = one === null ? fleet.nodes : fleet.nodes.filter((node) => (node.site ?? NO_SITE) === one);
  const nodes = one === NO_SITE ? own : fleet.nodes;
  const site = fleet.sites.find((each) => each.site === one);
  const known = site ? total(site.nodes) : one === NO_SITE ? siteless(fleet).nodes : fleet.known;
  showFigures(fleet, site, own, known);
  // Latencies are those of the whole fleet; nodes without a site are not a place that works on its own.
  figures.first.element.hidden = figures.final.element.hidden = one !== null;
  figures.images.element.hidden = figures.jobs.element.hidden = one === NO_SITE;
  text(more, `${number(own.length)} of ${number(known)} nodes are shown, those that are not well before others.`);
  more.hidden = own.length >= known;
  doubt.hidden = !fleet.doubting;
  empty.hidden = nodes.length > 0 || one !== null;
  sites.element.hidden = !sited || one !== null;
  if (sited) sites.update(fleet.sites, siteless(fleet));
  news.element.hidden = !site;
  head.update(one, site, own);
  if (site) news.showJobs(fleet.jobs);
  chart.hidden = sited && one === null;
  hollow.hidden = !site;
  if (!chart.hidden) map.update({ ...fleet, nodes, site: one });
  table.element.toggleAttribute("data-sited", sited);
  table.update(nodes);
  focus?.();
  focus = null;
  if (!performance.getEntriesByName("fleet").length) performance.mark("fleet");
}

/** @param {FleetSnapshot} fleet @param {import("./types").SiteNow | undefined} site @param {NodeNow[]} own @param {number} known */
function showFigures(fleet, site, own, known) {
  const { first = 0, finer = 0, fallback = 0, first_p50_ms, final_p50_ms } = fleet.figures;
  text(figures.images.value, number(site ? site.images_per_s : Math.max(first ?? 0, (finer ?? 0) + (fallback ?? 0))));
  text(figures.first.value, milliseconds(first_p50_ms));
  text(figures.final.value, milliseconds(final_p50_ms));
  const alive = own.filter((node) => node.health === "alive").length;
  const well = site ? total(site.alive) : own.length === known ? alive : (fleet.figures.alive ?? alive);
  text(figures.alive.value, well === known ? number(well) : `${number(well)} of ${number(known)}`);
  figures.planned.element.hidden = fleet.theta_cloud === null;
  figures.cloud.element.hidden = fleet.cloud_share === null;
  text(figures.planned.value, percent(fleet.theta_cloud));
  text(figures.cloud.value, percent(fleet.cloud_share));
  text(figures.jobs.value, number(site ? fleet.jobs.length : fleet.unfinished));
}

/** Nodes that belong to no site. @param {FleetSnapshot} fleet */
function siteless(fleet) {
  const nodes = fleet.known - fleet.sites.reduce((sum, each) => sum + total(each.nodes), 0);
  const clouds = fleet.nodes.filter((node) => node.site === null && node.tier === "cloud").length;
  return { nodes: Math.max(0, nodes), clouds };
}

/** Ends what follows the fleet now. */
let end = () => {};
let turns = 0;

/** Shows the site in the address, and follows it; the whole fleet, while there is no such site. */
async function open() {
  turns += 1;
  const turn = turns;
  end();
  const wanted = siteInAddress();
  const query = wanted ? `?site=${encodeURIComponent(wanted)}` : "";
  const found = await exists(query);
  if (turn !== turns) return;
  shown = found ? wanted : null;
  text(unknown, `There is no site ${wanted} now that you may see.`);
  unknown.hidden = found;
  document.title = `${found && wanted ? `${wanted} · ` : ""}Fleet · Terrace`;
  const here = (/** @type {FleetSnapshot} */ { sites: all }) => !wanted || all.some(({ site }) => site === wanted);
  const read = async () => (found && wanted ? news.read(wanted) : undefined);
  // A scheduler that begins again may not know the site yet: it refuses the stream.
  const check = async () => {
    if (found && !(await exists(query)) && turn === turns) await open();
  };
  end = follow(
    `/v1/fleet/events${found ? query : ""}`,
    {
      // A site comes with its first node, and goes once the last one is forgotten.
      snapshot: (/** @type {FleetSnapshot} */ fleet) => (here(fleet) === found ? show(fleet) : attempt(open)),
      happened: (/** @type {FleetEvent} */ event) => news.take([event]),
    },
    {
      connected: (well) => void (well || attempt(check)),
      reopened: () => attempt(read),
    },
  );
  await read();
}

/** Asks whether there is the site of a query. @param {string} query "" for all sites */
async function exists(query) {
  try {
    if (query) await get(`/v1/fleet${query}`);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return ![400, 403, 404].includes(error.status);
  }
  return true;
}

/** Follows a link to another site, or the way back. */
async function turned() {
  const left = shown;
  focus = () => (shown === null ? left !== null && sites.focus(left) : head.name.focus());
  window.scrollTo(0, 0);
  await open();
}

begin(async () => {
  main.append(
    unknown,
    head.element,
    el("div", { class: "figures" }, ...[...Object.values(figures), ...Object.values(head.figures)].map((each) => each.element)),
    doubt,
    empty,
    sites.element,
    chart,
    el("h2", {}, "Nodes"),
    more,
    table.element,
    news.element,
  );
  window.addEventListener("hashchange", () => attempt(turned));
  await open();
});

function legend() {
  const kinds = { alive: "alive", suspect: "suspect", draining: "draining", dead: "dead", removed: "removed" };
  return el("p", { class: "legend" }, ...Object.entries(kinds).map(([health, words]) => el("span", { class: "health", "data-health": health }, words)), el("span", {}, "thicker lines: more images go up"), hollow);
}
