// The plan as nested groups: phase, then the path of modules, then values. Modules that are alike and follow one another
// are one group, of which one is drawn; what belongs to no module is grouped by its line where it is much. A group with
// very many members is folded into runs in the order of the schedule, so that no view has to lay out more than LIMIT boxes.

import { count } from "./format";
import { type Model, PHASES, place } from "./model";

const LIMIT = 100;
const RUNS = 40;
/** So many ops of a line, without a module and one after the other, are a group. */
const MUCH = 6;

export type Item = Group | number;

export class Group {
  readonly children: Item[] = [];
  /** every value inside, in the order of the schedule */
  readonly members: number[] = [];
  /** of a group of modules that are all alike the one that is drawn, by its place among them; else -1 */
  at = -1;

  constructor(
    readonly key: string,
    public label: string,
    readonly phase: number,
    public parent: Group | null,
  ) {}

  get depth(): number {
    return this.parent ? this.parent.depth + 1 : 0;
  }

  /** The children that are drawn. */
  get drawn(): Item[] {
    return this.at < 0 ? this.children : [this.children[this.at]!];
  }

  /** For how many modules it stands, all alike: 1 for a group of different ones. */
  get times(): number {
    return this.at < 0 ? 1 : this.children.length;
  }

  *ancestors(): Iterable<Group> {
    for (let group: Group | null = this; group; group = group.parent) yield group;
  }
}

export class Tree {
  readonly root: Group;
  readonly groups = new Map<string, Group>();
  /** the innermost group of each value */
  readonly home: Group[] = [];

  constructor(private readonly model: Model) {
    this.root = this.group("", model.data.name, -1, null);
    const lines = this.lines();
    for (const at of model.all()) this.insert(at, lines.get(at));
    this.merge(this.root);
    this.repeat(this.root);
    this.fold(this.root);
    this.settle(this.root);
  }

  private group(key: string, label: string, phase: number, parent: Group | null): Group {
    const made = new Group(key, label, phase, parent);
    this.groups.set(key, made);
    parent?.children.push(made);
    return made;
  }

  /** For ops without a module the first of the ops of the same line that they follow, where these are many. */
  private lines(): Map<number, number> {
    const { model } = this;
    const found = new Map<number, number>();
    let run: number[] = [];
    const end = () => {
      if (run.length >= MUCH) for (const at of run) found.set(at, run[0]!);
      run = [];
    };
    for (const at of model.all()) {
      if (model.isInput(at)) continue;
      const [first] = run;
      const goesOn = first === undefined || (model.phase(first) === model.phase(at) && model.source(first) === model.source(at));
      if (model.module(at) || !model.source(at) || !goesOn) end();
      if (!model.module(at) && model.source(at)) run.push(at);
    }
    end();
    return found;
  }

  private insert(at: number, line: number | undefined): void {
    const phase = this.model.phase(at);
    let key = PHASES[phase] ?? "";
    let group = this.groups.get(key) ?? this.group(key, key, phase, this.root);
    if (line !== undefined) {
      key = `${key}/:${line}`;
      group = this.groups.get(key) ?? this.group(key, place(this.model.source(line)!), phase, group);
    }
    const path = this.model.module(at);
    for (const part of path ? path.split(".") : []) {
      key = `${key}/${part}`;
      group = this.groups.get(key) ?? this.group(key, part, phase, group);
    }
    group.children.push(at);
  }

  /** A group whose only member is a group takes its place: `blocks` and `0` become `blocks.0`. */
  private merge(group: Group): void {
    group.children.forEach((child, at) => {
      if (!(child instanceof Group)) return;
      let inner = child;
      while (inner.children.length === 1 && inner.children[0] instanceof Group && inner.depth > 1) {
        const only: Group = inner.children[0];
        only.label = `${inner.label}.${only.label}`;
        only.parent = group;
        this.groups.delete(inner.key);
        inner = only;
      }
      group.children[at] = inner;
      this.merge(inner);
    });
  }

  /** Modules that are alike and follow one another become one group; where all of a group's are, it is that group. */
  private repeat(group: Group): void {
    for (const child of group.children) if (child instanceof Group) this.repeat(child);
    const found: Item[][] = [];
    let before = "";
    for (const child of group.children) {
      const like = child instanceof Group && /^\d/.test(child.label) ? this.likeness(child) : "";
      if (like && like === before) found[found.length - 1]!.push(child);
      else found.push([child]);
      before = like;
    }
    if (found.length === 1 && found[0]!.length > 1) group.at = 0;
    else if (found.length < group.children.length) {
      group.children.length = 0;
      for (const run of found) {
        if (run.length === 1) {
          group.children.push(run[0]!);
          continue;
        }
        const [first, last] = [run[0] as Group, run[run.length - 1] as Group];
        const together = this.group(`${first.key}×`, `${first.label} … ${last.label}`, group.phase, group);
        together.at = 0;
        together.children.push(...run);
        for (const each of run) (each as Group).parent = together;
      }
    }
  }

  /** What alike groups have in common: their ops, types and traffic, whatever the order of what could come in any. */
  private likeness(item: Item): string {
    if (item instanceof Group) return `${item.label.replace(/^\d+/, "")}(${item.children.map((child) => this.likeness(child)).sort().join(" ")})`;
    const { op, types, dims } = this.model.data.values;
    return `${op[item]}:${types[item]!.join(",")}:${dims[item]!.join(",")}`;
  }

  private fold(group: Group): void {
    if (group.at < 0 && group.children.length > LIMIT) {
      const least = group.children.length / RUNS;
      const step = [10, 20, 50, 100, 200, 500, 1000].find((size) => size >= least) ?? Math.ceil(least);
      const members = group.children.splice(0);
      for (let from = 0; from < members.length; from += step) {
        const part = members.slice(from, from + step);
        const run = this.group(`${group.key}#${from}`, this.runLabel(part, from), group.phase, group);
        for (const member of part) if (member instanceof Group) member.parent = run;
        run.children.push(...part);
      }
    }
    for (const child of group.children) if (child instanceof Group) this.fold(child);
  }

  private runLabel(part: Item[], from: number): string {
    const [first, last] = [part[0]!, part[part.length - 1]!];
    if (first instanceof Group && last instanceof Group) return `${first.label} … ${last.label}`;
    return `${from} … ${from + part.length - 1}`;
  }

  private settle(group: Group): void {
    for (const child of group.children) {
      if (child instanceof Group) {
        this.settle(child);
        for (const member of child.members) group.members.push(member);
      } else {
        group.members.push(child);
        this.home[child] = group;
      }
    }
    group.members.sort((a, b) => a - b);
  }

  /** The child of `group` in which a value lies; null where it lies outside. */
  within(group: Group, at: number): Item | null {
    let inner: Item = at;
    for (const outer of this.home[at]!.ancestors()) {
      if (outer === group) return inner;
      inner = outer;
    }
    return null;
  }

  describe(group: Group): string {
    const collectives = this.model.runs(group.members);
    const ops = group.members.filter((at) => this.model.isOp(at)).length;
    if (group.at >= 0) return `×${group.times}: ${this.describe(group.children[group.at] as Group)} each`;
    return [ops ? count(ops, "op") : count(group.members.length, "input"), collectives ? count(collectives, "collective") : ""]
      .filter(Boolean)
      .join(" · ");
  }

  path(group: Group): string {
    return [...group.ancestors()].map((each) => each.label).reverse().slice(1).join(" › ") || group.label;
  }
}
