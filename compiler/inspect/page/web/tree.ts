// The plan as nested groups: phase, then the path of modules, then values. A group with very many members is folded into
// runs in the order of the schedule, so that no view has to lay out more than LIMIT boxes.

import { count } from "./format";
import { type Model, PHASES } from "./model";

const LIMIT = 100;
const RUNS = 40;

export type Item = Group | number;

export class Group {
  readonly children: Item[] = [];
  /** every value inside, in the order of the schedule */
  readonly members: number[] = [];

  constructor(
    readonly key: string,
    public label: string,
    readonly phase: number,
    public parent: Group | null,
  ) {}

  get depth(): number {
    return this.parent ? this.parent.depth + 1 : 0;
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
    for (const at of model.all()) this.insert(at);
    this.merge(this.root);
    this.fold(this.root);
    this.settle(this.root);
  }

  private group(key: string, label: string, phase: number, parent: Group | null): Group {
    const made = new Group(key, label, phase, parent);
    this.groups.set(key, made);
    parent?.children.push(made);
    return made;
  }

  private insert(at: number): void {
    const phase = this.model.phase(at);
    let key = PHASES[phase] ?? "";
    let group = this.groups.get(key) ?? this.group(key, key, phase, this.root);
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

  private fold(group: Group): void {
    if (group.children.length > LIMIT) {
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
    const collectives = group.members.filter((at) => this.model.isCollective(at)).length;
    const ops = group.members.filter((at) => this.model.isOp(at)).length;
    return [ops ? count(ops, "op") : count(group.members.length, "input"), collectives ? count(collectives, "collective") : ""]
      .filter(Boolean)
      .join(" · ");
  }

  path(group: Group): string {
    return [...group.ancestors()].map((each) => each.label).reverse().slice(1).join(" › ") || group.label;
  }
}
