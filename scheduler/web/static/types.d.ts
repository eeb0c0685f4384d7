// What the API answers, as far as the page reads it. docs/api.md describes it.

export type Health = "alive" | "suspect" | "dead" | "draining";
export type Tier = "end" | "edge" | "cloud";

export interface NodeNow {
  node_id: string;
  tier: Tier;
  health: Health;
  reason: string;
  draining: boolean;
  trusted: boolean;
  models: string[];
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
  state: string;
  reason: string;
  images: number;
  answered_coarse: number;
  answered_fine: number;
}

export interface FleetSnapshot {
  at: number;
  scheme: string;
  doubting: boolean;
  nodes: NodeNow[];
  links: LinkNow[];
  jobs: JobNow[];
  unfinished: number;
  figures: Record<string, number | null>;
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
