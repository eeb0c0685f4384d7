// What left the end devices, in which form, and what attacks on the encoders get back.

import { follow, get, root } from "./api.js";
import { attribute, el, replace, text } from "./dom.js";
import { day, milliseconds, number, percent, size } from "./format.js";
import { attempt, begin, main } from "./shell.js";
import { Table } from "./table.js";

/** @typedef {import("./types").Attack} Attack */
/** @typedef {import("./types").Audit} Audit */
/** @typedef {import("./types").FleetSnapshot} FleetSnapshot */
/** @typedef {import("./types").Job} Job */
/** @typedef {import("./types").NodeNow} NodeNow */

const MOST_JOBS = 50;
const MOST_NAMES = 12;
const SAME = 0.9;
const UNRECOGNISABLE = 0.3;

/** By node id; a node that is not on the device list is missing. @type {Map<string, NodeNow>} */
let nodes = new Map();
/** Newest first. @type {Job[]} */
let jobs = [];
/** @type {Job | null} */
let shown = null;
/** @type {string | null} the id of the job that a person has chosen */
let byHand = null;
let stale = false;
let loading = false;

// The rule.

const seeing = el("dd");
const blind = el("dd");
const rule = el(
  "dl",
  { class: "card rule", "data-testid": "rule" },
  el("div", {}, el("dt", {}, "May see pixels"), seeing),
  el("div", {}, el("dt", {}, "Get features, never pixels"), blind),
);

/** @param {NodeNow[]} some */
function names(some) {
  const few = some.slice(0, MOST_NAMES).map((node) => node.node_id);
  return few.join(", ") + (some.length > few.length ? ` and ${some.length - few.length} more` : "") || "no node";
}

// One job.

const chosen = /** @type {HTMLSelectElement} */ (
  el("select", {
    id: "job",
    change: () => {
      byHand = chosen.value;
      attempt(() => show(chosen.value));
    },
  })
);
const choice = el("div", { class: "buttons tools", hidden: true }, el("label", { for: "job" }, "Job"), chosen);
const nothing = el("p", { class: "card", hidden: true }, "No job is stored yet. For pictures of “Try it”, each card shows the data that left the device.");
const verdict = el("p", { class: "verdict", "data-testid": "verdict" });
const asked = el("p", { class: "muted" });

/** @type {Table<[string, import("./types").SentShare]>} */
const sent = new Table(
  "What went to upstream nodes",
  [
    { title: "Form", kind: "name", show: (cell, [form]) => text(cell, form === "pixels" ? form : `features (${form})`) },
    { title: "Tasks", kind: "number", show: (cell, [, share]) => text(cell, number(share.tasks)) },
    { title: "Sent up", kind: "number", show: (cell, [, share]) => text(cell, size(share.upload_bytes)) },
    { title: "To nodes that encoded", kind: "number", show: (cell, [, share]) => text(cell, share.relay_bytes ? `${size(share.relay_bytes)} (${number(share.relay_tasks)} tasks)` : "–") },
    { title: "Time spent encoding", kind: "number", show: (cell, [, share]) => text(cell, share.encode_ms ? milliseconds(share.encode_ms) : "–") },
  ],
  ([form]) => form,
  (row, [form]) => {
    attribute(row, "data-testid", "sent");
    attribute(row, "data-form", form);
  },
);

/** @type {Table<[string, import("./types").NodeShare]>} */
const answered = new Table(
  "Upstream nodes that answered",
  [
    { title: "Upstream node", kind: "name", show: (cell, [node]) => text(cell, node) },
    { title: "Tier", show: (cell, [, share]) => text(cell, share.tier) },
    { title: "Images answered", kind: "number", show: (cell, [, share]) => text(cell, number(share.fine_images)) },
    { title: "Now", show: (cell, [node]) => text(cell, { true: "trusted: may see pixels", false: "not trusted", undefined: "not on the device list" }[String(nodes.get(node)?.trusted)] ?? "") },
  ],
  ([node]) => node,
);

const facts = el(
  "div",
  { class: "card", hidden: true, "data-testid": "privacy-job" },
  verdict,
  asked,
  sent.element,
  answered.element,
  el("p", { class: "muted" }, "Counted are the answers that came, not attempts that failed or came too late. The rule above holds for all of them."),
);

/** @param {Job} job */
function upstream(job) {
  return Object.entries(job.by_node).filter(([, share]) => share.fine_images > 0);
}

/** What the figures of a job prove, in a sentence. @param {Job} job */
function proven(job) {
  const forms = Object.keys(job.sent);
  const features = forms.some((form) => form !== "pixels");
  if (job.scheme === "end") return "Nothing left the end devices.";
  if (!forms.length) return "No answer came from an upstream node.";
  if (!forms.includes("pixels")) {
    if (Object.values(job.sent).some((share) => share.relay_bytes > 0)) return "Pixels went to trusted edge nodes that encoded them; only features left those nodes.";
    const always = (job.privacy === "conv1" || job.privacy === "bottleneck") && (job.policy.encode_on ?? "end") === "end";
    return always ? "No pixels left the end devices: only features went up." : "No pixels left the trusted tiers: all upstream answers came from features.";
  }
  const unknown = upstream(job).filter(([node]) => !nodes.has(node)).map(([node]) => node);
  if (unknown.length) return `Pixels went up. Whether all nodes were trusted is not known here: ${unknown.slice(0, MOST_NAMES).join(", ")} left the device list.`;
  const untrusted = upstream(job).filter(([node]) => !nodes.get(node)?.trusted).map(([node]) => node);
  if (!untrusted.length) return "No pixels left the trusted tiers: all nodes that answered are trusted.";
  if (features) return "Pixels and features went up. Untrusted nodes get only features, by the rule above.";
  return `Pixels went up, and a node answered that is not trusted now: ${untrusted.slice(0, MOST_NAMES).join(", ")}.`;
}

function draw() {
  facts.hidden = shown === null;
  if (!shown) return;
  const { sent: shares, policy } = shown;
  attribute(facts, "data-job", shown.id);
  text(verdict, (FINAL.has(shown.state) ? "" : "So far: ") + proven(shown));
  const wishes = [`privacy ${shown.privacy ?? "auto"}`, `encoding on ${PLACES[policy.encode_on ?? "end"]} where needed`, `features as ${policy.feature_form ?? "uint8"}`];
  text(asked, `The job asked for: ${wishes.join(", ")}.`);
  sent.element.hidden = !Object.keys(shares).length;
  sent.update(Object.entries(shares));
  const above = upstream(shown);
  answered.element.hidden = !above.length;
  answered.update(above);
}

/** @type {Record<string, string>} */
const PLACES = { end: "the end device", edge: "edge nodes", auto: "the end device or an edge node, whichever is quicker," };

const FINAL = new Set(["completed", "failed", "cancelled"]);

/** @param {string} id */
async function show(id) {
  const job = await get(`/v1/jobs/${encodeURIComponent(id)}`);
  if (chosen.value === id) {
    shown = job;
    draw();
  }
}

/** @param {Job} job */
function started(job) {
  return Object.keys(job.sent).length > 0;
}

async function loadJobs() {
  const newest = (await get(`/v1/jobs?limit=${MOST_JOBS}`)).jobs;
  const before = jobs;
  jobs = newest;
  nothing.hidden = jobs.length > 0;
  choice.hidden = !jobs.length;
  const kept = [shown, ...before].find((job) => job && (byHand === null ? job === shown && started(job) : job.id === byHand));
  const options = kept && !jobs.some((job) => job.id === kept.id) ? [...jobs, kept] : jobs;
  const wanted = kept ?? jobs.find(started) ?? jobs[0];
  replace(chosen, ...options.map((job) => el("option", { value: job.id, selected: job.id === wanted?.id }, `${job.name ?? job.id} · ${job.state} · ${day(job.created_at)}`)));
  if (wanted) await show(wanted.id);
}

/** @param {FleetSnapshot} fleet */
function second(fleet) {
  nodes = new Map(fleet.nodes.map((node) => [node.node_id, node]));
  text(seeing, names(fleet.nodes.filter((node) => node.trusted)));
  text(blind, names(fleet.nodes.filter((node) => !node.trusted)));
  draw();
  const running = shown !== null && !FINAL.has(shown.state);
  if (loading || !(stale || running)) return;
  loading = true;
  stale = false;
  attempt(loadJobs).finally(() => (loading = false));
}

/** @param {import("./types").FleetEvent} event */
function happened(event) {
  if (event.kind === "began" || event.kind === "ended") stale = true;
}

// The audit.

/** @param {number} ssim */
function words(ssim) {
  if (ssim >= SAME) return "the picture itself";
  return ssim >= UNRECOGNISABLE ? "much of the picture" : "vague shapes";
}

/** @typedef {{name: string, form: string, network: string, pixels: boolean, strongest: Attack, recognised: Attack, attacks: Attack[]}} Encoder */

/** The attacks by what they were made on. @param {Audit} audit @returns {Encoder[]} */
function encoders(audit) {
  /** @type {Map<string, Attack[]>} */
  const groups = new Map();
  audit.rows.forEach((row, index) => {
    const key = `${row.encoder} ${row.network} ${row.form}`;
    groups.set(key, [...(groups.get(key) ?? []), { ...row, index }]);
  });
  return [...groups.values()].map((attacks) => ({
    name: attacks[0].encoder,
    form: attacks[0].form,
    network: attacks[0].network,
    pixels: attacks[0].attack === "none",
    strongest: attacks.reduce((most, each) => (each.ssim > most.ssim ? each : most)),
    recognised: attacks.reduce((most, each) => (each.recognised > most.recognised ? each : most)),
    attacks,
  }));
}

/** @param {Encoder} each */
function title(each) {
  return each.pixels ? `pixels for ${each.network}` : `${each.name} of ${each.network}, as ${each.form}`;
}

/** Share that another network still recognises, of how many, with its 95 % interval. @param {Encoder} each */
function recognised(each) {
  const { images, recognised, recognised_low, recognised_high } = each.recognised;
  return `${percent(recognised)} of ${number(images)} (${(100 * recognised_low).toFixed(0)} to ${(100 * recognised_high).toFixed(0)})`;
}

/** Points of accuracy. @param {Encoder} each */
function lost(each) {
  return each.pixels ? "–" : (Math.round(1000 * each.strongest.accuracy_lost) / 10 || 0).toFixed(1);
}

/** @type {Table<Encoder>} */
const audited = new Table(
  "Encoders and what attacks get back",
  [
    { title: "What is sent", kind: "name", show: (cell, each) => text(cell, title(each)) },
    { title: "An attacker gets", show: (cell, each) => text(cell, words(each.strongest.ssim)) },
    { title: "SSIM", kind: "number", show: (cell, each) => text(cell, each.strongest.ssim.toFixed(2)) },
    { title: "Still recognised", kind: "number", show: (cell, each) => text(cell, recognised(each)) },
    { title: "Of the originals", kind: "number", show: (cell, each) => text(cell, percent(each.recognised.recognised_originals)) },
    { title: "Answers right", kind: "number", show: (cell, each) => text(cell, percent(each.strongest.fine_accuracy)) },
    { title: "Points lost", kind: "number", show: (cell, each) => text(cell, lost(each)) },
    { title: "Bytes", kind: "number", show: (cell, each) => text(cell, number(each.strongest.payload_bytes)) },
  ],
  title,
  (row, each) => {
    attribute(row, "data-testid", "audited");
    attribute(row, "data-encoder", each.name);
  },
);

/** @param {string} name @param {string} described */
function strip(name, described) {
  return el("img", { class: "strip", src: `${root}/v1/privacy/audit/${name}.png`, alt: described, loading: "lazy" });
}

/** @param {Attack} attack */
function reconstruction(attack) {
  const caption = `${attack.attack}: SSIM ${attack.ssim.toFixed(2)}, ${percent(attack.recognised)} recognised${attack.counts ? "" : "; does not count"}`;
  return el("figure", { "data-testid": "reconstruction" }, strip(String(attack.index), `What the attack ${attack.attack} made of them`), el("figcaption", {}, caption));
}

/** @param {Encoder} each */
function card(each) {
  const others = each.attacks.filter((attack) => attack !== each.strongest);
  return el(
    "section",
    { class: "card", "data-testid": "encoder", "data-encoder": each.name },
    el("h3", {}, title(each)),
    el("figure", {}, strip("originals", "Pictures that were attacked"), el("figcaption", {}, "the pictures")),
    reconstruction(each.strongest),
    others.length > 0 && el("details", {}, el("summary", {}, others.length === 1 ? "The other attack" : `The ${others.length} other attacks`), ...others.map(reconstruction)),
  );
}

/** @param {Audit} audit */
function results(audit) {
  const all = encoders(audit);
  const whose = { bundled: "the networks that come with Terrace", models: "the model set of this fleet", state: "this fleet" }[audit.source];
  const weak = audit.quick ? " Its attackers were weak ones (--quick): others get more." : "";
  audited.update(all);
  return el(
    "div",
    { "data-testid": "audit" },
    el("p", {}, `The audit of ${whose}, made on ${day(audit.measured_at).slice(0, 10)}. Known attacks were tried on what the encoders send.${weak}`),
    audit.outdated.length > 0 && el("p", { class: "trouble" }, `In this fleet the head of ${audit.outdated.join(", ")} is another one, or missing: the figures are not about it.`),
    audited.element,
    el(
      "p",
      { class: "muted" },
      `Each row shows the attacks that got most. SSIM is 1 for the same picture; below ${UNRECOGNISABLE} reconstructions are called unrecognisable. Still recognised: the share that another network takes for its true class (95 % interval). Answers right: the fine accuracy behind what is sent. An attack does not count where it fails if it could not undo the first convolution (conv1) of the same network either.`,
    ),
    el("div", { class: "encoders" }, ...all.filter((each) => !each.pixels).map(card)),
  );
}

async function showAudit() {
  if ((await get("/v1/info")).audit) {
    audit.append(results(await get("/v1/privacy/audit")));
    return;
  }
  const command = el("code", {}, "terrace privacy audit --all --models SET --out SET/privacy");
  audit.append(el("p", { class: "card" }, "There is no audit of the encoders of this fleet. ", command, " makes one, where SET is its model set."));
}

const audit = el("div");

begin(async () => {
  main.append(
    rule,
    el("h2", {}, "What was sent"),
    choice,
    nothing,
    facts,
    el("h2", {}, "What an attacker gets back"),
    audit,
  );
  await Promise.all([loadJobs(), showAudit()]);
  follow("/v1/fleet/events", { snapshot: second, happened }, { reopened: () => (stale = true) });
});
