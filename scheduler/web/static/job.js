// One job: how far it is, what came of each attempt and each image, and what went wrong.

import { ApiError, follow, get, request, root, send } from "./api.js";
import { AttemptTimeline, settled } from "./attempts.js";
import { attribute, confirmed, el, figure, hinted, replace, text } from "./dom.js";
import { day, milliseconds, number, percent, size, span } from "./format.js";
import { answerNames, jobState, progressBar } from "./jobparts.js";
import { atMost, attempt, begin, main } from "./shell.js";
import { mapOf } from "./siteparts.js";
import { Table } from "./table.js";

/** @typedef {import("./types").Job} Job */
/** @typedef {import("./types").ImageResult} ImageResult */
/** @typedef {import("./attempts.js").Attempt} Attempt */
/** @typedef {{what: string, reason: string, count: number}} Failure */

const MOST_ROWS = 20000;
const MOST_ATTEMPTS = 1000;
const MOST_REASONS = 100;
const FIGURES_PAUSE_MS = 2000;
const ATTEMPTS_PAUSE_MS = 4000;
const QUIET_MS = 5000;
const TIERS = /** @type {const} */ (["end", "edge", "cloud"]);
const FINE_OUTCOMES = ["ok", "running", "cancelled", "late"];

const path = `/v1/jobs/${location.pathname.split("/").at(-1) ?? ""}`;
/** @type {Job} */
let job;
/** @type {ImageResult[]} by index */
let rows = [];
/** @type {Attempt[]} */
let attempts = [];

const figures = {
  speed: figure("images a second"),
  lower: figure(""),
  upper: figure(""),
  lowerRight: figure(""),
  upperRight: figure(""),
};
const head = el("div", { class: "job-head", "data-testid": "job-head" });
const bar = el("div", { class: "bar" });
const counts = el("p", { class: "counts", "data-testid": "counts" });
const facts = {
  Id: el("code"),
  Site: el("a"),
  Release: el("a"),
  Scheme: el("span"),
  Cloud: el("span"),
  Privacy: el("span"),
  Tasks: el("span"),
  Submitted: el("span"),
  Took: el("span"),
};
const escalation = el("p", { "data-testid": "escalation" });
const ofResults = el("p", { class: "muted", "data-testid": "of-results" });
const ofAttempts = el("p", { class: "muted", "data-testid": "of-attempts" });
const cancel = el("button", { type: "button", "data-testid": "cancel", hidden: true, click: () => attempt(askCancel) }, "Cancel the job");
const timeline = new AttemptTimeline();
const asTable = el("details", { hidden: true }, el("summary", {}, "The attempts as a table"));

/** @type {Table<ImageResult>} */
let results;

function resultTable() {
  const { lower, upper } = answerNames(job);
  const answer = (/** @type {import("./types").Answer | null} */ given) => (given ? `${given.label} ${Math.round(100 * given.confidence)} %${given.tier ? ` (${given.tier})` : ""}` : "");
  return /** @type {Table<ImageResult>} */ (
    new Table(
      "Results",
      [
        { title: "#", kind: "number", show: (cell, row) => text(cell, row.index) },
        { title: "Picture", kind: "picture", show: picture },
        { title: "Name", kind: "name", show: (cell, row) => hinted(cell, row.name ?? "") },
        { title: titled(lower), kind: "answer", show: (cell, row) => hinted(cell, answer(row.coarse)) },
        { title: titled(upper), kind: "answer", show: (cell, row) => hinted(cell, answer(row.fine)) },
        { title: "Stands", kind: "name", show: (cell, row) => hinted(cell, row.label ?? "") },
        { title: "True", kind: "answer", show: (cell, row) => hinted(cell, truth(row) ?? "") },
        { title: "Right", show: right },
        { title: "Node", show: (cell, row) => text(cell, (row.fine ?? row.coarse)?.node ?? "") },
        { title: "Site", kind: "site", show: (cell, row) => hinted(cell, row.site ?? "") },
        { title: "ms", kind: "number", show: (cell, row) => text(cell, row.coarse ? number((row.fine ?? row.coarse).ms) : "") },
        { title: "Trouble", kind: "why", show: (cell, row) => hinted(cell, row.error ?? row.fallback ?? "") },
      ],
      (row) => String(row.index),
      (row, result) => {
        attribute(row, "data-testid", "result");
        attribute(row, "data-index", result.index);
        attribute(row, "data-coarse", result.coarse?.label);
        attribute(row, "data-fine", result.fine?.label);
      },
    )
  );
}

/** @param {string} word */
function titled(word) {
  return word.charAt(0).toUpperCase() + word.slice(1);
}

/** @type {Table<Attempt>} */
const attemptTable = new Table(
  "Attempts",
  [
    { title: "Task", kind: "number", show: (cell, each) => text(cell, each.task) },
    { title: "Attempt", kind: "number", show: (cell, each) => text(cell, `${each.attempt}${each.hedge ? " (hedge)" : ""}`) },
    { title: "Images", kind: "number", show: (cell, each) => text(cell, each.images) },
    { title: "Device", show: (cell, each) => text(cell, each.node) },
    { title: "Upstream", show: (cell, each) => text(cell, each.upstream ?? "–") },
    { title: "Outcome", show: (cell, each) => text(cell, each.outcome) },
    { title: "ms", kind: "number", show: (cell, each) => text(cell, number(each.ms)) },
    { title: "Reason", kind: "why", show: (cell, each) => hinted(cell, each.reason) },
    { title: "Why there", kind: "why", show: (cell, each) => hinted(cell, each.why ?? "") },
  ],
  (each) => `${each.task}-${each.attempt}`,
  (row, each) => attribute(row, "data-testid", "attempt"),
);

/** @type {Table<Failure>} */
const failures = new Table(
  "Failures by reason",
  [
    { title: "What", kind: "name", show: (cell, each) => text(cell, each.what) },
    { title: "Reason", kind: "why", show: (cell, each) => hinted(cell, each.reason) },
    { title: "Times", kind: "number", show: (cell, each) => text(cell, number(each.count)) },
  ],
  (each) => `${each.what}\n${each.reason}`,
  (row) => attribute(row, "data-testid", "failure"),
);

/** @type {Table<import("./types").DamagedImage>} */
const damaged = new Table(
  "Pictures that cannot be read",
  [
    { title: "#", kind: "number", show: (cell, each) => text(cell, each.index) },
    { title: "Name", kind: "name", show: (cell, each) => hinted(cell, each.name ?? "") },
    { title: "Reason", kind: "why", show: (cell, each) => hinted(cell, each.reason) },
  ],
  (each) => String(each.index),
  (row) => attribute(row, "data-testid", "damaged"),
);

/** @type {Table<[string, import("./types").NodeShare]>} */
const shares = new Table(
  "Who answered",
  [
    { title: "Node", kind: "name", show: (cell, [node]) => hinted(cell, node) },
    { title: "Tier", show: (cell, [, share]) => text(cell, share.tier) },
    { title: "Answers at once", kind: "number", show: (cell, [, share]) => text(cell, share.tier === "end" ? number(share.coarse_images) : "–") },
    { title: "Answers from above", kind: "number", show: (cell, [, share]) => text(cell, share.tier === "end" ? "–" : number(share.fine_images)) },
  ],
  ([node]) => node,
);

/** @type {Table<[string, import("./types").SentShare]>} */
const sent = new Table(
  "What was sent up",
  [
    { title: "Form", kind: "name", show: (cell, [form]) => text(cell, form) },
    { title: "Tasks", kind: "number", show: (cell, [, each]) => text(cell, number(each.tasks)) },
    { title: "To upstream nodes", kind: "number", show: (cell, [, each]) => text(cell, size(each.upload_bytes)) },
    { title: "To encoding edge nodes", kind: "number", show: (cell, [, each]) => text(cell, each.relay_bytes ? `${size(each.relay_bytes)} (${number(each.relay_tasks)} tasks)` : "–") },
    { title: "Encoding took", kind: "number", show: (cell, [, each]) => text(cell, each.encode_ms ? milliseconds(each.encode_ms) : "–") },
  ],
  ([form]) => form,
);

const parts = {
  trouble: part("What went wrong", failures.element, damaged.element),
  escalation: part("Escalation", escalation),
  shares: part("Who answered", shares.element),
  sent: part("What was sent up", sent.element),
};

/** @param {string} title @param {...HTMLElement} content */
function part(title, ...content) {
  return el("section", { hidden: true }, el("h2", {}, title), ...content);
}

function ended() {
  return !["queued", "running"].includes(job.state);
}

/** Only of rows that are drawn, and only while the job runs. @param {HTMLElement} cell @param {ImageResult} row */
function picture(cell, row) {
  if (ended() || row.error !== null) {
    if (cell.firstChild) replace(cell);
  } else if (!cell.dataset.asked) {
    cell.dataset.asked = "yes";
    const image = el("img", { loading: "lazy", alt: "", width: 34, height: 34, error: () => image.remove() });
    image.src = `${root}${path}/images/${row.index}`;
    replace(cell, image);
  }
}

/** What the answer that stands should be: a class, or a superclass where it is one. @param {ImageResult} row */
function truth(row) {
  return row.fine || job.flat ? row.true_fine : row.true_coarse;
}

/** @param {HTMLElement} cell @param {ImageResult} row */
function right(cell, row) {
  const wanted = truth(row);
  const known = wanted !== null && row.label !== null;
  text(cell, !known ? "" : row.label === wanted ? "✓ right" : "✗ wrong");
  attribute(cell, "class", !known ? null : row.label === wanted ? "right" : "wrong");
}

function showJob() {
  const { lower, upper } = answerNames(job);
  const title = job.name || "Job without a name";
  text(/** @type {Element} */ (main.querySelector("h1")), title);
  document.title = `${title} · Terrace`;
  jobState(head, job);
  progressBar(bar, job);
  text(figures.speed.value, number(job.images_per_s));
  text(figures.lower.value, milliseconds(job.coarse_p50_ms));
  text(figures.lower.label, `${lower} answer, median (p99 ${milliseconds(job.coarse_p99_ms)})`);
  text(figures.upper.value, milliseconds(job.fine_p50_ms));
  text(figures.upper.label, `${upper} answer, median (p99 ${milliseconds(job.fine_p99_ms)})`);
  text(figures.lowerRight.value, percent(job.coarse_accuracy));
  text(figures.lowerRight.label, `${lower} answers right`);
  text(figures.upperRight.value, percent(job.fine_accuracy));
  text(figures.upperRight.label, `${upper} answers right`);
  figures.upper.element.hidden = figures.upperRight.element.hidden = job.scheme === "end";
  figures.lowerRight.element.hidden = job.coarse_accuracy === null;
  figures.upperRight.element.hidden ||= job.fine_accuracy === null;
  const said = [
    `${number(job.images)} images`,
    `${number(job.answered_coarse)} ${lower} answers`,
    job.scheme !== "end" && `${number(job.answered_fine)} ${upper} answers`,
    job.fallback > 0 && `${number(job.fallback)} whose answer from below stands`,
    job.failed_images > 0 && `${number(job.failed_images)} without an answer`,
    job.damaged_images > 0 && `${number(job.damaged_images)} of these cannot be read`,
    job.damaged_answered > 0 && `${number(job.damaged_answered)} damaged, answered as far as they can be decoded`,
  ];
  text(counts, said.filter(Boolean).join(" · "));
  text(facts.Id, job.id);
  hinted(facts.Site, job.site ?? "");
  attribute(facts.Site, "href", job.site && mapOf(job.site));
  /** @type {HTMLElement} */ (facts.Site.closest("div")).hidden = !job.site;
  hinted(facts.Release, job.release ?? "");
  attribute(facts.Release, "href", job.release && `${root}/ui/releases#release=${encodeURIComponent(job.release)}`);
  /** @type {HTMLElement} */ (facts.Release.closest("div")).hidden = !job.release;
  text(facts.Scheme, job.scheme);
  text(facts.Cloud, `${percent(job.theta_cloud)} of the images planned (Eq. 5), ${percent(job.cloud_share)} ${ended() ? "in the end" : "so far"}`);
  /** @type {HTMLElement} */ (facts.Cloud.closest("div")).hidden = job.theta_cloud === null;
  text(facts.Privacy, job.privacy ?? "auto");
  text(facts.Tasks, number(job.tasks));
  text(facts.Submitted, day(job.created_at));
  text(facts.Took, job.elapsed_s === null ? "not begun" : job.elapsed_s < 60 ? milliseconds(1000 * job.elapsed_s) : span(job.elapsed_s));
  cancel.hidden = ended();
  results.element.classList.toggle("ended", ended());
  shares.update(Object.entries(job.by_node).sort(([one, { tier }], [other, share]) => TIERS.indexOf(tier) - TIERS.indexOf(share.tier) || one.localeCompare(other, "en", { numeric: true })));
  parts.shares.hidden = shares.items.length === 0;
  sent.update(Object.entries(job.sent));
  parts.sent.hidden = sent.items.length === 0;
  damaged.update(job.damaged);
  showEscalation();
  showRows();
}

function showEscalation() {
  const parted = (/** @type {Job["sent_up"]} */ by) =>
    TIERS.filter((tier) => by[tier] !== undefined)
      .map((tier) => `${tier} ${number(by[tier])} (${percent((by[tier] ?? 0) / job.images)})`)
      .join(", ");
  const up = parted(job.sent_up);
  parts.escalation.hidden = !up;
  text(escalation, `Sent up to: ${up}. The answer that stands is from: ${parted(job.final_tier) || "none yet"}.`);
}

let drawing = 0;
/** With the next picture that the browser draws, however many answers come till then. */
function showRows() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    results.element.toggleAttribute("data-sited", rows.some(({ site }) => site));
    results.update(rows);
    const answered = rows.reduce((sum, row) => sum + Number(row.label !== null || row.error !== null), 0);
    const sentences = [
      rows.length < job.images && `The first ${number(rows.length)} of ${number(job.images)} images are shown; the files to download have all.`,
      !ended() && `${number(answered)} of ${rows.length < job.images ? "these" : "the"} ${number(rows.length)} have an answer so far.`,
      ended() && "The pictures themselves went when the job ended: its answers are kept, its pictures are not.",
    ];
    text(ofResults, sentences.filter(Boolean).join(" "));
  });
}

function showFailures() {
  /** @type {Map<string, Failure>} */
  const found = new Map();
  const add = (/** @type {string} */ what, /** @type {string} */ reason) => {
    const key = `${what}\n${reason}`;
    const failure = found.get(key) ?? { what, reason, count: 0 };
    failure.count += 1;
    found.set(key, failure);
  };
  for (const { error, fallback } of rows) {
    if (error !== null) add("image without an answer", error);
    else if (fallback !== null) add("answer from below stands", fallback);
  }
  for (const { outcome, reason } of attempts) {
    if (!FINE_OUTCOMES.includes(outcome)) add(`attempt: ${outcome}`, reason);
  }
  failures.update([...found.values()].sort((one, other) => other.count - one.count).slice(0, MOST_REASONS));
  failures.element.hidden = failures.items.length === 0;
  damaged.element.hidden = job.damaged.length === 0;
  parts.trouble.hidden = failures.element.hidden && damaged.element.hidden;
}

const readFigures = atMost(FIGURES_PAUSE_MS, async () => {
  if (ended()) return;
  const seen = await get(path);
  if (ended()) return; // the event stream was faster
  job = seen;
  showJob();
});

/** Only those that may have changed. */
const readAttempts = atMost(ATTEMPTS_PAUSE_MS, async () => {
  const kept = attempts.slice(0, settled(attempts));
  const last = kept.at(-1);
  const query = new URLSearchParams({ limit: String(Math.max(1, MOST_ATTEMPTS - kept.length)) });
  if (last) query.set("cursor", `${last.task}-${last.attempt}`);
  /** @type {[import("./types").AttemptPage, import("./types").Explanation]} */
  const [page, explained] = await Promise.all([get(`${path}/attempts?${query}`), get(`${path}/explain?${query}`)]);
  const why = new Map(explained.decisions.map((each) => [`${each.task}-${each.attempt}`, each.why]));
  const news = page.attempts.map((each) => ({ ...each, why: why.get(`${each.task}-${each.attempt}`) }));
  attempts = [...kept, ...news].slice(0, MOST_ATTEMPTS);
  showAttempts(page.next_cursor !== null || kept.length + news.length > MOST_ATTEMPTS);
});

/** @param {boolean} more whether there are more than are shown */
function showAttempts(more) {
  timeline.update(attempts, Date.now());
  attemptTable.update(attempts);
  timeline.element.hidden = asTable.hidden = attempts.length === 0;
  text(
    ofAttempts,
    more
      ? `The first ${number(attempts.length)} attempts are shown, of tasks 0 to ${number(attempts.at(-1)?.task)} of ${number(job.tasks)}; terrace jobs attempts tells the others.`
      : attempts.length
        ? `All ${number(attempts.length)} attempts are shown.`
        : "Nothing has been sent yet.",
  );
  showFailures();
}

/** @param {ImageResult[]} some */
function take(some) {
  for (const row of some) {
    if (row.index < rows.length) rows[row.index] = row;
  }
  showRows();
}

/** All results of a job that has ended, also of images that no event told of. */
async function readResults() {
  const { body } = await request(`${path}/results?format=jsonl`);
  if (!body) return;
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = -1;
  while (last < rows.length - 1) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    const some = lines.filter(Boolean).map((line) => /** @type {ImageResult} */ (JSON.parse(line)));
    take(some);
    last = some.at(-1)?.index ?? last;
  }
  await reader.cancel();
  showRows();
  showFailures();
}

async function askCancel() {
  const question = `Cancel job ${job.id}? The answers that are there stay; the rest is not computed.`;
  if (await confirmed(question, "Cancel the job", "Keep it")) await send("DELETE", path);
}

/** Until the job ends. */
function live() {
  const some = (/** @type {{results: ImageResult[]}} */ { results: news }) => {
    take(news);
    readFigures();
    readAttempts();
  };
  const timer = window.setInterval(() => {
    readFigures();
    readAttempts();
  }, QUIET_MS);
  const end = follow(`${path}/events`, {
    coarse: some,
    fine: some,
    fallback: some,
    failed: some,
    state: (/** @type {Job} */ now) => {
      job = now;
      showJob();
      readAttempts();
      if (!ended()) return;
      end();
      window.clearInterval(timer);
      attempt(readResults);
    },
  });
}

begin(async () => {
  try {
    job = await get(path);
  } catch (error) {
    if (!(error instanceof ApiError && [400, 404].includes(error.status))) throw error;
    main.append(el("p", { class: "card", "data-testid": "no-job" }, "There is no such job. It may have been too long ago: answers are kept for a week unless set otherwise. "), el("p", {}, el("a", { href: `${root}/ui/jobs` }, "All jobs")));
    return;
  }
  results = resultTable();
  asTable.append(attemptTable.element);
  rows = Array.from({ length: Math.min(MOST_ROWS, job.images) }, (_, index) => ({ index, name: null, site: null, label: null, coarse: null, fine: null, fallback: null, error: null, true_fine: null, true_coarse: null }));
  const file = (/** @type {string} */ format) =>
    el("a", { class: "button", href: `${root}${path}/results?format=${format}${format === "csv" ? "&bom=true" : ""}`, download: `${job.id}.${format}`, "data-testid": `download-${format}` }, `Download ${format === "csv" ? "CSV" : "JSONL"}`);
  main.append(
    head,
    bar,
    counts,
    el("div", { class: "figures" }, ...Object.values(figures).map(({ element }) => element)),
    el("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "buttons" }, cancel, file("jsonl"), file("csv")),
    parts.escalation,
    parts.trouble,
    el("section", {}, el("h2", {}, "Results"), ofResults, results.element),
    el("section", {}, el("h2", {}, "Attempts"), ofAttempts, timeline.element, asTable),
    parts.shares,
    parts.sent,
  );
  showJob();
  if (ended()) {
    readAttempts();
    await readResults();
  } else {
    live();
  }
});
