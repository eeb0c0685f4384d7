// Which classes a picture is offered, by which keys, and how figures of learning are written. Without the page.

import { words } from "./answers.js";
import { number, percent, size, span } from "./format.js";

/** @typedef {import("./types").Improvement} Improvement */
/** @typedef {import("./types").NodeLearning} NodeLearning */
/** @typedef {import("./types").SeenPicture} SeenPicture */
/** @typedef {{name: string, key: string}} Offer */
/** @typedef {{fine: string[], superclasses: Record<string, string[]>}} Classes */

const DIGITS = "123456789";
const LETTERS = "abcdefghijklmnopqrstuvwxyz";
const KEYS = DIGITS + LETTERS;
/** A command that is at work says so every few seconds. */
const SILENT_S = 120;
/** What networks were compared on, by the beginning of the figures' names. */
const COMPARED = { validation: "labelled pictures", above: "newest pictures" };
const SHOWN = ["pictures", "old", "new", "gained", "lost"];
const FACTS = [...SHOWN, "old_right", "new_right"];

/**
 * The classes that a picture is offered, each with its key. Up to 35 classes always have the same keys. Of more classes,
 * those that the answers suggest have digits, and the others are searched.
 * @param {Classes} classes @param {SeenPicture} picture @returns {Offer[]}
 */
export function offers({ fine, superclasses }, picture) {
  if (fine.length <= KEYS.length) return fine.map((name, index) => ({ name, key: KEYS[index] }));
  const answers = [picture.fine?.label, ...of(superclasses, picture.fine?.coarse_label), ...of(superclasses, picture.coarse?.label)];
  const likely = [...new Set(answers)].filter((name) => name !== undefined && fine.includes(name));
  return likely.slice(0, DIGITS.length).map((name, index) => ({ name: /** @type {string} */ (name), key: DIGITS[index] }));
}

/** @param {Record<string, string[]>} superclasses @param {string | undefined} name */
function of(superclasses, name) {
  return (name !== undefined && Object.hasOwn(superclasses, name) && superclasses[name]) || [];
}

/** Whether letters search a class. @param {Classes} classes */
export function lettersSearch({ fine }) {
  return fine.length > KEYS.length;
}

/** The class that a text means: by its whole name, or as the only one that begins so. @param {string[]} fine @param {string} typed */
export function meant(fine, typed) {
  const wanted = words(typed.trim().toLowerCase());
  if (!wanted) return null;
  const found = fine.filter((name) => words(name.toLowerCase()).startsWith(wanted));
  return found.find((name) => words(name.toLowerCase()) === wanted) ?? (found.length === 1 ? found[0] : null);
}

/** @param {NodeLearning} node */
export function keptWords({ kept }) {
  if (!kept) return "keeps none";
  const head = kept.personal ? "; own head" : "";
  return `${number(kept.differs)} differ, ${number(kept.unsure)} unsure, ${number(kept.sure)} sure${head}`;
}

/** @param {NodeLearning} node */
export function troubleWords({ kept }) {
  return [kept?.reason, kept?.personal_reason].filter(Boolean).join("; ");
}

/** @param {NodeLearning} node */
export function roomWords({ kept }) {
  return kept ? `${size(kept.bytes)} of ${size(kept.size_bytes)}` : "–";
}

/** @param {{audited: number, agreement: number | null}} of */
export function agreementWords({ audited, agreement }) {
  return audited ? `${percent(agreement)} of ${number(audited)}` : "–";
}

/** The state, and how long nothing was heard of what should be under way. @param {Improvement} improvement @param {number} now seconds since 1970 */
export function stateWords({ state, told_at: toldAt }, now) {
  const silent = !toldAt || (state !== "training" && state !== "evaluating") ? 0 : now - Date.parse(toldAt) / 1000;
  return silent < SILENT_S ? state : `${state}, silent for ${span(silent)}`;
}

/** Right answers of the old and the new network, and other figures by their names. @param {Improvement} improvement */
export function figureWords({ figures }) {
  const compared = Object.entries(COMPARED).filter(([of]) => figures[`${of}_pictures`]);
  const known = new Set(Object.keys(COMPARED).flatMap((of) => FACTS.map((fact) => `${of}_${fact}`)));
  const others = Object.entries(figures).filter(([name]) => !known.has(name));
  return [
    ...compared.map(([of, title]) => {
      const [pictures, before, after, gained, lost] = SHOWN.map((fact) => figures[`${of}_${fact}`]);
      return `${title}: ${percent(before)} → ${percent(after)} of ${number(pictures)} (${number(gained)} gained, ${number(lost)} lost)`;
    }),
    ...others.map(([name, value]) => (name === "share" ? `${number(100 * value)} % of the way` : `${words(name)} ${number(value)}`)),
  ].join(" · ");
}
