// Where boxes and edges lie. Each open group is laid out by itself (dagre, layered), from the inside out: an edge that
// leaves a group is drawn between the groups that hold its ends, where those are neighbours. So opening a layer lays
// out that layer and those around it, whatever the size of the plan.

import { graphlib, layout } from "@dagrejs/dagre";
import { bytes, clipped, count } from "./format";
import type { Model } from "./model";
import { localBytes } from "./layouts";
import { Group, type Item, type Tree } from "./tree";

export const HEADER = 34;
const PAD = 14;
const STUB = 18;
const LABEL = 42;
/** Longer names are clipped. */
export const NAME = 72;
const GAP = 26;
/** Of more edges at one box no labels are drawn, and more values from outside that one op reads are one port. */
const MANY = 6;

export interface Edge {
  points: [number, number][];
  label: string;
  at: [number, number] | null;
  values: number[];
  /** whether it goes from left to right, and not from above to below */
  across: boolean;
}

export interface Box {
  item: Item;
  x: number;
  y: number;
  width: number;
  height: number;
  /** what leaves the group from here, where nothing in the group reads it */
  stub: string;
  inner: Inner | null;
}

/** A value from outside that ops of this group read, or, of an op that reads very many, all of these. */
export interface Port {
  values: number[];
  x: number;
  y: number;
  width: number;
}

export interface Inner {
  boxes: Box[];
  edges: Edge[];
  ports: Port[];
  width: number;
  height: number;
}

interface Link {
  from: Item;
  to: Item;
  values: number[];
}

export const keyOf = (item: Item): string => (item instanceof Group ? `g${item.key}` : `v${item}`);
const textWidth = (text: string, size = 6.3): number => text.length * size;

export class Placer {
  private readonly links = new Map<Group, Link[]>();
  private readonly kept = new Map<Group, { opened: string; inner: Inner }>();
  /** whether the phases stand beside each other, and not below each other */
  across = true;

  constructor(
    private readonly model: Model,
    private readonly tree: Tree,
  ) {}

  /** The insides of a group; `open` are the groups that are expanded. */
  inside(group: Group, open: Set<Group>): Inner {
    const opened = this.openIn(group, open);
    const kept = this.kept.get(group);
    if (kept?.opened === opened) return kept.inner;
    const inner = this.arrange(group, open);
    this.kept.set(group, { opened, inner });
    return inner;
  }

  private openIn(group: Group, open: Set<Group>): string {
    const inside: string[] = [`${group.at} ${group === this.tree.root && this.across}`];
    const visit = (each: Group) => {
      for (const child of each.drawn) {
        if (child instanceof Group && open.has(child)) {
          inside.push(`${child.key} ${child.at}`);
          visit(child);
        }
      }
    };
    visit(group);
    return inside.join("\n");
  }

  private linksOf(group: Group): Link[] {
    const kept = this.links.get(group);
    if (kept) return kept;
    const found = new Map<string, Link>();
    for (const at of group.at < 0 ? group.members : []) {
      const to = this.tree.within(group, at)!;
      for (const read of this.model.reads(at)) {
        const from = this.tree.within(group, read);
        if (from === null || from === to || this.isApart(group, from, read)) continue;
        const key = `${keyOf(from)} ${keyOf(to)}`;
        let link = found.get(key);
        if (!link) found.set(key, (link = { from, to, values: [] }));
        if (!link.values.includes(read)) link.values.push(read);
      }
    }
    const links = [...found.values()];
    this.links.set(group, links);
    return links;
  }

  /** Whether a value is a state that belongs to another module than its reader: no step flows along such an edge. */
  private isApart(group: Group, from: Item, read: number): boolean {
    return group !== this.tree.root && from instanceof Group && this.model.isInput(read);
  }

  linkLabel(values: number[]): string {
    if (values.length === 1) return clipped(this.model.typeText(values[0]!), LABEL);
    let total = 0;
    for (const value of values) {
      const type = this.model.type(value);
      if (type) total += localBytes(this.model, type);
    }
    return `${count(values.length, "tensor")} · ${bytes(total)}`;
  }

  size(item: Item): [number, number] {
    if (item instanceof Group) {
      return [Math.max(170, textWidth(titleOf(item), 8) + 56, textWidth(this.tree.describe(item), 6) + 50), 54];
    }
    const text = Math.max(textWidth(clipped(this.model.op(item), NAME), 7.4), textWidth(clipped(this.model.name(item), NAME), 6.3));
    return [Math.max(130, text + (this.model.isCollective(item) ? 56 : 36)), 42];
  }

  private arrange(group: Group, open: Set<Group>): Inner {
    const across = group === this.tree.root && this.across;
    const links = this.linksOf(group);
    const graph = new graphlib.Graph();
    // Bigger views take the faster ranking: the difference is in how tight long edges are.
    const ranker = group.children.length > 60 ? "tight-tree" : "network-simplex";
    graph.setGraph({ rankdir: across ? "LR" : "TB", nodesep: 26, ranksep: across ? 50 : 22, edgesep: 14, ranker });
    graph.setDefaultEdgeLabel(() => ({}));

    const boxes = new Map<string, Box>();
    const ends = new Map<Item, number>();
    const outside = this.outside(group);
    const linked = new Set<Item>([...links.flatMap((link) => [link.from, link.to]), ...outside.flatMap(({ readers }) => readers)]);
    const leaves = new Set(links.map((link) => keyOf(link.from)));
    for (const item of group.drawn) {
      const inner = item instanceof Group && open.has(item) ? this.inside(item, open) : null;
      const [width, height] = inner ? [Math.max(inner.width, this.size(item)[0]) + 2 * PAD, inner.height + HEADER + PAD] : this.size(item);
      const stub = !(item instanceof Group) && !leaves.has(keyOf(item)) ? clipped(this.model.typeText(item), LABEL) : "";
      boxes.set(keyOf(item), { item, x: 0, y: 0, width, height, stub, inner });
      if (!linked.has(item)) continue;
      ends.set(item, 0);
      graph.setNode(keyOf(item), { width: Math.max(width, textWidth(stub)), height: height + (stub ? STUB : 0) });
    }
    // The same value goes to many readers under one label; the first edge has it.
    const labelled = new Set<number>();
    for (const { from, to } of links) for (const end of [from, to]) ends.set(end, ends.get(end)! + 1);
    for (const link of links) {
      const single = link.values.length === 1 ? link.values[0]! : -1;
      const isBare = (single >= 0 && labelled.has(single)) || Math.max(ends.get(link.from)!, ends.get(link.to)!) > MANY;
      const label = isBare ? "" : this.linkLabel(link.values);
      labelled.add(single);
      graph.setEdge(keyOf(link.from), keyOf(link.to), {
        link,
        text: label,
        width: label ? textWidth(label) + 8 : 0,
        height: label ? 16 : 0,
        labelpos: "c",
        weight: link.from instanceof Group ? 1 : 2,
      });
    }
    for (const { values, readers } of outside) {
      const key = `p${values[0]}`;
      graph.setNode(key, { width: textWidth(this.portLabel(values), 6.6) + 18, height: 20 });
      for (const reader of readers) graph.setEdge(key, `v${reader}`, { port: values, width: 0, height: 0, weight: 1 });
    }
    if (graph.nodeCount()) layout(graph);
    return pack(this.collect(graph, boxes, outside, across), [...boxes.values()].filter((box) => !linked.has(box.item)));
  }

  portLabel(values: number[]): string {
    const name = `%${clipped(this.model.name(values[0]!), NAME)}`;
    return values.length > 1 ? `${name} and ${values.length - 1} more` : name;
  }

  private outside(group: Group): { values: number[]; readers: number[] }[] {
    const single = new Map<number, number[]>();
    const together: { values: number[]; readers: number[] }[] = [];
    const values = group.children.filter((item): item is number => !(item instanceof Group));
    if (group.children.length > 60) return together;
    for (const at of values) {
      const reads = this.model.reads(at).filter((read) => {
        const from = this.tree.within(group, read);
        return from === null || this.isApart(group, from, read);
      });
      if (reads.length > MANY) together.push({ values: reads, readers: [at] });
      else for (const read of reads) single.set(read, [...(single.get(read) ?? []), at]);
    }
    const first = new Set(together.map(({ values }) => values[0]!));
    return [...together, ...[...single].filter(([value]) => !first.has(value)).map(([value, readers]) => ({ values: [value], readers }))];
  }

  private collect(graph: graphlib.Graph, boxes: Map<string, Box>, outside: { values: number[] }[], across: boolean): Inner {
    for (const [key, box] of boxes) {
      if (!graph.hasNode(key)) continue;
      const at = graph.node(key) as { x: number; y: number; height: number };
      box.x = at.x - box.width / 2;
      box.y = at.y - at.height / 2;
    }
    const ports = outside.map(({ values }): Port => {
      const at = graph.node(`p${values[0]}`) as { x: number; y: number; width: number; height: number };
      return { values, x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width };
    });
    const rows = rowsOf(graph, across);
    const edges = graph.edges().map((end): Edge => {
      const edge = graph.edge(end) as { points: { x: number; y: number }[]; text?: string; x?: number; y?: number; link?: Link; port?: number[] };
      const [from, to] = [end.v, end.w].map((key) => ({ ...(graph.node(key) as Node), width: boxes.get(key)?.width ?? (graph.node(key) as Node).width })) as [Node, Node];
      const points = routed(edge.points.slice(1, -1), from, to, rows, across);
      const at: [number, number] | null = edge.text && edge.x !== undefined ? [edge.x, edge.y!] : null;
      return { points, label: edge.text ?? "", at, values: edge.link?.values ?? edge.port!, across };
    });
    const { width = 0, height = 0 } = graph.graph() as { width?: number; height?: number };
    return { boxes: [...boxes.values()], edges, ports, width, height };
  }
}

/** Boxes that nothing links stand in rows below the others, about as wide as all of it is high. */
function pack(inner: Inner, loose: Box[]): Inner {
  if (!loose.length) return inner;
  const area = loose.reduce((sum, box) => sum + (box.width + GAP) * (box.height + STUB + GAP), 0);
  const most = Math.max(inner.width, Math.sqrt(area * 1.4), ...loose.map((box) => box.width));
  const top = inner.height ? inner.height + GAP : 0;
  let [x, y, high, wide] = [0, top, 0, inner.width];
  for (const box of loose) {
    if (x > 0 && x + box.width > most) [x, y, high] = [0, y + high + GAP, 0];
    Object.assign(box, { x, y });
    x += box.width + GAP;
    high = Math.max(high, box.height + (box.stub ? STUB : 0));
    wide = Math.max(wide, x - GAP);
  }
  return { ...inner, width: wide, height: y + high };
}

interface Node {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** From where to where each row of boxes reaches, by its middle: dagre has the middles of a row in one line. */
function rowsOf(graph: graphlib.Graph, across: boolean): Map<number, number> {
  const rows = new Map<number, number>();
  for (const key of graph.nodes()) {
    const { x, y, width, height } = graph.node(key) as Node;
    const [middle, half] = across ? [Math.round(x), width / 2] : [Math.round(y), height / 2];
    rows.set(middle, Math.max(rows.get(middle) ?? 0, half));
  }
  return rows;
}

/** An edge's points: past a row of boxes it goes straight, where dagre left room for it, and bends between rows only. */
function routed(inner: { x: number; y: number }[], from: Node, to: Node, rows: Map<number, number>, across: boolean): [number, number][] {
  const flip = <T extends { x: number; y: number }>({ x, y }: T): [number, number] => (across ? [y, x] : [x, y]);
  const [, start] = flip(from);
  const [, end] = flip(to);
  const way = Math.sign(end - start) || 1;
  const points: [number, number][] = [];
  const side = (node: Node, next: { x: number; y: number }, towards: number) => {
    const [at, middle] = flip(node);
    const [wide, high] = across ? [node.height, node.width] : [node.width, node.height];
    const room = Math.max(0, wide / 2 - 12);
    const row = rows.get(Math.round(middle)) ?? high / 2;
    const x = Math.min(at + room, Math.max(at - room, flip(next)[0]));
    const [own, edge] = [middle + (towards * high) / 2, middle + towards * row];
    return [[x, own], [x, edge]] as [number, number][];
  };
  points.push(...side(from, inner[0] ?? to, way));
  for (const point of inner) {
    const [x, y] = flip(point);
    const half = rows.get(Math.round(y)) ?? 0;
    points.push([x, y - way * half], [x, y + way * half]);
  }
  points.push(...side(to, inner[inner.length - 1] ?? from, -way).reverse());
  return across ? points.map(([x, y]) => [y, x]) : points;
}

/** What stands at the head of a group's box. */
export function titleOf(group: Group): string {
  return clipped(group.times > 1 ? `${group.label} ×${group.times}` : group.label, 40);
}
