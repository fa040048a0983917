// What a trace says: for each run and worker the spans of the plan's values, the mean time of each value, and the
// critical path.

import type { TraceData } from "./data";
import type { Model } from "./model";

export interface Lane {
  worker: number;
  start: number;
  end: number;
  /** the value of each span */
  values: Int32Array;
  starts: Float64Array;
  ends: Float64Array;
  held: Float64Array;
}

export interface Run {
  number: number;
  lanes: Lane[];
  start: number;
  end: number;
}

export class Measured {
  readonly runs: Run[] = [];
  /** mean seconds of each value over runs and workers; NaN where it was not measured */
  readonly seconds: Float64Array;

  constructor(
    private readonly model: Model,
    readonly data: TraceData,
  ) {
    const valueOf = new Map<number, number>();
    model.data.values.instruction.forEach((instruction, at) => {
      if (instruction >= 0) valueOf.set(instruction, at);
    });
    const sums = new Float64Array(model.size);
    const counts = new Float64Array(model.size);
    for (const [number, worker, start, end, flat] of data.steps) {
      const lane: Lane = { worker, start, end, values: new Int32Array(flat.length / 4), starts: new Float64Array(flat.length / 4), ends: new Float64Array(flat.length / 4), held: new Float64Array(flat.length / 4) };
      let clock = start;
      for (let at = 0; at * 4 < flat.length; at += 1) {
        const value = valueOf.get(flat[at * 4]!) ?? -1;
        const begin = clock + flat[at * 4 + 1]!;
        clock = begin + flat[at * 4 + 2]!;
        lane.values[at] = value;
        lane.starts[at] = begin;
        lane.ends[at] = clock;
        lane.held[at] = flat[at * 4 + 3]!;
        if (value >= 0) {
          sums[value] = sums[value]! + (clock - begin) * 1e-9;
          counts[value] = counts[value]! + 1;
        }
      }
      let run = this.runs.find((each) => each.number === number);
      if (!run) this.runs.push((run = { number, lanes: [], start, end }));
      run.lanes.push(lane);
      run.start = Math.min(run.start, start);
      run.end = Math.max(run.end, end);
    }
    this.seconds = sums.map((sum, at) => sum / counts[at]!);
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

  /**
   * The chain of spans that the run's end waited for, last first, as [lane, span]: backwards from the span that ended
   * last, to the one before it on the same worker; from a collective first to the worker of its group that came to it last.
   */
  critical(run: Run): [number, number][] {
    const points = run.lanes.map((lane) => this.point(lane.worker));
    const spanOf = run.lanes.map((lane) => {
      const found = new Map<number, number>();
      lane.values.forEach((value, at) => found.set(value, at));
      return found;
    });
    let lane = run.lanes.reduce((latest, each, at) => ((each.ends.at(-1) ?? 0) > (run.lanes[latest]!.ends.at(-1) ?? 0) ? at : latest), 0);
    let span = (run.lanes[lane]?.values.length ?? 0) - 1;
    const path: [number, number][] = [];
    while (span >= 0) {
      const value = run.lanes[lane]!.values[span]!;
      if (value >= 0 && this.model.isCollective(value)) {
        const dims = this.model.data.values.dims[value]!;
        const here = points[lane]!;
        for (const [other, point] of points.entries()) {
          if (point.some((place, dim) => !dims.includes(dim) && place !== here[dim])) continue;
          const there = spanOf[other]!.get(value);
          if (there !== undefined && run.lanes[other]!.starts[there]! > run.lanes[lane]!.starts[span]!) [lane, span] = [other, there];
        }
      }
      path.push([lane, span]);
      span -= 1;
    }
    return path;
  }
}
