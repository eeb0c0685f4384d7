// Pictures of one's own through the fleet: each card shows the first answer when it is there, and the finer one after it.

import { UNSURE, words } from "./answers.js";
import { get, request } from "./api.js";
import { attribute, el, replace, text } from "./dom.js";
import { milliseconds, percent, size } from "./format.js";
import { attempt, begin, caller, main, tell } from "./shell.js";

/** @typedef {import("./types").Results} Results */
/** @typedef {import("./types").ImageResult} ImageResult */
/** @typedef {import("./types").Sent} Sent */
/** @typedef {{file: File, card: Card}} Item */

const MOST_PICTURES = 1000;
const ALONE = 12;
const TOGETHER = 8;
/** Requests at a time: a browser has six connections, and the event stream may need one. */
const AT_ONCE = 4;
const SAMPLES = 6;

class Card {
  /** @param {File} file */
  constructor(file) {
    this.url = URL.createObjectURL(file);
    const picture = el("img", { src: this.url, alt: "", decoding: "async", error: () => picture.replaceWith(el("span", { class: "no-picture" }, "no preview")) });
    this.label = el("strong", { class: "label" }, "…");
    this.about = el("span", { class: "muted" }, "waits");
    this.before = el("span", { class: "muted before" });
    this.sent = el("span", { class: "muted" });
    this.element = el(
      "li",
      { class: "picture", "data-testid": "card", "data-name": file.name },
      picture,
      el("div", { class: "answers" }, el("span", { class: "name", title: file.name }, file.name), this.label, this.about, this.before, this.sent),
    );
  }

  /** @param {import("./types").Answer} answer */
  shows(answer) {
    text(this.label, words(answer.label));
    this.element.classList.toggle("unsure", answer.confidence < UNSURE);
  }

  /** @param {ImageResult} result */
  first(result) {
    const { coarse } = result;
    if (!coarse) return;
    attribute(this.element, "data-coarse", coarse.label);
    this.shows(coarse);
    text(this.about, `${percent(coarse.confidence)} sure · end device ${coarse.node} · ${milliseconds(coarse.ms)}`);
  }

  /** @param {ImageResult} result @param {Sent[]} sent @param {number} together pictures of the request */
  finer(result, sent, together) {
    this.first(result);
    const { coarse, fine } = result;
    if (fine) {
      attribute(this.element, "data-fine", fine.label);
      this.shows(fine);
      text(this.about, `${percent(fine.confidence)} sure · ${fine.tier} node ${fine.node} · ${milliseconds(fine.ms)}`);
      if (coarse) text(this.before, `first: ${words(coarse.label)} · ${coarse.node} · ${milliseconds(coarse.ms)}`);
      text(this.sent, `left the device: ${left(sent, together)}`);
    } else {
      text(this.before, result.not_escalated ? "The first answer was sure, so it stands." : `The first answer stands${result.fallback ? `: ${result.fallback}` : "."}`);
      if (result.not_escalated) text(this.sent, "left the device: nothing");
    }
    this.element.classList.add("done");
  }

  /** @param {string} why */
  failed(why) {
    this.element.classList.add("done", "failed");
    text(this.label, "no answer");
    text(this.about, why);
  }
}

/** @param {Sent[]} sent of the request that the picture was in @param {number} together pictures of it */
function left(sent, together) {
  if (!sent.length) return "unknown";
  const all = together > 1 ? ` for the ${together} pictures that went together` : "";
  return sent.map(({ form, upload_bytes }) => `${form === "pixels" ? "pixels" : `features (${form}), no pixels`}, ${size(upload_bytes)}${all}`).join("; ");
}

/** Where the pictures are answered; "" for anywhere. */
const site = el("select");
const sited = el("label", { hidden: true }, "Site ", site);
const cards = el("ul", { class: "pictures" });
const summary = el("p", { role: "status", "aria-live": "polite", class: "muted" });
let given = 0;
let answered = 0;
/** @type {Item[][]} */
let queue = [];
let running = 0;

/** @param {File[]} files */
function add(files) {
  const room = MOST_PICTURES - given;
  if (files.length > room) tell(`This page shows ${MOST_PICTURES} pictures at a time. Clear it, or submit a job.`);
  const items = files.slice(0, Math.max(0, room)).map((file) => ({ file, card: new Card(file) }));
  given += items.length;
  cards.prepend(...items.map(({ card }) => card.element));
  const each = items.length > ALONE ? TOGETHER : 1;
  for (let at = 0; at < items.length; at += each) queue.push(items.slice(at, at + each));
  say();
  work();
}

function work() {
  while (running < AT_ONCE && queue.length) {
    const items = /** @type {Item[]} */ (queue.shift());
    running += 1;
    classify(items).finally(() => {
      running -= 1;
      work();
    });
  }
}

/** @param {Item[]} items */
async function classify(items) {
  const form = new FormData();
  for (const { file } of items) form.append("images", file, file.name || "picture");
  for (const { card } of items) text(card.about, "on its way");
  const open = new Set(items);
  const settle = (/** @type {Item} */ item, /** @type {() => void} */ how) => {
    if (!open.delete(item)) return;
    how();
    answered += 1;
  };
  try {
    const where = site.value && `&site=${encodeURIComponent(site.value)}`;
    const response = await request(`/v1/classify?on_bad_input=skip${where}`, { method: "POST", body: form });
    for await (const line of lines(response)) {
      const told = /** @type {Results & {error?: string}} */ (JSON.parse(line));
      if (told.event === "error") throw new Error(told.error);
      for (const result of told.results ?? []) {
        const item = items[result.index];
        if (told.event === "coarse" && !result.error) item.card.first(result);
        else if (result.error) settle(item, () => item.card.failed(result.error ?? ""));
        else settle(item, () => item.card.finer(result, told.sent, items.length));
      }
      say();
    }
    // A scheme without upper tiers ends with the first answers.
    for (const item of open) settle(item, () => item.card.element.classList.add("done"));
  } catch (error) {
    for (const item of open) settle(item, () => item.card.failed(error instanceof Error ? error.message : String(error)));
  }
  say();
}

/** @param {Response} response */
async function* lines(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const whole = rest.split("\n");
    rest = /** @type {string} */ (whole.pop());
    yield* whole.filter((line) => line);
  }
}

function say() {
  const failed = cards.querySelectorAll(".failed").length;
  text(summary, given ? `${answered} of ${given} pictures answered${failed ? `, ${failed} of them with an error` : ""}.` : "");
  clear.hidden = given === 0;
}

const clear = el("button", {
  type: "button",
  hidden: true,
  click: () => {
    for (const image of cards.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    cards.replaceChildren();
    queue = [];
    given = answered = 0;
    say();
  },
}, "Clear");

function uploads() {
  const input = el("input", {
    type: "file",
    multiple: true,
    accept: "image/*,.heic,.avif,.tif,.tiff",
    id: "upload",
    "data-testid": "upload",
    change: () => {
      add([...(input.files ?? [])]);
      input.value = "";
    },
  });
  const area = el(
    "div",
    {
      class: "card drop",
      dragover: (/** @type {DragEvent} */ event) => {
        event.preventDefault();
        area.classList.add("over");
      },
      dragleave: () => area.classList.remove("over"),
      drop: (/** @type {DragEvent} */ event) => {
        event.preventDefault();
        area.classList.remove("over");
        add([...(event.dataTransfer?.files ?? [])]);
      },
    },
    el("label", { for: "upload" }, "Drop pictures here, or choose them"),
    input,
  );
  return { area, input };
}

/** Takes a picture with the browser's camera. */
async function photograph() {
  const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  const video = el("video", { autoplay: true, playsinline: true, muted: true });
  video.srcObject = stream;
  const dialog = el("dialog", { class: "camera", "aria-label": "Camera", "data-testid": "camera" });
  const end = () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  };
  const take = () => {
    const canvas = el("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d")?.drawImage(video, 0, 0);
    canvas.toBlob((blob) => {
      if (blob) add([new File([blob], `camera-${given + 1}.jpg`, { type: "image/jpeg" })]);
      dialog.close();
    }, "image/jpeg", 0.92);
  };
  dialog.addEventListener("close", end);
  replace(
    dialog,
    video,
    el("div", { class: "buttons" }, el("button", { type: "button", class: "strong", click: take }, "Take the picture"), el("button", { type: "button", click: () => dialog.close() }, "Cancel")),
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {number} samples how many there are */
async function chooseSamples(samples) {
  const chosen = Array.from({ length: SAMPLES }, () => Math.floor(Math.random() * samples));
  const files = await Promise.all(
    chosen.map(async (index) => {
      const response = await request(`/v1/samples/${index}`);
      return new File([await response.blob()], `${response.headers.get("Terrace-Sample") ?? index}.png`, { type: "image/png" });
    }),
  );
  add(files);
}

begin(async () => {
  const [info, { sites }] = await Promise.all([get("/v1/info"), get("/v1/sites")]);
  if (!caller.sites.length) site.append(el("option", { value: "" }, "any"));
  site.append(.../** @type {import("./types").SiteNow[]} */ (sites).map((each) => el("option", { value: each.site }, each.site)));
  sited.hidden = sites.length === 0;
  const { coarse, fine } = info.hierarchy;
  const { area, input } = uploads();
  const others = el("div", { class: "buttons" });
  if (navigator.mediaDevices) others.append(el("button", { type: "button", click: () => attempt(photograph) }, "Use the camera"));
  if (info.samples) others.append(el("button", { type: "button", click: () => attempt(() => chooseSamples(info.samples)) }, "Choose samples"));
  others.append(clear);
  area.append(sited, others);
  const flat = String(coarse) === String(fine);
  const classes = flat ? `${fine.length} classes` : `${coarse.length} superclasses first, then ${fine.length} classes`;
  main.append(
    el("p", { class: "muted" }, `The end device answers at once, an edge server or the cloud a little later: ${classes}. Nothing is stored.`),
    area,
    summary,
    cards,
  );
  document.addEventListener("paste", (event) => add([...(event.clipboardData?.files ?? [])]));
  input.focus({ preventScroll: true });
});
