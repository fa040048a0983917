// What a trace says: the median time of each value, and for each run the workers' spans and the critical path.

import type { TraceData } from "./data";
import type { Model } from "./model";

export interface Lane {
  worker: number;
  /** the value of each span; -1 for the commit at a step's end, which no value stands for */
  values: Int32Array;
  starts: Float64Array;
  ends: Float64Array;
  waited: Float64Array;
  held: Float64Array;
}

export interface Stretch {
  worker: number;
  value: number;
  start: number;
  end: number;
}

export interface Run {
  number: number;
  lanes: Lane[];
  critical: Stretch[];
  start: number;
  end: number;
}

export class Measured {
  readonly runs: Run[];
  /** seconds of each value, and of these the seconds in which it waited for peers; NaN where it was not measured */
  readonly seconds: Float64Array;
  readonly waited: Float64Array;

  constructor(
    private readonly model: Model,
    readonly data: TraceData,
  ) {
    const valueOf = new Map<number, number>();
    model.data.values.instruction.forEach((instruction, at) => {
      if (instruction >= 0) valueOf.set(instruction, at);
    });
    this.seconds = new Float64Array(model.size).fill(NaN);
    this.waited = new Float64Array(model.size).fill(NaN);
    for (const [instruction, took, waited] of data.instructions) {
      const at = valueOf.get(instruction);
      if (at === undefined) continue;
      this.seconds[at] = took * 1e-9;
      this.waited[at] = waited * 1e-9;
    }
    this.runs = data.steps.map(([number, parts, path]) => {
      const critical: Stretch[] = [];
      for (let at = 0; at < path.length; at += 4) {
        critical.push({ worker: path[at]!, value: valueOf.get(path[at + 1]!) ?? -1, start: path[at + 2]!, end: path[at + 3]! });
      }
      const lanes = parts.map(([worker, start, , flat]) => laneOf(worker, start, flat, valueOf));
      return { number, lanes, critical, start: Math.min(...parts.map((part) => part[1])), end: Math.max(...parts.map((part) => part[2])) };
    });
  }

  /** The coordinates of a worker, last mesh dim fastest. */
  point(worker: number): number[] {
    const point: number[] = [];
    for (const [, size] of [...this.model.data.mesh].reverse()) {
      point.unshift(worker % size);
      worker = Math.floor(worker / size);
    }
    return point;
  }
}

export function emptyLane(worker: number, spans: number): Lane {
  return { worker, values: new Int32Array(spans), starts: new Float64Array(spans), ends: new Float64Array(spans), waited: new Float64Array(spans), held: new Float64Array(spans) };
}

function laneOf(worker: number, start: number, flat: number[], valueOf: Map<number, number>): Lane {
  const lane = emptyLane(worker, flat.length / 5);
  let clock = start;
  for (let at = 0; at < lane.values.length; at += 1) {
    const from = clock + flat[at * 5 + 1]!;
    clock = from + flat[at * 5 + 2]!;
    lane.values[at] = valueOf.get(flat[at * 5]!) ?? -1;
    lane.starts[at] = from;
    lane.ends[at] = clock;
    lane.waited[at] = flat[at * 5 + 3]!;
    lane.held[at] = flat[at * 5 + 4]!;
  }
  return lane;
}
