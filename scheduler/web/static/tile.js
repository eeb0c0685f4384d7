// A source as a tile: its last picture and answer, and how it is. Only a tile in sight has more than its name.

import { UNSURE, words } from "./answers.js";
import { attribute, el, svg, text } from "./dom.js";
import { percent, span } from "./format.js";
import { budgetWords, condition, historyOf, pictureOf, waitingWords } from "./sourceparts.js";

/** @typedef {import("./types").HeardSource} HeardSource */
/** @typedef {import("./types").SeenPicture} SeenPicture */

/** A tile loads another picture at most this often. */
const PAUSE_MS = 2000;
const PIXELS = 320;
const BY = { end: "by the device", edge: "by the edge", cloud: "by the cloud" };

export class Tile {
  /** @param {HeardSource} source @param {boolean} linked to its history */
  constructor(source, linked = true) {
    this.source = source;
    /** What it shows. @type {SeenPicture | null} */
    this.seen = null;
    /** Numbers of the picture that was asked for last, and of the one that is shown. @type {number | null} */
    this.asked = null;
    /** @type {number | null} */
    this.shown = null;
    this.askedAt = -PAUSE_MS;
    this.loads = false;
    /** @type {ReturnType<typeof parts> | null} null while it is out of sight */
    this.parts = null;
    this.device = el("span", { class: "device" });
    const name = [el("span", { class: "name" }, source.source), " ", this.device];
    this.head = linked ? el("a", { class: "head", href: historyOf(source) }, ...name) : el("p", { class: "head" }, ...name);
    this.element = el("li", { class: "tile", "data-testid": "tile", "data-node": source.node, "data-source": source.source }, this.head);
  }

  /** @param {boolean} sight */
  inSight(sight) {
    if (sight === (this.parts !== null)) return;
    if (sight) {
      this.parts = parts();
      this.parts.image.addEventListener("load", () => this.ended(true));
      this.parts.image.addEventListener("error", () => this.ended(false));
      this.element.append(...this.parts.all);
      if (this.asked !== null) this.ask(this.asked); // from the browser's cache
      this.draw();
    } else {
      this.parts = null;
      this.loads = false;
      this.shown = null;
      this.element.replaceChildren(this.head);
    }
  }

  /** @param {HeardSource} source */
  update(source) {
    this.source = source;
    this.draw();
  }

  draw() {
    const { parts, source } = this;
    const now = Date.now() / 1000;
    const how = condition(source, now);
    attribute(this.element, "data-trouble", how.trouble && how.mark);
    text(this.device, [source.node, source.site].filter(Boolean).join(" · "));
    attribute(this.head, "title", `${source.source} on ${source.node}${source.site ? ` in ${source.site}` : ""}`);
    if (!parts) return;
    this.choose();
    const { seen } = this;
    attribute(parts.state, "data-source-state", how.mark);
    text(parts.state, how.word);
    const earlier = this.shown !== null && this.shown !== seen?.sequence;
    text(parts.note, how.reason || (earlier ? "an earlier picture" : ""));
    const sure = seen?.confidence ?? null;
    text(parts.label, seen ? (seen.label === null ? "no answer" : words(seen.label)) : source.heardAt === null ? "nothing seen yet" : "last answer is lost");
    attribute(parts.label, "title", seen?.damaged ?? parts.label.textContent);
    parts.label.classList.toggle("unsure", sure !== null && sure < UNSURE);
    parts.bar.classList.toggle("empty", sure === null);
    attribute(parts.level, "width", (100 * (sure ?? 0)).toFixed(1));
    text(parts.sure, sure === null ? "" : `${percent(sure)} sure`);
    const age = seen?.taken_at ? `${span(now - Date.parse(seen.taken_at) / 1000)} ago` : "";
    const by = seen?.fine ?? seen?.coarse;
    attribute(parts.when, "title", by ? `answered by ${by.node}` : null);
    text(parts.when, [age, seen?.answered_by && BY[seen.answered_by]].filter(Boolean).join(" · "));
    text(parts.waits, waitingWords(source));
    text(parts.budget, [budgetWords(source), source.owner && `of ${source.owner}`].filter(Boolean).join(" · "));
  }

  /** An answer that comes with a picture is shown with that picture, so it may be up to `PAUSE_MS` old. */
  choose() {
    const { last, last_picture } = this.source;
    const may = performance.now() - this.askedAt >= PAUSE_MS && !this.loads;
    if (may || !last?.picture || last.sequence === this.seen?.sequence) this.seen = last;
    const wanted = this.seen?.picture ? this.seen.sequence : last_picture;
    if (wanted === null) this.clear();
    else if (may && wanted !== this.asked) this.ask(wanted);
    const { image, none } = /** @type {ReturnType<typeof parts>} */ (this.parts);
    image.hidden = this.shown === null;
    none.hidden = !image.hidden;
    text(none, this.asked === null ? "no picture sent" : this.loads ? "…" : "picture is deleted");
  }

  /** @param {number} sequence */
  ask(sequence) {
    if (sequence !== this.asked) this.askedAt = performance.now();
    this.asked = sequence;
    this.loads = true;
    /** @type {ReturnType<typeof parts>} */ (this.parts).image.src = pictureOf(this.source, sequence, PIXELS);
  }

  /** @param {boolean} well */
  ended(well) {
    this.loads = false;
    this.shown = well ? this.asked : null;
    if (this.parts) this.draw();
  }

  clear() {
    if (this.asked === null) return;
    this.asked = this.shown = null;
    this.loads = false;
    this.parts?.image.removeAttribute("src");
  }
}

/** What a tile in sight is made of. */
function parts() {
  const image = el("img", { alt: "", decoding: "async", hidden: true });
  const none = el("span", { class: "no-picture" });
  const note = el("span", { class: "note" });
  const state = el("p", { class: "health" });
  const label = el("p", { class: "label" });
  const level = svg("rect", { class: "finer", height: 10, width: 0 });
  const bar = svg("svg", { class: "progress", "aria-hidden": "true", viewBox: "0 0 100 10", preserveAspectRatio: "none" }, level);
  const sure = el("span", { class: "sure" });
  const when = el("p");
  const waits = el("p");
  const budget = el("p");
  const all = [el("div", { class: "shot" }, image, none, note), state, label, el("p", { class: "how-sure" }, bar, sure), when, waits, budget];
  return { image, none, note, state, label, level, bar, sure, when, waits, budget, all };
}
