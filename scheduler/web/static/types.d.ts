// What the API answers, as far as the page reads it. docs/how-to/jobs.md describes it.

export type Health = "alive" | "suspect" | "dead" | "draining" | "removed";
export type Tier = "end" | "edge" | "cloud";

export interface NodeNow {
  node_id: string;
  tier: Tier;
  site: string | null;
  health: Health;
  reason: string;
  draining: boolean;
  trusted: boolean;
  models: string[];
  digests?: string[];
  network: string;
  accuracy: number | null;
  version: string;
  outstanding: number;
  queued_images: number;
  images_per_s: number;
  ms_per_image: number | null;
  own_ms_per_image: number;
  images_per_minute: number | null;
  joined_at: number;
  last_seen: number | null;
}

export interface LinkNow {
  end: string;
  upper: string;
  mapped: boolean;
  images_per_s: number;
}

export interface JobNow {
  id: string;
  name: string | null;
  owner: string | null;
  state: string;
  reason: string;
  images: number;
  answered_coarse: number;
  answered_fine: number;
}

export interface SiteNow {
  site: string;
  share: "none" | "cloud" | "sites";
  health: "ok" | "degraded" | "coarse" | "drained" | "down";
  reason: string;
  nodes: Partial<Record<Tier, number>>;
  alive: Partial<Record<Tier, number>>;
  images_per_s: number;
  n_map: number | null;
  theta_cloud: number | null;
  cloud_share: number | null;
  cloud_nodes: number;
}

export interface SiteList {
  sites: SiteNow[];
}

export interface FleetSnapshot {
  at: number;
  scheme: string;
  doubting: boolean;
  nodes: NodeNow[];
  known: number;
  links: LinkNow[];
  jobs: JobNow[];
  unfinished: number;
  figures: Record<string, number | null>;
  theta_cloud: number | null;
  cloud_share: number | null;
  sites: SiteNow[];
  site: string | null;
}

export interface FleetEvent {
  id: number;
  at: number;
  kind: string;
  node: string | null;
  job: string | null;
  count: number;
  text: string;
}

export interface History {
  start: number;
  step_s: number;
  columns: Record<string, (number | null)[]>;
  events: FleetEvent[];
}

export interface SentShare {
  tasks: number;
  upload_bytes: number;
  relay_tasks: number;
  relay_bytes: number;
  encode_ms: number;
}

export interface NodeShare {
  tier: Tier;
  coarse_images: number;
  fine_images: number;
}

export interface DamagedImage {
  index: number;
  name: string | null;
  reason: string;
}

export interface Job extends JobNow {
  site: string | null;
  release?: string | null;
  scheme: string;
  privacy: string | null;
  tasks: number;
  fallback: number;
  failed_images: number;
  damaged_images: number;
  damaged_answered: number;
  damaged: DamagedImage[];
  sent_up: Partial<Record<Tier, number>>;
  final_tier: Partial<Record<Tier, number>>;
  theta_cloud: number | null;
  cloud_share: number | null;
  created_at: string | null;
  started_at: string | null;
  finished_at: string | null;
  elapsed_s: number | null;
  images_per_s: number | null;
  coarse_accuracy: number | null;
  fine_accuracy: number | null;
  final_coarse_accuracy: number | null;
  coarse_p50_ms: number | null;
  coarse_p99_ms: number | null;
  fine_p50_ms: number | null;
  fine_p99_ms: number | null;
  sent: Record<string, SentShare>;
  by_node: Record<string, NodeShare>;
  policy: Record<string, any>;
  flat: boolean;
}

export interface JobPage {
  jobs: Job[];
  next_cursor: string | null;
}

export interface Attempt {
  task: number;
  attempt: number;
  images: number;
  node: string;
  upstream: string | null;
  stage: string;
  hedge: boolean;
  outcome: string;
  reason: string;
  started_at: string;
  ended_at: string | null;
  ms: number | null;
}

export interface AttemptPage {
  attempts: Attempt[];
  next_cursor: string | null;
}

export interface Explanation {
  decisions: { task: number; attempt: number; why: string }[];
}

export interface Sent {
  form: string;
  upload_bytes: number;
  encoded_by: string | null;
}

export interface Answer {
  label: string;
  confidence: number;
  node: string;
  tier?: Tier;
  ms: number;
}

export interface ImageResult {
  index: number;
  name: string | null;
  site: string | null;
  label: string | null;
  coarse: Answer | null;
  fine: (Answer & { tier: Tier }) | null;
  not_escalated?: boolean;
  fallback: string | null;
  error: string | null;
  true_fine: string | null;
  true_coarse: string | null;
}

export interface Results {
  event: string;
  task: number;
  first_index: number;
  sent: Sent[];
  results: ImageResult[];
}

export interface Attack {
  index: number;
  encoder: string;
  network: string;
  form: string;
  attack: string;
  ssim: number;
  recognised: number;
  recognised_low: number;
  recognised_high: number;
  recognised_originals: number;
  images: number;
  fine_accuracy: number;
  accuracy_lost: number;
  payload_bytes: number;
  counts: boolean;
}

export interface Audit {
  measured_at: string;
  quick: boolean;
  source: "state" | "models" | "bundled";
  outdated: string[];
  rows: Omit<Attack, "index">[];
}

export interface RunWorker {
  name: string;
  updates: number;
  staleness: number;
  bytes_sent: number;
  bytes_received: number;
  idle_s: number;
  left: boolean;
  score: number;
  standing: "active" | "paused" | "dropped" | "trusted" | "quarantined";
  wish: "pause" | "drop" | "trust" | "resume" | null;
  copies: WorkerCopies | null;
}

export interface WorkerCopies {
  holds: string;
  has: number;
  wants: number;
  serves: boolean;
  segment: number | null;
  source: string | null;
  share: number;
}

export interface RunSummary {
  id: string;
  owner: string | null;
  network: string;
  strategy: string;
  state: string;
  reason: string;
  steps: number;
  done: number;
  version: number;
  loss: number | null;
  accuracy: number | null;
  worker_count: number;
  missing: number | null;
  created_at: string;
  heard_at: string;
  finished_at: string | null;
}

export interface RunProgress extends RunSummary {
  workers: RunWorker[];
  point: CurvePoint | null;
}

export interface CurvePoint {
  at: string;
  done: number;
  loss: number | null;
  accuracy: number | null;
  updates: number | null;
  bytes_moved: number | null;
  staleness: number | null;
}

export interface Run extends RunProgress {
  url: string;
  wants: { workers: number | null; start_at: number | null };
  config: Record<string, unknown>;
  curve: CurvePoint[];
  result: Record<string, unknown> | null;
}

export interface Limits {
  lowest: number;
  highest: number;
  default: number;
}

export interface Offer {
  id: string;
  owner: string | null;
  host: string;
  networks: { name: string; rate: Limits; epochs: Limits; batch: Limits }[];
  strategies: string[];
  workers: number;
  latest: { start: string; run: string | null; over: boolean; error: string | null } | null;
  waiting: { id: string }[];
}

export interface RunPage {
  runs: RunSummary[];
  next_cursor: string | null;
}

export interface SeenPicture {
  node: string;
  source: string;
  sequence: number;
  revision: number;
  taken_at: string | null;
  name: string | null;
  label: string | null;
  confidence: number | null;
  coarse: Answer | null;
  fine: (Answer & { tier: Tier; coarse_label: string }) | null;
  answered_by: Tier | null;
  fallback: string | null;
  damaged: string | null;
  unsure: boolean;
  waits: boolean;
  picture: boolean;
  person?: string | null;
  person_by?: string | null;
  person_at?: string | null;
}

export interface KeptState {
  pictures: number;
  differs: number;
  unsure: number;
  sure: number;
  labelled: number;
  bytes: number;
  size_bytes: number;
  reason: string;
  personal?: boolean;
  personal_reason?: string;
}

export interface NodeLearning {
  node: string;
  kept: KeptState | null;
  audited: number;
  agreement: number | null;
}

export interface Improvement {
  id: string;
  release: string;
  tier: Tier;
  state: "training" | "evaluating" | "paused" | "released" | "refused" | "failed";
  devices: number;
  rounds: number;
  figures: Record<string, number>;
  reason: string;
  new_release: string | null;
  created_at: string | null;
  told_at: string | null;
  by: string | null;
}

export interface SourceRights {
  owner: string | null;
  readers: string[];
}

export interface SourceNow extends SourceRights {
  node: string;
  site: string | null;
  source: string;
  state: string;
  reason: string;
  health: Health | null;
  heard_s: number | null;
  last: SeenPicture | null;
  last_picture: number | null;
  waiting_answers: number | null;
  waiting_pictures: number | null;
  spool_bytes: number | null;
  spool_size_bytes: number | null;
  spent_bytes: number | null;
  bytes_per_day: number | null;
}

/** A source with the moment at which it was heard, in seconds by the clock of the browser. */
export interface HeardSource extends SourceNow {
  heardAt: number | null;
}

export interface SourceList {
  sources: SourceNow[];
}

export interface ObservationPage {
  observations: SeenPicture[];
  next_cursor: string | null;
}

export interface ReleaseNetwork {
  name: string;
  tier: Tier;
  sha256: string;
  gpu: boolean;
  target: string;
  size_bytes: number;
  accuracy: number | null;
  test_images: number;
  nodes: number;
}

export interface TroubleNow {
  node_id: string;
  kind: string;
  detail: string;
}

export interface ReleaseNow {
  release: string;
  name: string;
  number: number;
  state: "ready" | "canary" | "rolling out" | "in force" | "retired" | "rolled back" | "stopped";
  digest: string;
  created_at: string;
  created_by: string;
  origin: string;
  classes: number;
  networks: ReleaseNetwork[];
  encoders: string[];
  thresholds: boolean;
  probes: number;
  nodes: number;
  jobs: number;
  troubles: TroubleNow[];
}

export interface GuardNow {
  name: "agreement" | "p99" | "errors";
  limit: number;
  old: number | null;
  new: number | null;
  value: number | null;
  low: number | null;
  high: number | null;
  samples: number;
  old_samples: number;
  needs: number;
  verdict: "open" | "holds" | "fails";
  detail: string;
}

export interface Rollout {
  release: string;
  previous: string;
  kind: "canary" | "promote" | "rollback" | "first";
  state: "canary" | "rolling out" | "done" | "rolled back" | "stopped";
  share: number;
  canary: number;
  guards: GuardNow[];
  for_s: number;
  elapsed_s: number;
  extended: boolean;
  devices: string[];
  device_count: number;
  wanted: number;
  ready: number;
  started_at: string;
  started_by: string;
  ended_at: string | null;
  reason: string;
}

export interface ReleaseList {
  in_force: string;
  previous: string | null;
  rollout: Rollout | null;
  releases: ReleaseNow[];
  history: Rollout[];
}

export interface SinkFilter {
  events: string[];
  sources: string[];
  labels: string[];
  confidence: number | null;
}

export interface SinkNow {
  name: string;
  kind: string;
  options: Record<string, unknown>;
  filter: SinkFilter;
  state: "ok" | "failing" | "paused";
  reason: string;
  waiting: number;
  lag_s: number;
  delivered: number;
  dead: number;
  dropped: number;
}

export interface DeadLetter {
  number: number;
  reason: string;
  attempts: number;
  at: string;
  replaying: boolean;
  event: { id: string; type: string; timestamp: string; data: Record<string, unknown> };
}
