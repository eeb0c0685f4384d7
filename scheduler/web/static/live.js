// The sources of the fleet, a tile for each: what they see now, and which of them need somebody.

import { UNSURE } from "./answers.js";
import { follow } from "./api.js";
import { attribute, el, replace, text } from "./dom.js";
import { number } from "./format.js";
import { begin, caller, main } from "./shell.js";
import { byName, fragment, NO_SITE, siteInAddress, siteWords } from "./siteparts.js";
import { condition, heard, keyOf } from "./sourceparts.js";
import { Tile } from "./tile.js";
import { whileVisible } from "./visible.js";

/** @typedef {import("./types").HeardSource} HeardSource */
/** @typedef {"all" | "trouble" | "unsure"} Choice */

const TICK_MS = 1000;
const MARGIN = "400px";
/** Not the name of a site. */
const ALL = "*";

/** @type {Record<Choice, string>} */
const CHOICES = { all: "All", trouble: "In trouble", unsure: "Unsure" };

/** @type {HeardSource[]} by node and name, always: a tile stays where it is */
let sources = [];
/** @type {Map<string, Tile>} by node and name */
const tiles = new Map();
/** @type {WeakMap<Element, Tile>} */
const tileOf = new WeakMap();
/** @type {Choice} */
let choice = "all";

const search = el("input", { type: "search", placeholder: "name, owner or class", autocomplete: "off", input: arrange });
const choices = Object.entries(CHOICES).map(([name, title]) => {
  const count = el("span", { class: "count" });
  const choose = () => {
    choice = /** @type {Choice} */ (name);
    arrange();
  };
  return { name, count, button: el("button", { type: "button", "data-testid": `show-${name}`, click: choose }, title, " ", count) };
});
const place = el("select", { change: () => (location.hash = place.value === ALL ? "" : fragment(place.value)) });
const sited = el("label", { hidden: true }, "Site ", place);
const filters = el("div", { class: "filters", hidden: true }, el("div", { class: "buttons", role: "group", "aria-label": "Show" }, ...choices.map(({ button }) => button)), sited, el("label", {}, "Find ", search));
const none = el("p", { class: "card", hidden: true, "data-testid": "none-like-that" }, "No source is like that.");
const empty = el("p", { class: "card", hidden: true, "data-testid": "no-sources" });
const list = el("ul", { class: "tiles", "aria-label": "Sources" });

const sight = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) tileOf.get(target)?.inSight(isIntersecting);
  },
  { rootMargin: MARGIN },
);

/** @param {HeardSource} source */
function unsure({ last }) {
  return last !== null && (last.confidence === null || last.confidence < UNSURE);
}

/** @param {HeardSource} source @param {string} wanted in lower case */
function found({ source, node, site, owner, last }, wanted) {
  return [source, node, site ?? "", owner ?? "", last?.label ?? ""].some((each) => each.toLowerCase().replaceAll("_", " ").includes(wanted));
}

/** Shows the tiles that are chosen, and how many there are. */
function arrange() {
  const now = Date.now() / 1000;
  const wanted = search.value.trim().toLowerCase().replaceAll("_", " ");
  const site = siteInAddress();
  const counts = { all: 0, trouble: 0, unsure: 0 };
  let shown = 0;
  offerSites(site);
  for (const source of sources) {
    const like = { all: true, trouble: condition(source, now).trouble, unsure: unsure(source) };
    const inSite = site === null || site === (source.site ?? NO_SITE);
    counts.all += Number(inSite);
    counts.trouble += Number(inSite && like.trouble);
    counts.unsure += Number(inSite && like.unsure);
    const { element } = /** @type {Tile} */ (tiles.get(keyOf(source)));
    const here = inSite && like[choice] && found(source, wanted);
    // The one with the focus stays, or the keyboard would lose its place.
    element.hidden = !here && !element.contains(document.activeElement);
    shown += Number(!element.hidden);
  }
  for (const { name, count, button } of choices) {
    text(count, number(counts[/** @type {Choice} */ (name)]));
    attribute(button, "aria-pressed", String(name === choice));
    attribute(button, "data-some", name === "trouble" && counts.trouble > 0);
  }
  none.hidden = shown > 0 || sources.length === 0;
  empty.hidden = sources.length > 0;
  filters.hidden = list.hidden = sources.length === 0;
}

/** Lets people choose among the sites of the sources, where there are any. @param {string | null} chosen */
function offerSites(chosen) {
  const names = new Set(sources.map(({ site }) => site ?? NO_SITE));
  const siteless = names.delete(NO_SITE);
  sited.hidden = chosen === null && names.size === 0;
  const offered = [...names].sort(byName);
  if (siteless || chosen === NO_SITE) offered.push(NO_SITE);
  if (chosen && !names.has(chosen)) offered.push(chosen);
  if (place.dataset.offered !== offered.join()) {
    place.dataset.offered = offered.join();
    replace(place, el("option", { value: ALL }, "all"), ...offered.map((each) => el("option", { value: each }, siteWords(each))));
  }
  place.value = chosen ?? ALL;
}

/** @param {HeardSource[]} news */
function arrive(news) {
  sources = news.sort((one, other) => byName(one.node, other.node) || byName(one.source, other.source));
  const kept = new Set(sources.map(keyOf));
  for (const [key, { element }] of tiles) {
    if (kept.has(key)) continue;
    sight.unobserve(element);
    element.remove();
    tiles.delete(key);
  }
  let at = list.firstElementChild;
  for (const source of sources) {
    const key = keyOf(source);
    let tile = tiles.get(key);
    if (!tile) {
      tile = new Tile(source);
      tiles.set(key, tile);
      tileOf.set(tile.element, tile);
      sight.observe(tile.element);
    }
    if (tile.element === at) at = at.nextElementSibling;
    else list.insertBefore(tile.element, at);
    tile.update(source);
  }
  arrange();
}

function sayHow() {
  if (caller.operates) empty.append("No device has a source. ", el("code", {}, "terrace end --scheduler URL --source gate=rtsp://CAMERA"), " starts a device with one.");
  else empty.append("There is no source that you may see. An operator can make you the owner or a reader of one.");
}

begin(() => {
  sayHow();
  main.append(filters, none, empty, list);
  window.addEventListener("hashchange", arrange);
  whileVisible(() => {
    const end = follow("/v1/sources/events", {
      snapshot: (/** @type {import("./types").SourceList} */ now) => arrive(heard(now.sources, Date.now() / 1000)),
    });
    // Ages grow, and a source falls silent, also while nothing comes.
    const timer = window.setInterval(() => {
      for (const tile of tiles.values()) tile.draw();
      arrange();
    }, TICK_MS);
    return () => {
      end();
      window.clearInterval(timer);
    };
  });
});
