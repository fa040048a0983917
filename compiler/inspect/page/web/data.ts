// The JSON that data.py puts into the page, field for field.

export interface Columns {
  name: string[];
  op: number[];
  call: string[];
  reads: number[][];
  types: number[][];
  source: number[];
  module: number[];
  phase: number[];
  traced: number[];
  why: number[];
  decisions: number[][];
  dims: number[][];
  /** the collectives of a loop's rounds or of a branch: op, mesh dims, how many, bytes sent, seconds */
  within: [number, number[], number, number, number][][];
  sent: number[];
  flops: number[];
  moved: number[];
  allocates: number[];
  frees: number[];
  seconds: number[];
  instruction: number[];
  /** the kernel that computes it, or -1 */
  kernel: number[];
  /** 1 for a second or later result of an op that a kernel computes */
  again: number[];
}

/** mesh dim, rule, factor, why, causes, alternatives (text, extra), exact */
export type DecisionRow = [number, number, number, number, number[], [number, number][], number];
/** dtype, bytes of an element, global shape, mesh dims of each tensor dim, partial, varying, text */
export type TypeRow = [string, number, number[], number[][], [number, string][], number[], string];
/** file, line, column, end column, text of the line */
export type SourceRow = [number, number, number, number, string];

export interface PlanData {
  name: string;
  hash: string;
  target: string;
  /** the target, and what moves its tensors where that is not Monarch's own: "cpu, over gloo" */
  madeFor: string;
  mesh: [string, number][];
  values: Columns;
  decisions: DecisionRow[];
  types: TypeRow[];
  sources: SourceRow[];
  outputs: [number, string, string][];
  texts: string[];
  /** generated kernels: their values, the loops that they are, and what is written of them for the plan's target */
  kernels: [number, string, string][];
  passes: Record<string, number>;
  overview: OverviewData;
}

/** The fields of overview.py, verdicts.py and blocks.py. */
export interface OverviewData {
  seconds: number;
  time: Record<string, number>;
  hidden: number;
  memory: { held: number; kinds: Record<string, number>; value: string; where: string; there: number | null; machine: string };
  lines: { name: string; code: string; seconds: number; sent: number; held: number }[];
  blocks: BlockData[];
  verdicts: VerdictData[];
}

export interface BlockData {
  name: string;
  path: string;
  times: number;
  ops: number;
  flops: number;
  computing: number;
  communicating: number;
  sent: number;
  weights: number;
  parts: BlockData[];
}

export interface VerdictData {
  state: "good" | "note" | "bad";
  text: string;
  do: string;
  value: string;
}

/** worker, start, end, and five numbers for each span: instruction, start from the end before, duration, waited, held */
export type PartRow = [number, number, number, number[]];

export interface TraceData {
  runs: number;
  /** instruction, nanoseconds it took, nanoseconds it waited in that: medians */
  instructions: [number, number, number][];
  /** number, the workers' parts, and the critical path, four numbers each: worker, instruction, start, end */
  steps: [number, PartRow[], number[]][];
}

export interface Changed {
  op: string;
  /** a collective's mesh dims */
  over: string;
  where: string;
  module: string;
  before: string;
  after: string;
  sent: [number, number];
  values: string[];
}

export interface Moved {
  sign: "-" | "+";
  op: string;
  over: string;
  where: string;
  module: string;
  why: string;
  bytes: number;
  values: string[];
}

interface Head {
  name: string;
  mesh: string;
  target: string;
}

/** The fields of differences.py, before and now. */
export interface Comparison {
  before: Head;
  now: Head;
  units: Record<string, "bytes" | "flops" | "seconds">;
  totals: Record<string, [number, number]>;
  settings: Record<string, [string, string]>;
  values: Record<string, [string, string]>;
  /** how many, and the bytes that a worker sends */
  collectives: Record<string, [[number, number], [number, number]]>;
  kernels: Record<string, [number, number]>;
  layouts: Changed[];
  ops: Moved[];
}

/** A program of several meshes: what each runs, and what they send one another in a step. */
export interface Several {
  /** of a pipeline, in words; "" for none */
  schedule: string;
  bubble: number;
  parts: { name: string; workers: number[]; plan: PlanData }[];
  transfers: { name: string; from: string; to: string; type: string; bytes: number; line: string }[];
}

export interface PageData {
  title: string;
  /** null where the program is of several meshes */
  plan: PlanData | null;
  several: Several | null;
  trace: TraceData | null;
  comparison: Comparison | null;
}
