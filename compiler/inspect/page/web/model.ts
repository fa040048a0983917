// A plan as the page works with it: the columns, and what follows from them.

import type { DecisionRow, PlanData, SourceRow, TypeRow } from "./data";

export const PHASES = ["forward", "backward", "update"] as const;
const INPUTS = new Set(["input", "state", "constant", "scalar", "seed"]);

export interface Decision {
  dim: number;
  rule: string;
  factor: string;
  why: string;
  causes: number[];
  alternatives: { text: string; extra: number }[];
  exact: boolean;
}

export interface Source {
  file: string;
  line: number;
  column: number;
  end: number;
  text: string;
}

export class TensorType {
  constructor(
    readonly dtype: string,
    readonly itemsize: number,
    readonly shape: number[],
    readonly shards: number[][],
    readonly partial: [number, string][],
    readonly varying: number[],
    readonly text: string,
  ) {}

  static of(row: TypeRow): TensorType {
    return new TensorType(...row);
  }

  /** The mesh dims that cut it, each once, smallest first: what its colour says. */
  get cut(): number[] {
    return [...new Set(this.shards.flat())].sort((a, b) => a - b);
  }
}

/** Collectives of one kind that a value runs in a step, all of them together. */
export interface Collectives {
  at: number;
  op: string;
  dims: number[];
  count: number;
  sent: number;
  seconds: number;
}

export class Model {
  readonly size: number;
  readonly types: TensorType[];
  readonly sources: Source[];
  readonly readers: number[][];
  readonly byName: Map<string, number>;
  /** bytes that a worker holds behind each value */
  readonly held: Float64Array;
  readonly peak: number;
  /** the last of the inputs and state: what is held before the first op */
  readonly start: number;
  readonly collectives: Collectives[];
  /** the loops and the source of generated kernels, by value */
  readonly kernels: Map<number, { loops: string; source: string }>;

  constructor(readonly data: PlanData) {
    const values = data.values;
    this.size = values.name.length;
    this.types = data.types.map(TensorType.of);
    this.sources = data.sources.map((row: SourceRow) => ({
      file: this.text(row[0]),
      line: row[1],
      column: row[2],
      end: row[3],
      text: row[4],
    }));
    this.byName = new Map(values.name.map((name, at) => [name, at]));
    this.readers = values.name.map(() => []);
    values.reads.forEach((reads, at) => reads.forEach((read) => this.readers[read]?.push(at)));
    this.held = new Float64Array(this.size);
    this.kernels = new Map(data.kernels.map(([at, loops, source]) => [at, { loops, source }]));
    this.collectives = [];
    let held = 0;
    let peak = 0;
    for (let at = 0; at < this.size; at += 1) {
      held += values.allocates[at]!;
      // What is made stands beside what is given back behind it.
      if (held > (this.held[peak] ?? 0)) peak = at;
      this.held[at] = held;
      held -= values.frees[at]!;
      this.collectives.push(...this.collectivesOf(at));
    }
    this.peak = peak;
    // What comes from outside the step is there from its beginning.
    const ops = [...this.all()].findIndex((at) => !this.isInput(at));
    this.start = Math.max(0, (ops < 0 ? this.size : ops) - 1);
    this.held.fill(this.held[this.start] ?? 0, 0, this.start);
  }

  text(number: number): string {
    return this.data.texts[number] ?? "";
  }
  name(at: number): string {
    return this.data.values.name[at] ?? "";
  }
  op(at: number): string {
    return this.text(this.data.values.op[at]!);
  }
  call(at: number): string {
    return this.data.values.call[at] ?? "";
  }
  module(at: number): string {
    return this.text(this.data.values.module[at]!);
  }
  phase(at: number): number {
    return this.data.values.phase[at]!;
  }
  why(at: number): string {
    return this.text(this.data.values.why[at]!);
  }
  traced(at: number): string {
    return this.text(this.data.values.traced[at]!);
  }
  reads(at: number): number[] {
    return this.data.values.reads[at] ?? [];
  }
  typesOf(at: number): (TensorType | null)[] {
    return (this.data.values.types[at] ?? []).map((type) => this.types[type] ?? null);
  }
  /** The type that stands for a value: that of its first result. */
  type(at: number): TensorType | null {
    for (const type of this.data.values.types[at] ?? []) if (type >= 0) return this.types[type] ?? null;
    return null;
  }
  typeText(at: number): string {
    const types = this.typesOf(at);
    if (types.length === 1) return types[0]?.text ?? "nothing";
    return types.length ? `${types[0]?.text ?? "nothing"} and ${types.length - 1} more` : "nothing";
  }
  /** All of its types, as the graph's text has them. */
  fullType(at: number): string {
    const types = this.typesOf(at).map((type) => type?.text ?? "none");
    return types.length === 1 && !this.isCollective(at) ? types[0]! : `(${types.join(", ")})`;
  }
  isInput(at: number): boolean {
    return INPUTS.has(this.op(at));
  }
  /** Whether it counts as an op: no input, no part of another op's results, and no kernel, whose ops are there. */
  isOp(at: number): boolean {
    return !this.isInput(at) && this.op(at) !== "getitem" && !this.kernels.has(at) && !this.data.values.again[at];
  }
  /** The collectives that a value runs: itself, where it is one, or those within it. */
  collectivesOf(at: number): Collectives[] {
    const values = this.data.values;
    const dims = values.dims[at]!;
    if (dims.length) return [{ at, op: this.op(at), dims, count: 1, sent: values.sent[at]!, seconds: values.seconds[at]! }];
    return values.within[at]!.map(([op, over, many, sent, seconds]) => ({ at, op: this.text(op), dims: over, count: many, sent, seconds }));
  }
  /** How many collectives values run. */
  runs(numbers: Iterable<number>): number {
    let many = 0;
    for (const at of numbers) for (const each of this.collectivesOf(at)) many += each.count;
    return many;
  }
  isCollective(at: number): boolean {
    return this.data.values.dims[at]!.length > 0;
  }
  source(at: number): Source | null {
    return this.sources[this.data.values.source[at]!] ?? null;
  }
  decisions(at: number): Decision[] {
    return (this.data.values.decisions[at] ?? []).map((number) => this.decision(this.data.decisions[number]!));
  }
  private decision(row: DecisionRow): Decision {
    return {
      dim: row[0],
      rule: this.text(row[1]),
      factor: this.text(row[2]),
      why: this.text(row[3]),
      causes: row[4],
      alternatives: row[5].map(([text, extra]) => ({ text: this.text(text), extra })),
      exact: row[6] === 1,
    };
  }
  dimName(dim: number): string {
    return this.data.mesh[dim]?.[0] ?? "?";
  }
  dimNames(at: number): string {
    return this.dimsText(this.data.values.dims[at]!);
  }
  dimsText(dims: number[]): string {
    return dims.map((dim) => this.dimName(dim)).join(", ");
  }
  get workers(): number {
    return this.data.mesh.reduce((product, [, size]) => product * size, 1);
  }
  sum(column: "sent" | "flops" | "seconds" | "moved", numbers: Iterable<number>): number {
    let total = 0;
    for (const at of numbers) total += this.data.values[column][at]!;
    return total;
  }
  *all(): Iterable<number> {
    for (let at = 0; at < this.size; at += 1) yield at;
  }
}

/** The last part of a path, as people speak of files. */
export function fileName(path: string): string {
  return path.slice(path.lastIndexOf("/") + 1);
}

export function place(source: Source): string {
  return `${fileName(source.file)}:${source.line}`;
}
