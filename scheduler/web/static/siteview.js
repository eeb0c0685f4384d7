// One site on the page of the fleet: how it is, what an operator may do to all of it, its jobs and its events.

import { get, root, send } from "./api.js";
import { attribute, el, figure, hinted, text } from "./dom.js";
import { eventTable } from "./events.js";
import { number, percent } from "./format.js";
import { jobState, shareBar } from "./jobparts.js";
import { showOrders } from "./orders.js";
import { caller } from "./shell.js";
import { fragment, MARKS, SHARES } from "./siteparts.js";
import { Table } from "./table.js";

/** @typedef {import("./types").FleetEvent} FleetEvent */
/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */
/** @typedef {import("./types").JobNow} JobNow */
/** @typedef {import("./types").NodeNow} NodeNow */
/** @typedef {import("./types").SiteNow} SiteNow */

const MINUTES = 60;
const MOST_EVENTS = 100;

export class SiteHead {
  constructor() {
    this.name = el("h2", { tabindex: "-1", "data-testid": "site-name" });
    this.state = el("span", { class: "health" });
    this.reason = el("span", { class: "said" });
    this.share = el("span", { class: "muted" });
    this.pages = el("a", { href: `${root}/ui/live` }, "What its sources see");
    this.orders = el("div", { class: "buttons", "data-testid": "site-orders" });
    this.figures = { mapped: figure("end devices for each edge node"), theta: figure("of its tasks need the cloud (Eq. 5)"), went: figure("of its images went there"), cloud: figure("shared cloud nodes for it") };
    /** Parts that only a site has, but not the nodes without one. */
    this.whole = el("div", {}, el("p", { class: "site-state" }, this.state, " ", this.reason), el("p", { class: "site-state" }, this.share, this.pages), this.orders);
    /** What stands on the page. */
    this.element = el("section", { hidden: true, "data-testid": "one-site" }, el("p", {}, el("a", { href: "#", "data-testid": "all-sites" }, "All sites")), this.name, this.whole);
  }

  /** @param {string | null} name null: all sites @param {SiteNow | undefined} site undefined: nodes without a site @param {NodeNow[]} nodes those of the site itself */
  update(name, site, nodes) {
    this.element.hidden = name === null;
    hinted(this.name, !name ? "Nodes without a site" : name);
    this.whole.hidden = !site;
    for (const { element } of Object.values(this.figures)) element.hidden = !site;
    if (!name || !site) return;
    attribute(this.element, "data-site-health", site.health);
    attribute(this.state, "data-health", MARKS[site.health]);
    text(this.state, site.health);
    text(this.reason, site.reason);
    text(this.share, SHARES[site.share]);
    text(this.figures.mapped.value, number(site.n_map));
    text(this.figures.theta.value, percent(site.theta_cloud));
    text(this.figures.went.value, percent(site.cloud_share));
    text(this.figures.cloud.value, number(site.cloud_nodes));
    attribute(this.pages, "href", `${root}/ui/live${fragment(name)}`);
    if (caller.operates) this.offer(name, nodes);
  }

  /** @param {string} name @param {NodeNow[]} nodes */
  offer(name, nodes) {
    const path = `/v1/sites/${encodeURIComponent(name)}`;
    const some = (/** @type {(node: NodeNow) => boolean} */ like) => nodes.some(like);
    const removed = (/** @type {NodeNow} */ { health }) => health === "removed";
    const gone = (/** @type {NodeNow} */ { health }) => health === "removed" || health === "dead";
    const possible = [
      some((node) => !node.draining && !gone(node)) && "drain",
      some((node) => node.draining || removed(node)) && "resume",
      some((node) => !gone(node)) && "remove",
      some(gone) && "forget",
    ];
    showOrders(
      this.orders,
      name,
      {
        drain: ["Drain", "Give no node of NAME new tasks, until you resume the site? The tasks that they have are finished.", () => send("POST", `${path}/drain`)],
        resume: ["Resume", "", () => send("DELETE", `${path}/drain`)],
        remove: ["Remove", "Remove all nodes of NAME? Their tasks go to others, and they are kept out until you resume the site.", () => send("DELETE", path)],
        forget: ["Forget", "Strike the dead and removed nodes of NAME off the list?", () => send("DELETE", `${path}?forget=true`)],
      },
      /** @type {string[]} */ (possible.filter(Boolean)),
    );
  }
}

/** Jobs and events of a site. */
export class SiteNews {
  constructor() {
    /** @type {Table<JobNow>} */
    this.jobs = new Table(
      "Unfinished jobs",
      [
        { title: "Job", kind: "name", show: jobLink },
        { title: "State", kind: "state", show: jobState },
        { title: "Answered", kind: "bar", show: answered },
        { title: "Images", kind: "number", show: (cell, job) => text(cell, number(job.images)) },
      ],
      (job) => job.id,
      (row, job) => {
        attribute(row, "data-testid", "site-job");
        attribute(row, "data-job", job.id);
      },
    );
    this.events = eventTable();
    /** @type {FleetEvent[]} oldest first */
    this.known = [];
    this.site = "";
    this.noJobs = el("p", { class: "muted" }, "No job of this site is unfinished.");
    this.noEvents = el("p", { class: "muted" }, "Nothing has happened in the last hour.");
    /** What stands on the page. */
    this.element = el("section", { hidden: true }, el("h2", {}, "Unfinished jobs"), this.noJobs, this.jobs.element, el("h2", {}, "Events"), this.noEvents, this.events.element);
  }

  /** @param {JobNow[]} jobs */
  showJobs(jobs) {
    this.jobs.update(jobs);
    this.jobs.element.hidden = jobs.length === 0;
    this.noJobs.hidden = jobs.length > 0;
  }

  /** Reads what happened before the page was opened. @param {string} site */
  async read(site) {
    this.site = site;
    this.known = [];
    this.showEvents();
    const { events } = await get(`/v1/history?minutes=${MINUTES}&site=${encodeURIComponent(site)}`);
    if (this.site === site) this.take(events);
  }

  /** @param {FleetEvent[]} events */
  take(events) {
    const news = events.filter(({ id }) => !this.known.some((each) => each.id === id));
    this.known = [...this.known, ...news].sort((one, other) => one.id - other.id).slice(-MOST_EVENTS);
    this.showEvents();
  }

  showEvents() {
    this.events.update([...this.known].reverse());
    this.events.element.hidden = this.known.length === 0;
    this.noEvents.hidden = this.known.length > 0;
  }
}

/** @param {HTMLElement} cell @param {JobNow} job */
function jobLink(cell, job) {
  if (!cell.firstChild) cell.append(el("a", { href: `${root}/ui/jobs/${encodeURIComponent(job.id)}` }));
  hinted(cell.children[0], job.name || job.id);
}

/** @param {HTMLElement} cell @param {JobNow} job */
function answered(cell, { images, answered_coarse, answered_fine }) {
  shareBar(cell, `${number(answered_coarse)} of ${number(images)} images have a first answer, ${number(answered_fine)} a better one`, images, answered_coarse, answered_fine);
}
