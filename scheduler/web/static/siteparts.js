// What a site means to people, on all pages that show one, and the site that an address names.

import { root } from "./api.js";

/** @typedef {import("./types").SiteNow} SiteNow */
/** @typedef {import("./types").NodeNow} NodeNow */
/** @typedef {import("./types").Tier} Tier */

/** Stands for the nodes that belong to no site. */
export const NO_SITE = "";
export const TIERS = /** @type {const} */ (["end", "edge", "cloud"]);

/** Health of a node whose colour and shape stand for that of a site. @type {Record<SiteNow["health"], import("./types").Health>} */
export const MARKS = { ok: "alive", degraded: "suspect", coarse: "suspect", drained: "draining", down: "dead" };

const WORST_FIRST = ["down", "coarse", "degraded", "drained", "ok"];

/** Where the pictures of a site may go. @type {Record<SiteNow["share"], string>} */
export const SHARES = { none: "pictures stay here", cloud: "may use the cloud", sites: "may use other sites" };

const { compare } = new Intl.Collator("en", { numeric: true });

/** Those in trouble before others, then by name. @param {SiteNow} one @param {SiteNow} other */
export function inOrder(one, other) {
  return WORST_FIRST.indexOf(one.health) - WORST_FIRST.indexOf(other.health) || compare(one.site, other.site);
}

/** Names in the order in which people count. */
export const byName = compare;

/** @param {string | null | undefined} site of a node, a job or a source */
export function siteWords(site) {
  return site || "no site";
}

/** @param {Partial<Record<Tier, number>>} counts */
export function total(counts) {
  return TIERS.reduce((sum, tier) => sum + (counts[tier] ?? 0), 0);
}

/** The address of the map of a site. @param {string} site */
export function mapOf(site) {
  return `${root}/ui${fragment(site)}`;
}

/** @param {string} site */
export function fragment(site) {
  return `#site=${encodeURIComponent(site)}`;
}

/** The site in the address of this page: null for all sites, `NO_SITE` for the nodes of none. @returns {string | null} */
export function siteInAddress() {
  return new URLSearchParams(location.hash.slice(1)).get("site");
}
