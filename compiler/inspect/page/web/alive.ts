// Which buffers are alive at a place in the schedule. A value that takes no memory of its own (a view, an update in
// place) lies in that of the first value it reads, and keeps it alive.

import type { Model } from "./model";

export class Alive {
  /** the value in whose memory each value lies */
  private readonly owner: Int32Array;
  private readonly last: Int32Array;

  constructor(private readonly model: Model) {
    const { allocates } = model.data.values;
    this.owner = new Int32Array(model.size);
    this.last = new Int32Array(model.size);
    for (const at of model.all()) {
      const first = model.reads(at)[0];
      const owner = allocates[at] === 0 && first !== undefined ? this.owner[first]! : at;
      this.owner[at] = owner;
      this.last[owner] = at;
      for (const read of model.reads(at)) this.last[this.owner[read]!] = at;
    }
    for (const at of model.all()) if (model.isInput(at)) this.last[at] = model.size;
    for (const [at] of model.data.outputs) this.last[this.owner[at]!] = model.size;
  }

  /** The values that hold memory behind value `at`, largest first. */
  behind(at: number): number[] {
    const { allocates } = this.model.data.values;
    const found: number[] = [];
    for (let value = 0; value <= at; value += 1) {
      if (allocates[value]! > 0 && this.last[value]! >= at) found.push(value);
    }
    return found.sort((a, b) => allocates[b]! - allocates[a]!);
  }

  /** When it is dropped, or null where it stays. */
  until(at: number): number | null {
    const last = this.last[this.owner[at]!]!;
    return last >= this.model.size ? null : last;
  }
}
