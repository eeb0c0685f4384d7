// Releases: the networks that answer now, the trial of new ones, and what became of earlier changes.

import { follow, get, send } from "./api.js";
import { attribute, el, figure, hinted, replace, text } from "./dom.js";
import { day, number, percent, size, span } from "./format.js";
import { shareBar } from "./jobparts.js";
import { showOrders } from "./orders.js";
import { accuracyWords, askTrial, digest, exactly, guardTable, KINDS, path, releaseState, short } from "./releaseparts.js";
import { atMost, begin, caller, main } from "./shell.js";
import { byName, TIERS } from "./siteparts.js";
import { Table } from "./table.js";

/** @typedef {import("./types").ReleaseList} ReleaseList */
/** @typedef {import("./types").ReleaseNetwork} ReleaseNetwork */
/** @typedef {import("./types").ReleaseNow} ReleaseNow */
/** @typedef {import("./types").Rollout} Rollout */
/** @typedef {import("./types").TroubleNow & {release: string}} Trouble */
/** @typedef {ReleaseNetwork & {change: string}} ComparedNetwork */

const PAUSE_MS = 2000;

/** @type {ReleaseList} */
let known = { in_force: "", previous: null, rollout: null, releases: [], history: [] };

const figures = {
  force: figure("answers now"),
  nodes: figure("nodes hold it"),
  jobs: figure("unfinished jobs in it"),
  troubles: figure("nodes in trouble"),
};

const title = el("h2", { "data-testid": "change" });
const state = el("div", { class: "job-head" });
const bar = el("div", { class: "bar" });
const counts = el("p", { class: "counts", "data-testid": "counts" });
const reason = el("p", { class: "said", "data-testid": "reason" });
const changeOrders = el("p", { class: "buttons", "data-testid": "change-orders" });
const devices = el("p", { class: "said" });
const someDevices = el("details", {}, el("summary", {}, "Its end devices"), devices);
const guards = guardTable();
const inWords = el("div", { class: "said", "data-testid": "in-words" });
const words = el("details", {}, el("summary", {}, "The figures in words"), inWords);
const change = el("section", { hidden: true, class: "card", "data-testid": "rollout" }, title, state, bar, counts, reason, guards.element, changeOrders, words, someDevices);
const none = el("p", { class: "card", hidden: true, "data-testid": "no-releases" }, "There is no release yet. ", el("code", {}, "terrace models release create"), " makes one.");

/** @type {Table<ReleaseNow>} */
const releases = new Table(
  "Releases",
  [
    { title: "Release", kind: "name", show: link },
    { title: "State", kind: "state", show: (cell, each) => releaseState(cell, each) },
    { title: "Do", kind: "do", show: orders },
    { title: "Nodes", kind: "number", show: (cell, each) => text(cell, number(each.nodes)) },
    { title: "Jobs", kind: "number", show: (cell, each) => text(cell, number(each.jobs)) },
    { title: "Networks", kind: "why", show: (cell, each) => hinted(cell, inOrder(each.networks).map(({ tier, name, sha256 }) => `${tier} ${name} ${short(sha256)}`).join(", ")) },
    { title: "Classes", kind: "number", show: (cell, each) => text(cell, number(each.classes)) },
    { title: "Made", kind: "number", show: (cell, each) => text(cell, day(each.created_at)) },
    { title: "By", kind: "answer", show: (cell, each) => hinted(cell, each.created_by || each.origin) },
  ],
  (each) => each.release,
  (row, each) => {
    attribute(row, "data-testid", "release");
    attribute(row, "data-release", each.release);
  },
);

/** @type {Table<ComparedNetwork>} */
const networks = new Table(
  "Networks",
  [
    { title: "Tier", show: (cell, each) => text(cell, each.gpu ? `${each.tier} (GPU)` : each.tier) },
    { title: "Network", kind: "name", show: (cell, each) => hinted(cell, each.name) },
    { title: "sha256", show: (cell, each) => digest(cell, each.sha256) },
    { title: "Answers", show: (cell, each) => text(cell, each.target) },
    { title: "Accuracy", kind: "number", show: (cell, each) => text(cell, accuracyWords(each)) },
    { title: "Size", kind: "number", show: (cell, each) => text(cell, size(each.size_bytes)) },
    { title: "Nodes", kind: "number", show: (cell, each) => text(cell, number(each.nodes)) },
    { title: "Compared", show: (cell, each) => text(cell, each.change) },
  ],
  (each) => `${each.tier} ${each.name} ${each.sha256}`,
  (row, each) => {
    attribute(row, "data-testid", "network");
    attribute(row, "data-network", each.name);
  },
);
const ofRelease = el("select", { id: "of-release", change: () => choose(ofRelease.value) });
const other = el("select", { id: "compared-with", change: showNetworks });
const about = el("p", { class: "muted said", "data-testid": "about" });
const ofNetworks = el(
  "section",
  { "data-testid": "networks" },
  el("h2", {}, "Networks"),
  el("div", { class: "filters" }, el("label", { for: "of-release" }, "Of"), ofRelease, el("label", { for: "compared-with" }, "compared with"), other),
  about,
  networks.element,
);

/** @type {Table<Trouble>} */
const troubles = new Table(
  "Nodes that cannot hold a release",
  [
    { title: "Node", kind: "name", show: (cell, each) => hinted(cell, each.node_id) },
    { title: "Release", kind: "answer", show: (cell, each) => hinted(cell, each.release) },
    { title: "Trouble", show: (cell, each) => text(cell, each.kind) },
    { title: "Why", kind: "why said", show: (cell, each) => hinted(cell, each.detail) },
  ],
  (each) => `${each.release} ${each.node_id} ${each.kind}`,
  (row, each) => {
    attribute(row, "data-testid", "trouble");
    attribute(row, "data-node", each.node_id);
  },
);
const ofTroubles = el("section", { hidden: true }, el("h2", {}, "Nodes in trouble"), troubles.element);

/** @type {Table<Rollout>} */
const history = new Table(
  "Earlier changes",
  [
    { title: "Release", kind: "name", show: (cell, each) => hinted(cell, each.release) },
    { title: "Instead of", kind: "answer", show: (cell, each) => hinted(cell, each.previous || "–") },
    { title: "Way", show: (cell, each) => text(cell, each.kind === "canary" ? `trial on ${percent(each.canary)}` : KINDS[each.kind]) },
    { title: "Ended", kind: "state", show: (cell, each) => releaseState(cell, each) },
    { title: "Begun", kind: "number", show: (cell, each) => text(cell, day(each.started_at)) },
    { title: "Took", kind: "number", show: (cell, each) => text(cell, each.ended_at ? span((Date.parse(each.ended_at) - Date.parse(each.started_at)) / 1000) : "–") },
    { title: "By", kind: "answer", show: (cell, each) => hinted(cell, each.started_by || "–") },
    { title: "Why", kind: "why said", show: (cell, each) => hinted(cell, each.reason) },
  ],
  (each) => `${each.release} ${each.started_at}`,
  (row, each) => attribute(row, "data-testid", "past"),
);
const ofHistory = el("section", { hidden: true }, el("h2", {}, "Earlier changes"), history.element);

/** @param {HTMLElement} cell @param {ReleaseNow} release */
function link(cell, release) {
  if (!cell.firstChild) cell.append(el("a"));
  const [anchor] = cell.children;
  attribute(anchor, "href", `#release=${encodeURIComponent(release.release)}`);
  hinted(anchor, release.release);
}

/** What an operator may do to a release. @param {string} ref NAME@NUMBER @returns {Record<string, import("./orders.js").Order>} */
function acts(ref) {
  const back = known.rollout ? known.rollout.previous : known.previous;
  const act = (/** @type {string} */ order) => async () => {
    await send("POST", `${path(ref)}/${order}`);
    await read();
  };
  return {
    start: ["Try", "", async () => askTrial(ref, read)],
    promote: ["Promote", "Give NAME to everyone now, without a trial and without guards?", act("promote")],
    stop: ["Stop", "Stop the trial of NAME? Its devices return to the release before.", act("stop")],
    rollback: ["Roll back", `Leave NAME, and return to ${back ?? "the release before"} everywhere?`, act("rollback")],
  };
}

/** The orders that the scheduler would take now. @param {ReleaseNow} release */
function possible({ release, state: now }) {
  if (known.rollout?.release === release) return now === "canary" ? ["promote", "stop"] : ["rollback"];
  if (known.rollout) return [];
  if (release === known.in_force) return known.previous ? ["rollback"] : [];
  return ["start", "promote"];
}

/** @param {HTMLElement} cell @param {ReleaseNow} release */
function orders(cell, release) {
  if (caller.operates) showOrders(cell, release.release, acts(release.release), possible(release));
}

/** @param {readonly ReleaseNetwork[]} some */
function inOrder(some) {
  return [...some].sort((one, two) => TIERS.indexOf(one.tier) - TIERS.indexOf(two.tier) || byName(one.name, two.name));
}

/** @param {Rollout} rollout */
function showChange(rollout) {
  const trial = rollout.state === "canary";
  const whole = rollout.for_s * (rollout.extended ? 2 : 1);
  text(title, `${rollout.release} instead of ${rollout.previous || "nothing"}`);
  releaseState(state, rollout);
  if (trial) shareBar(bar, `${exactly(rollout.elapsed_s)} of ${exactly(whole)} of the trial are over`, whole, 0, Math.min(whole, rollout.elapsed_s));
  else shareBar(bar, `${percent(rollout.share)} of the end devices use it`, 1, 0, rollout.share);
  const said = [
    KINDS[rollout.kind],
    `${percent(rollout.share)} of the end devices (${number(rollout.device_count)}) use it`,
    `${number(rollout.ready)} of ${number(rollout.wanted)} nodes hold it`,
    trial && `${exactly(Math.max(0, whole - rollout.elapsed_s))} left${rollout.extended ? ", extended once" : ""}`,
    rollout.started_by && `started by ${rollout.started_by}`,
  ];
  text(counts, said.filter(Boolean).join(" · "));
  text(reason, rollout.reason);
  reason.hidden = !rollout.reason;
  guards.update([...rollout.guards]);
  guards.element.hidden = words.hidden = rollout.guards.length === 0;
  const sentences = rollout.guards.map(({ name, detail }) => `${name}: ${detail}`);
  if (inWords.dataset.shown !== sentences.join("\n")) {
    inWords.dataset.shown = sentences.join("\n");
    replace(inWords, ...sentences.map((sentence) => el("p", {}, sentence)));
  }
  const more = rollout.device_count - rollout.devices.length;
  text(devices, `${rollout.devices.join(", ")}${more > 0 ? ` and ${number(more)} more` : ""}`);
  someDevices.hidden = rollout.devices.length === 0;
  const release = known.releases.find((each) => each.release === rollout.release);
  if (caller.operates && release) showOrders(changeOrders, rollout.release, acts(rollout.release), possible(release));
}

function show() {
  const force = known.releases.find(({ release }) => release === known.in_force);
  text(figures.force.value, known.in_force || "–");
  text(figures.nodes.value, number(force?.nodes));
  text(figures.jobs.value, number(force?.jobs));
  const bad = known.releases.flatMap(({ release, troubles: some }) => some.map((each) => ({ ...each, release })));
  text(figures.troubles.value, number(new Set(bad.map(({ node_id }) => node_id)).size));
  change.hidden = known.rollout === null;
  if (known.rollout) showChange(known.rollout);
  none.hidden = known.releases.length > 0;
  releases.element.hidden = ofNetworks.hidden = known.releases.length === 0;
  releases.update([...known.releases]);
  troubles.update(bad);
  ofTroubles.hidden = bad.length === 0;
  history.update([...known.history]);
  ofHistory.hidden = known.history.length === 0;
  showChoices();
  showNetworks();
}

/** The release in the address; the one in force, unless there is such a release. */
function chosen() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("release");
  return known.releases.some(({ release }) => release === wanted) ? wanted : known.in_force;
}

/** @param {string} release */
function choose(release) {
  location.hash = `release=${encodeURIComponent(release)}`;
}

/** Offers all releases, where they are other ones than before. */
function showChoices() {
  const names = known.releases.map(({ release }) => release);
  if (ofRelease.dataset.names !== names.join()) {
    ofRelease.dataset.names = names.join();
    const before = other.value;
    replace(ofRelease, ...names.map((name) => el("option", { value: name }, name)));
    replace(other, el("option", { value: "" }, "nothing"), ...names.map((name) => el("option", { value: name }, name)));
    other.value = names.includes(before) ? before : "";
  }
  ofRelease.value = chosen() ?? "";
}

/** The networks of the chosen release, and what another one has in their place. */
function showNetworks() {
  const release = known.releases.find((each) => each.release === chosen());
  const base = known.releases.find((each) => each.release === other.value);
  if (!release) return;
  const said = [
    `${number(release.classes)} classes`,
    release.encoders.length > 0 && `encoders: ${release.encoders.join(", ")}`,
    release.thresholds ? "tuned thresholds" : "default thresholds",
    `${number(release.probes)} of ${number(release.networks.length)} networks are checked with probe pictures`,
    base && base.classes !== release.classes && `${base.release} has ${number(base.classes)} classes`,
  ];
  text(about, said.filter(Boolean).join(" · "));
  const like = (/** @type {ReleaseNetwork} */ one) => (/** @type {ReleaseNetwork} */ two) => one.tier === two.tier && one.name === two.name;
  const changeOf = (/** @type {ReleaseNetwork} */ network) => {
    if (!base) return "";
    if (base.networks.some(({ sha256, tier }) => sha256 === network.sha256 && tier === network.tier)) return "the same";
    const before = base.networks.find(like(network));
    return before ? `changed, was ${short(before.sha256)}` : "new";
  };
  const gone = (base?.networks ?? []).filter((network) => !release.networks.some((each) => like(network)(each) || (each.sha256 === network.sha256 && each.tier === network.tier)));
  networks.element.toggleAttribute("data-compared", Boolean(base));
  networks.update([...inOrder(release.networks).map((each) => ({ ...each, change: changeOf(each) })), ...inOrder(gone).map((each) => ({ ...each, change: "gone" }))]);
}

async function read() {
  known = await get("/v1/releases");
  show();
}

begin(async () => {
  main.append(
    el("div", { class: "figures" }, ...Object.values(figures).map(({ element }) => element)),
    change,
    none,
    el("section", {}, el("h2", {}, "All releases"), releases.element),
    ofNetworks,
    ofTroubles,
    ofHistory,
  );
  await read();
  window.addEventListener("hashchange", () => {
    showChoices();
    showNetworks();
    ofNetworks.scrollIntoView({ block: "nearest" });
  });
  const again = atMost(PAUSE_MS, read);
  follow("/v1/fleet/events", { snapshot: again }, { reopened: again });
});
