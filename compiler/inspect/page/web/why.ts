// Why a value has its layout, and why a collective is there: what compiler/inspect/why.py finds, found here for whatever is
// selected. tests/compiler/inspect/page compares the two, value by value.

import type { Decision, Model } from "./model";

const ROOTS = 3;
const SHOWN = 8;

/** One step of a chain; `causes` are the values that led to it. */
export interface Cause {
  value: number;
  decision: Decision;
  causes: Cause[];
}

/** One tensor that a collective moves, who takes it, and why each has its layout. */
export interface Moved {
  value: number;
  before: string;
  after: string;
  why: string;
  valueChains: Cause[];
  takers: number[];
  takerChains: Cause[];
}

/** A line of a chain: a value, and why it lies so where that is to be said; or how many values are left out. */
export type Line = { value: number; first: boolean; why: string; below: Line[][] } | { more: Line[] };

export class Why {
  constructor(private readonly model: Model) {}

  /** A chain for each mesh dim. */
  chains(values: number[], dims: number[]): Cause[] {
    return values.flatMap((value) => dims.map((dim) => this.chain(value, dim)).filter((chain) => chain !== null));
  }

  /** A value's decision on a mesh dim, and the shortest ways from it to what the user said. */
  chain(value: number, dim: number): Cause | null {
    if (!this.decision(value, dim)) return null;
    const came = new Map([[value, value]]);
    const queue = [value];
    const roots: number[] = [];
    for (let next = 0; next < queue.length && roots.length < ROOTS; next += 1) {
      const at = queue[next]!;
      const decision = this.decision(at, dim);
      if (decision && !decision.causes.length && at !== value) roots.push(at);
      for (const cause of decision?.causes ?? []) {
        if (came.has(cause) || cause >= this.model.size) continue;
        came.set(cause, at);
        queue.push(cause);
      }
    }
    const children = new Map<number, number[]>();
    const placed = new Set([value]);
    for (const root of roots) {
      for (let at = root; !placed.has(at); at = came.get(at)!) {
        placed.add(at);
        const parent = came.get(at)!;
        children.set(parent, [...(children.get(parent) ?? []), at]);
      }
    }
    // From the leaves up, for a chain may be longer than calls can be nested.
    const order = [value];
    for (const at of order) order.push(...(children.get(at) ?? []));
    const made = new Map<number, Cause>();
    for (const at of order.reverse()) {
      const decision = this.decision(at, dim) ?? { dim, rule: "", factor: "", why: "the compiler added it", causes: [], alternatives: [], exact: true };
      made.set(at, { value: at, decision, causes: (children.get(at) ?? []).map((child) => made.get(child)!) });
    }
    return made.get(value)!;
  }

  private decision(value: number, dim: number): Decision | undefined {
    return this.model.decisions(value).find((each) => each.dim === dim);
  }

  // -- what the compiler added -------------------------------------------------------------------------------------

  isAdded(value: number): boolean {
    return this.model.data.values.instruction[value]! >= 0 && !this.model.traced(value);
  }

  /** The tensors that a collective (or another value that the compiler added) moves; of a value of the program, and of a kernel, none. */
  moved(value: number): Moved[] {
    if (!this.isAdded(value) || this.model.kernels.has(value)) return [];
    const [mover, at] = this.mover(value);
    const which = at === null ? this.model.typesOf(mover).map((_, index) => index) : [at];
    return which.map((index) => this.movedAt(mover, index)).filter((each) => each !== null);
  }

  /** The collective that a value is, or is one result of, and which; for another value, itself. */
  private mover(value: number): [number, number | null] {
    const { model } = this;
    const index = element(model, value);
    const [producer] = model.reads(value);
    if (index !== null && model.reads(value).length === 1 && model.isCollective(producer!) && index < model.typesOf(producer!).length) return [producer!, index];
    return [value, model.isCollective(value) ? null : 0];
  }

  private movedAt(mover: number, index: number): Moved | null {
    const { model } = this;
    let results = [mover];
    let operand: number | undefined = model.reads(mover)[0];
    if (model.isCollective(mover)) {
      results = model.readers[mover]!.filter((reader) => element(model, reader) === index);
      operand = model.reads(mover).length === model.typesOf(mover).length ? model.reads(mover)[index] : undefined;
    }
    if (operand === undefined) return null;
    const value = this.origin(operand);
    const takers = [...new Set(results.flatMap((result) => this.takers(result)))];
    const dims = model.isCollective(mover) ? model.data.values.dims[mover]! : model.decisions(value).map((decision) => decision.dim);
    return {
      value,
      before: model.fullType(operand),
      after: model.typesOf(mover)[index]?.text ?? "none",
      why: results.map((result) => model.why(result)).find(Boolean) ?? model.why(mover),
      valueChains: this.chains([value], dims),
      takers,
      takerChains: this.chains(takers.slice(0, 1), dims),
    };
  }

  /** The program's own value behind what the compiler made of it. */
  private origin(value: number): number {
    const { model } = this;
    while (this.isAdded(value) && model.reads(value).length) {
      const producer = model.reads(value)[0]!;
      const index = element(model, value);
      const reads = model.reads(producer);
      const isOneOf = index !== null && model.isCollective(producer) && index < reads.length && reads.length === model.typesOf(producer).length;
      value = isOneOf ? reads[index]! : producer;
    }
    return value;
  }

  /** The program's own values that read what the compiler made. */
  private takers(value: number): number[] {
    const found: number[] = [];
    const waiting = [...new Set(this.model.readers[value]!)];
    const seen = new Set(waiting);
    for (const at of waiting) {
      if (!this.isAdded(at)) {
        found.push(at);
        continue;
      }
      for (const each of this.model.readers[at]!) {
        if (seen.has(each)) continue;
        seen.add(each);
        waiting.push(each);
      }
    }
    return found.sort((a, b) => a - b);
  }
}

function element(model: Model, value: number): number | null {
  const match = model.op(value) === "getitem" ? /^getitem\(%\w+, (\d{1,9})\)$/.exec(model.call(value)) : null;
  return match ? Number(match[1]) : null;
}

/** Whether the user said it: an input's or a state's layout, or a layout() line. */
function isSaid(decision: Decision): boolean {
  return (!decision.rule && !decision.causes.length) || decision.why.includes("layout() at ");
}

/** A way back, one value a line; it ends where it forks. */
export function lines(cause: Cause): Line[] {
  const way = [cause];
  while (way.at(-1)!.causes.length === 1) way.push(way.at(-1)!.causes[0]!);
  const found = way.map((step, at): Line => {
    const last = at === way.length - 1;
    return { value: step.value, first: at === 0, why: isSaid(step.decision) || last ? step.decision.why : "", below: last ? step.causes.map(lines) : [] };
  });
  if (found.length <= SHOWN) return found;
  return [...found.slice(0, SHOWN / 2), { more: found.slice(SHOWN / 2, -SHOWN / 2) }, ...found.slice(-SHOWN / 2)];
}
