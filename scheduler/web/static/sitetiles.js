// The list of sites, a tile for each, those in trouble first. Only a tile in sight has more than its name.

import { attribute, el, text } from "./dom.js";
import { number } from "./format.js";
import { fragment, inOrder, MARKS, NO_SITE, SHARES, siteWords, TIERS } from "./siteparts.js";

/** @typedef {import("./types").SiteNow} SiteNow */

const MARGIN = "400px";
/** Tiles at a time: a browser takes too long for more. */
const MOST = 1000;

/** Nodes without a site. @typedef {{nodes: number, clouds: number}} Siteless */

class SiteTile {
  /** @param {string} site */
  constructor(site) {
    /** @type {() => void} */
    this.fill = () => undefined;
    /** @type {ReturnType<typeof parts> | null} null while it is out of sight */
    this.parts = null;
    const words = siteWords(site);
    this.head = el("a", { class: "head", href: fragment(site), title: words }, el("span", { class: "name" }, words));
    this.element = el("li", { class: "place", "data-testid": "site", "data-site": site }, this.head);
  }

  /** @param {boolean} sight */
  inSight(sight) {
    if (sight === (this.parts !== null)) return;
    if (sight) {
      this.parts = parts();
      this.element.append(...Object.values(this.parts));
      this.fill();
    } else {
      this.parts = null;
      this.element.replaceChildren(this.head);
    }
  }

  /** @param {SiteNow} site */
  show(site) {
    attribute(this.element, "data-site-health", site.health);
    attribute(this.element, "data-health", MARKS[site.health]);
    this.fill = () => {
      if (!this.parts) return;
      const { state, reason, nodes, rate } = this.parts;
      attribute(state, "data-health", MARKS[site.health]);
      text(state, site.health);
      text(reason, site.reason);
      attribute(reason, "title", site.reason);
      text(nodes, TIERS.filter((tier) => site.nodes[tier]).map((tier) => `${tier} ${number(site.alive[tier] ?? 0)}/${number(site.nodes[tier])}`).join(" · ") || "no nodes");
      attribute(nodes, "title", "nodes alive, of those on the list");
      text(rate, `${number(site.images_per_s)} images/s · ${SHARES[site.share]}`);
    };
    this.fill();
  }

  /** @param {Siteless} siteless */
  showSiteless({ nodes, clouds }) {
    this.fill = () => {
      if (!this.parts) return;
      text(this.parts.nodes, `${number(nodes)} ${nodes === 1 ? "node" : "nodes"}`);
      text(this.parts.rate, clouds ? "cloud nodes that sites share" : "");
    };
    this.fill();
  }
}

/** What a tile in sight is made of. */
function parts() {
  return { state: el("p", { class: "health" }), reason: el("p"), nodes: el("p"), rate: el("p") };
}

export class SiteTiles {
  constructor() {
    /** @type {SiteNow[]} those in trouble first */
    this.sites = [];
    /** @type {Siteless} */
    this.siteless = { nodes: 0, clouds: 0 };
    /** @type {Map<string, SiteTile>} by name */
    this.tiles = new Map();
    /** @type {WeakMap<Element, SiteTile>} */
    this.of = new WeakMap();
    this.list = el("ul", { class: "places", "aria-label": "Sites" });
    this.search = el("input", { type: "search", placeholder: "name of a site", autocomplete: "off", input: () => this.draw() });
    this.count = el("span", { class: "muted", role: "status" });
    this.none = el("p", { class: "card", hidden: true }, "No site has such a name.");
    const filters = el("div", { class: "filters" }, el("label", {}, "Find ", this.search), this.count);
    /** What stands on the page. */
    this.element = el("section", { hidden: true, "data-testid": "sites" }, el("h2", {}, "Sites"), filters, this.none, this.list);
    this.sight = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) this.of.get(target)?.inSight(isIntersecting);
      },
      { rootMargin: MARGIN },
    );
  }

  /** @param {SiteNow[]} sites @param {Siteless} siteless */
  update(sites, siteless) {
    this.sites = [...sites].sort(inOrder);
    this.siteless = siteless;
    this.draw();
  }

  /** Shows the sites whose name is looked for. */
  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.sites.filter(({ site }) => site.includes(wanted));
    const shown = found.slice(0, MOST);
    const others = this.siteless.nodes > 0 && siteWords(NO_SITE).includes(wanted);
    this.arrange([...shown.map(({ site }) => site), ...(others ? [NO_SITE] : [])]);
    for (const site of shown) this.tiles.get(site.site)?.show(site);
    this.tiles.get(NO_SITE)?.showSiteless(this.siteless);
    const cut = `${number(MOST)} of ${number(found.length)} sites are shown, those in trouble before others.`;
    text(this.count, found.length > MOST ? cut : wanted ? `${number(found.length)} of ${number(this.sites.length)} sites` : "");
    this.none.hidden = this.tiles.size > 0;
    this.list.hidden = this.tiles.size === 0;
  }

  /** Makes the tiles of these names the list, in this order. @param {string[]} names */
  arrange(names) {
    const kept = new Set(names);
    for (const [name, { element }] of this.tiles) {
      if (kept.has(name)) continue;
      this.sight.unobserve(element);
      element.remove();
      this.tiles.delete(name);
    }
    const focused = document.activeElement;
    let at = this.list.firstElementChild;
    for (const name of names) {
      const { element } = this.tile(name);
      // One that goes down the list moves by itself, rather than all that it passes.
      if (at && at !== element && at.nextElementSibling === element) {
        this.list.append(at);
        at = element;
      }
      if (element === at) at = at.nextElementSibling;
      else this.list.insertBefore(element, at);
    }
    if (focused !== document.activeElement && focused instanceof HTMLElement && this.list.contains(focused)) focused.focus({ preventScroll: true });
  }

  /** @param {string} name */
  tile(name) {
    let tile = this.tiles.get(name);
    if (!tile) {
      tile = new SiteTile(name);
      this.tiles.set(name, tile);
      this.of.set(tile.element, tile);
      this.sight.observe(tile.element);
    }
    return tile;
  }

  /** @param {string} name */
  focus(name) {
    this.tiles.get(name)?.head.focus();
  }
}
