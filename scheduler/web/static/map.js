// The map of the fleet: cloud above, edge in the middle, end devices below; lines where tasks go up.

import { attribute, svg, text } from "./dom.js";
import { number } from "./format.js";

const TIERS = ["cloud", "edge", "end"];
const WIDE = 960;
const LEFT = 56;
const TOP = 44;
const ROW = 44;
const GAP = 56;
const NAME_PX = 64;
/** Of a letter of a name, and beside each name. */
const LETTER_PX = 7.5;
const BESIDE_PX = 10;
/** Longer names are cut in the middle, where there is no more room. */
const MOST_LETTERS = 24;
const SMALL_PX = 18;
/** A line below the name, for the site of a node that belongs to another one. */
const LINE_PX = 14;
/** With more lines than these none of them moves: that takes a browser too much. */
const MOST_MOVING = 60;
/** Shapes by health, around 0, 0: told apart without colours as well. */
const SHAPES = {
  alive: "M 9 0 A 9 9 0 1 1 -9 0 A 9 9 0 1 1 9 0 Z",
  suspect: "M 0 -11 L 11 9 L -11 9 Z",
  draining: "M 0 -11 L 11 0 L 0 11 L -11 0 Z",
  removed: "M -10 -3 L 10 -3 L 10 3 L -10 3 Z",
  dead: "M -10 -6 L -6 -10 L 0 -4 L 6 -10 L 10 -6 L 4 0 L 10 6 L 6 10 L 0 4 L -6 10 L -10 6 L -4 0 Z",
};

/**
 * `letters`: room for the name. `name`, `site`: baselines of the two texts, above a node that lines reach from below.
 * @typedef {{x: number, y: number, scale: number, letters: number, name: number, site: number}} Place
 */

/** @param {import("./types").NodeNow} node @param {string | null} [site] the one that is shown; null: all */
function elsewhere(node, site = null) {
  return site !== null && (node.site ?? "") !== site;
}

/**
 * Where the nodes stand.
 * @param {import("./types").NodeNow[]} nodes @param {number} width in pixels @param {string | null} [site] the one that is shown; null: all
 * @returns {{places: Map<string, Place>, lines: {tier: string, y: number}[], height: number}}
 */
export function arranged(nodes, width, site = null) {
  const places = new Map();
  const lines = [];
  let y = TOP;
  for (const tier of TIERS) {
    const here = nodes.filter((node) => node.tier === tier);
    lines.push({ tier, y });
    const named = here.length <= Math.floor((width - LEFT) / NAME_PX);
    const longest = Math.min(MOST_LETTERS, Math.max(0, ...here.map((node) => node.node_id.length)));
    const each = named ? Math.max(NAME_PX, longest * LETTER_PX + BESIDE_PX) : SMALL_PX;
    const inLine = Math.max(1, Math.floor((width - LEFT) / each));
    const rows = Math.max(1, Math.ceil(here.length / inLine));
    const line = named && here.some((node) => elsewhere(node, site)) ? LINE_PX : 0;
    const step = named ? ROW + line : SMALL_PX;
    here.forEach((node, index) => {
      const row = Math.floor(index / inLine);
      const inThis = Math.min(inLine, here.length - row * inLine);
      const room = (width - LEFT) / inThis;
      const x = LEFT + room * ((index % inLine) + 0.5);
      const letters = named ? Math.floor((room - BESIDE_PX) / LETTER_PX) : 0;
      places.set(node.node_id, { x, y: y + row * step, scale: named ? 1 : 0.6, letters, ...(tier === "end" ? { name: 26, site: 26 + LINE_PX } : { name: -16 - line, site: -16 }) });
    });
    y += (rows - 1) * step + ROW + line + GAP;
  }
  return { places, lines, height: y - GAP + 4 };
}

/** Thickness of a line in pixels. @param {number} imagesPerS */
export function thickness(imagesPerS) {
  return imagesPerS > 0 ? Math.min(9, 1.5 + Math.log2(1 + imagesPerS) / 1.6) : 1;
}

/** The head of a line. @param {string} kind */
function arrow(kind) {
  const size = { markerWidth: 14, markerHeight: 14, refX: 4, refY: 7, orient: "auto", markerUnits: "userSpaceOnUse" };
  return svg("marker", { id: `arrow-${kind}`, class: kind, ...size }, svg("path", { d: "M 0 0 L 14 7 L 0 14 Z" }));
}

export class FleetMap {
  constructor() {
    this.links = svg("g", { class: "links" });
    this.nodes = svg("g", { class: "nodes" });
    this.tiers = svg("g", { class: "tiers" });
    const arrows = svg("defs", {}, ...["flows", "idle"].map(arrow));
    this.element = svg("svg", { class: "map", role: "img", "aria-label": "Map of the fleet" }, arrows, this.tiers, this.links, this.nodes);
    /** @type {Map<string, SVGGElement>} */
    this.byNode = new Map();
    /** @type {Map<string, SVGPathElement>} */
    this.byLink = new Map();
    this.layout = "";
    /** @type {ReturnType<typeof arranged>} */
    this.arrangement = arranged([], WIDE);
  }

  /** @param {import("./types").FleetSnapshot} fleet */
  update(fleet) {
    const width = Math.min(WIDE, Math.max(320, this.element.clientWidth));
    const layout = `${width} ${fleet.site} ${fleet.nodes.map((node) => `${node.node_id}/${node.site}`).join(" ")}`;
    const moved = layout !== this.layout;
    if (moved) {
      this.layout = layout;
      this.arrangement = arranged(fleet.nodes, width, fleet.site);
      attribute(this.element, "viewBox", `0 0 ${width} ${this.arrangement.height}`);
      this.tiers.replaceChildren(
        ...this.arrangement.lines.map(({ tier, y }) => svg("text", { x: 0, y: y + 5 }, tier)),
      );
    }
    const bad = fleet.nodes.filter((node) => node.health !== "alive").map((node) => `${node.node_id} is ${node.health}`);
    attribute(
      this.element,
      "aria-label",
      `Map of ${fleet.site ? `the site ${fleet.site}` : "the fleet"}: ${fleet.nodes.length} nodes; ${bad.slice(0, 5).join(", ") || "all are alive"}. The table below says the same.`,
    );
    this.drawNodes(fleet, moved);
    this.drawLinks(fleet, moved);
  }

  /** @param {import("./types").FleetSnapshot} fleet @param {boolean} moved */
  drawNodes(fleet, moved) {
    const present = new Set(fleet.nodes.map((node) => node.node_id));
    for (const [id, group] of this.byNode) {
      if (!present.has(id)) {
        group.remove();
        this.byNode.delete(id);
      }
    }
    for (const node of fleet.nodes) {
      let group = this.byNode.get(node.node_id);
      const isNew = !group;
      if (!group) {
        group = svg("g", { "data-testid": "map-node", "data-node": node.node_id }, svg("path"), svg("title"), svg("text"), svg("text", { class: "elsewhere" }));
        this.byNode.set(node.node_id, group);
        this.nodes.append(group);
      }
      const [shape, title, name, belongs] = group.children;
      const site = elsewhere(node, fleet.site) ? (node.site ?? "shared") : "";
      if (moved || isNew) {
        const place = /** @type {Place} */ (this.arrangement.places.get(node.node_id));
        attribute(group, "transform", `translate(${place.x.toFixed(1)} ${place.y}) scale(${place.scale})`);
        attribute(name, "y", place.name);
        attribute(belongs, "y", place.site);
        text(name, place.letters ? shortened(node.node_id, place.letters) : "");
        text(belongs, place.letters ? shortened(site, place.letters) : "");
        attribute(group, "data-elsewhere", site || null);
      }
      attribute(group, "data-health", node.health);
      attribute(group, "class", node.outstanding ? "busy" : null);
      attribute(shape, "d", SHAPES[node.health]);
      text(title, `${node.node_id}${site && ` (${site})`}: ${node.health}, ${number(node.images_per_s)} images/s. ${node.reason}`);
    }
  }

  /** @param {import("./types").FleetSnapshot} fleet @param {boolean} moved */
  drawLinks(fleet, moved) {
    const present = new Set();
    for (const link of fleet.links) {
      const from = this.arrangement.places.get(link.end);
      const to = this.arrangement.places.get(link.upper);
      if (!from || !to) continue;
      const key = `${link.end} ${link.upper}`;
      present.add(key);
      let path = this.byLink.get(key);
      const isNew = !path;
      if (!path) {
        path = svg("path");
        this.byLink.set(key, path);
        this.links.append(path);
      }
      if (moved || isNew) {
        const middle = (from.y + to.y) / 2;
        attribute(path, "d", `M ${from.x} ${from.y - 12} C ${from.x} ${middle} ${to.x} ${middle} ${to.x} ${to.y + 20 * to.scale}`);
      }
      attribute(path, "class", link.images_per_s > 0 ? "flows" : "idle");
      attribute(path, "stroke-width", thickness(link.images_per_s).toFixed(1));
    }
    this.element.classList.toggle("calm", present.size > MOST_MOVING);
    for (const [key, path] of this.byLink) {
      if (!present.has(key)) {
        path.remove();
        this.byLink.delete(key);
      }
    }
  }
}

/** A name, cut in the middle where it is too long: nodes of one machine differ at the end. @param {string} name @param {number} most letters */
export function shortened(name, most) {
  if (name.length <= most) return name;
  const kept = Math.max(1, most - 1);
  return `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(name.length - Math.floor(kept / 2))}`;
}
