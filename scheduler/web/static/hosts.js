// Hosts that wait for somebody to start a training run: what they offer, a form, and the run that they have.

import { ApiError, follow, get, root, send } from "./api.js";
import { attribute, confirmed, el, figure, replace, text } from "./dom.js";
import { number, percent } from "./format.js";
import { jobState } from "./jobparts.js";
import { Joining } from "./joining.js";
import { over, stepsBar, waitsFor } from "./runparts.js";
import { atMost, attempt, begin, main } from "./shell.js";

/** @typedef {import("./types").Offer} Offer */
/** @typedef {import("./types").Run} Run */
/** @typedef {import("./types").Limits} Limits */

const PAUSE_MS = 1000;
const TICKS = 1000;

/** @type {Map<string, Card>} by the id of the offer */
const cards = new Map();
const place = el("div", { class: "hosts" });
const none = el(
  "p",
  { class: "card", hidden: true, "data-testid": "no-hosts" },
  "No host waits for a run. On a machine that is to keep the weights: ",
  el("code", {}, `terrace train host --offer mnist-100 --share-data --scheduler ${location.origin}${root}`),
);

/** A slider between limits, with its value beside it. */
class Slider {
  /** @param {string} id @param {string} title @param {boolean} whole for whole numbers; others go by their logarithm */
  constructor(id, title, whole) {
    this.whole = whole;
    this.input = /** @type {HTMLInputElement} */ (el("input", { type: "range", id, "data-testid": title.toLowerCase(), input: () => this.show() }));
    this.output = el("output", { for: id });
    this.element = el("div", { class: "slider" }, el("label", { for: id }, title), this.input, this.output);
    /** @type {Limits} */
    this.limits = { lowest: 1, highest: 1, default: 1 };
  }

  /** @param {Limits} limits */
  set(limits) {
    this.limits = this.whole ? { ...limits, lowest: Math.ceil(limits.lowest), highest: Math.floor(limits.highest) } : limits;
    const { lowest, highest } = this.limits;
    attribute(this.input, "min", this.whole ? lowest : 0);
    attribute(this.input, "max", this.whole ? highest : TICKS);
    attribute(this.input, "step", 1);
    this.input.value = String(this.whole ? Math.round(limits.default) : highest > lowest ? TICKS * (Math.log(limits.default / lowest) / Math.log(highest / lowest)) : 0);
    this.show();
  }

  get value() {
    const at = Number(this.input.value);
    if (this.whole) return at;
    const { lowest, highest } = this.limits;
    // Rounding must not lead over the limits.
    return Math.min(highest, Math.max(lowest, Number((lowest * (highest / lowest) ** (at / TICKS)).toPrecision(3))));
  }

  show() {
    text(this.output, number(this.value));
    attribute(this.input, "aria-valuetext", number(this.value));
  }
}

/** One host. */
class Card {
  /** @param {Offer} offer */
  constructor(offer) {
    this.offer = offer;
    const id = (/** @type {string} */ name) => `${name}-${offer.id}`;
    /** @type {Run | null} */
    this.run = null;
    this.title = el("h2");
    this.network = el("select", { id: id("network"), change: () => this.chosen() });
    this.strategy = el("select", { id: id("strategy") });
    this.rate = new Slider(id("rate"), "Rate", false);
    this.epochs = new Slider(id("epochs"), "Epochs", true);
    this.batch = new Slider(id("batch"), "Batch", true);
    this.startAt = el("input", { id: id("start-at"), type: "number", min: 1, max: offer.workers, placeholder: "at once", "data-testid": "start-at" });
    this.form = el(
      "form",
      { class: "card", submit: (/** @type {Event} */ event) => (event.preventDefault(), void attempt(() => this.host())) },
      this.title,
      el("div", { class: "slider" }, el("label", { for: id("network") }, "Network"), this.network),
      el("div", { class: "slider" }, el("label", { for: id("strategy") }, "Strategy"), this.strategy),
      this.rate.element,
      this.epochs.element,
      this.batch.element,
      el("div", { class: "slider" }, el("label", { for: id("start-at") }, "Start at"), this.startAt, el("span", { class: "muted" }, `of ${number(offer.workers)} workers`)),
      el("p", { class: "buttons" }, el("button", { type: "submit", class: "strong", "data-testid": "host" }, "Host")),
    );
    this.said = el("p", { class: "said", role: "status", "data-testid": "said" });
    this.link = el("a", { "data-testid": "run-link" }, "The page of the run");
    this.state = el("div", { class: "job-head" });
    this.bar = el("div", { class: "bar" });
    this.figures = { loss: figure("loss"), accuracy: figure("accuracy"), workers: figure("workers") };
    this.joining = new Joining();
    this.joining.element.hidden = true;
    this.work = el("button", { type: "button", "data-testid": "work", click: () => attempt(() => this.join()) }, "Work");
    this.stop = el("button", { type: "button", "data-testid": "stop", click: () => attempt(() => this.end()) }, "Stop the run");
    this.ofRun = el(
      "div",
      { hidden: true },
      this.state,
      this.bar,
      el("div", { class: "figures" }, ...Object.values(this.figures).map(({ element }) => element)),
      el("p", { class: "buttons" }, this.work, this.stop, this.link),
      this.joining.element,
    );
    this.element = el("section", { "data-testid": "offer", "data-offer": offer.id }, this.form, el("div", { class: "card" }, el("h3", {}, "Latest run"), this.said, this.ofRun));
    replace(this.network, ...offer.networks.map(({ name }) => el("option", { value: name }, name)));
    replace(this.strategy, ...offer.strategies.map((name) => el("option", { value: name }, name)));
    text(this.title, offer.owner ? `${offer.host}, of ${offer.owner}` : offer.host);
    this.chosen();
  }

  /** The sliders are those of the chosen network. */
  chosen() {
    const network = this.offer.networks.find(({ name }) => name === this.network.value) ?? this.offer.networks[0];
    for (const name of /** @type {const} */ (["rate", "epochs", "batch"])) this[name].set(network[name]);
  }

  async host() {
    const [rate, epochs, batch] = [this.rate, this.epochs, this.batch].map(({ value }) => value);
    const startAt = this.startAt.value === "" ? null : Number(this.startAt.value);
    await send("POST", `/v1/offers/${this.offer.id}/runs`, { network: this.network.value, strategy: this.strategy.value, rate, epochs, batch, start_at: startAt });
    await read();
  }

  async join() {
    if (!this.run) return;
    this.joining.show(this.run);
    if (this.tokens()) await this.joining.invite();
    this.joining.element.hidden = false;
  }

  /** Whether tokens are asked for here. */
  tokens() {
    return this.run?.owner !== null;
  }

  async end() {
    const run = this.run;
    if (run && (await confirmed("Stop this run? Its host ends it with its next report; what it has learned stays there.", "Stop the run", "Let it run"))) await send("DELETE", `/v1/runs/${run.id}`);
  }

  /** @param {Offer} offer */
  async update(offer) {
    this.offer = offer;
    const { latest } = offer;
    const id = latest?.run ?? null;
    if (id !== (this.run?.id ?? null)) {
      this.run = null;
      this.joining.element.hidden = true;
    }
    if (id && !(this.run && over(this.run) && latest?.over)) this.run = await found(id);
    text(this.said, this.words());
    this.ofRun.hidden = this.run === null;
    if (this.run) this.showRun(this.run);
  }

  /** What the host does now. */
  words() {
    const { latest, waiting } = this.offer;
    const queue = waiting.length ? ` ${number(waiting.length)} more ${waiting.length === 1 ? "start waits" : "starts wait"}.` : "";
    if (!latest) return waiting.length ? "The host is told to start." : "No run has been started.";
    if (latest.error) return `It did not work: ${latest.error}.${queue}`;
    const run = this.run;
    if (!run) return latest.over ? `The run ended before the scheduler heard of it.${queue}` : `The host starts, and reads its images.${queue}`;
    if (over(run)) return `The run of ${run.network} with ${run.strategy} is ${run.state}, with an accuracy of ${percent(run.accuracy)}.${queue}`;
    return `${waitsFor(run) || `${run.network} with ${run.strategy}: ${number(run.done)} of ${number(run.steps)} steps`}.${queue}`;
  }

  /** @param {Run} run */
  showRun(run) {
    jobState(this.state, run);
    stepsBar(this.bar, run);
    text(this.figures.loss.value, number(run.loss));
    text(this.figures.accuracy.value, percent(run.accuracy));
    text(this.figures.workers.value, number(run.worker_count));
    attribute(this.link, "href", `${root}/ui/training/${encodeURIComponent(run.id)}`);
    this.work.hidden = over(run) || run.state === "stopping";
    this.stop.hidden = over(run);
    this.stop.disabled = run.state === "stopping";
    if (over(run)) this.joining.element.hidden = true;
  }
}

/** A run that its host may not have told of yet. @param {string} id @returns {Promise<Run | null>} */
async function found(id) {
  try {
    return await get(`/v1/runs/${id}`);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

async function read() {
  /** @type {{offers: Offer[]}} */
  const { offers } = await get("/v1/offers");
  for (const [id, card] of cards) {
    if (offers.some((offer) => offer.id === id)) continue;
    card.element.remove();
    cards.delete(id);
  }
  none.hidden = offers.length > 0;
  for (const offer of offers) {
    let card = cards.get(offer.id);
    if (!card) {
      card = new Card(offer);
      cards.set(offer.id, card);
      place.append(card.element);
    }
    await card.update(offer);
  }
}

begin(async () => {
  main.append(el("p", { class: "muted" }, "A host keeps the weights of a run, and workers compute. A browser does neither: it starts the run on a host, and has the command for a worker."), none, place);
  await read();
  const again = atMost(PAUSE_MS, read);
  follow("/v1/fleet/events", { snapshot: again }, { reopened: again });
});
