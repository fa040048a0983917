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
const GAP = 26;

export interface Edge {
  points: [number, number][];
  label: string;
  at: [number, number] | null;
  values: number[];
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

/** A value from outside that ops of this group read. */
export interface Port {
  value: number;
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
    const inside: string[] = [];
    const visit = (each: Group) => {
      for (const child of each.children) {
        if (child instanceof Group && open.has(child)) {
          inside.push(child.key);
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
    for (const at of group.members) {
      const to = this.tree.within(group, at)!;
      for (const read of this.model.reads(at)) {
        const from = this.tree.within(group, read);
        if (from === null || from === to) continue;
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
      return [Math.max(170, textWidth(clipped(item.label, 36), 8) + 56, textWidth(this.tree.describe(item), 6) + 50), 54];
    }
    const text = Math.max(textWidth(clipped(this.model.op(item), 34), 7.4), textWidth(clipped(this.model.name(item), 38), 6.3));
    return [Math.max(130, text + (this.model.isCollective(item) ? 56 : 36)), 42];
  }

  private arrange(group: Group, open: Set<Group>): Inner {
    const isRoot = group === this.tree.root;
    const links = this.linksOf(group);
    const graph = new graphlib.Graph();
    // Bigger views take the faster ranking: the difference is in how tight long edges are.
    const ranker = group.children.length > 60 ? "tight-tree" : "network-simplex";
    graph.setGraph({ rankdir: isRoot ? "LR" : "TB", nodesep: 26, ranksep: isRoot ? 50 : 22, edgesep: 14, ranker });
    graph.setDefaultEdgeLabel(() => ({}));

    const boxes = new Map<string, Box>();
    const outside = this.outside(group);
    const linked = new Set<Item>([...links.flatMap((link) => [link.from, link.to]), ...[...outside.values()].flat()]);
    const leaves = new Set(links.map((link) => keyOf(link.from)));
    for (const item of group.children) {
      const inner = item instanceof Group && open.has(item) ? this.inside(item, open) : null;
      const [width, height] = inner ? [Math.max(inner.width, this.size(item)[0]) + 2 * PAD, inner.height + HEADER + PAD] : this.size(item);
      const stub = !(item instanceof Group) && !leaves.has(keyOf(item)) ? clipped(this.model.typeText(item), LABEL) : "";
      boxes.set(keyOf(item), { item, x: 0, y: 0, width, height, stub, inner });
      if (!linked.has(item)) continue;
      graph.setNode(keyOf(item), { width: Math.max(width, textWidth(stub)), height: height + (stub ? STUB : 0) });
    }
    // The same value goes to many readers under one label; the first edge has it.
    const labelled = new Set<number>();
    for (const link of links) {
      const single = link.values.length === 1 ? link.values[0]! : -1;
      const label = single >= 0 && labelled.has(single) ? "" : this.linkLabel(link.values);
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
    for (const [value, readers] of outside) {
      const key = `p${value}`;
      graph.setNode(key, { width: textWidth(`%${clipped(this.model.name(value), 26)}`, 6.6) + 18, height: 20 });
      for (const reader of readers) graph.setEdge(key, `v${reader}`, { port: value, width: 0, height: 0, weight: 1 });
    }
    if (graph.nodeCount()) layout(graph);
    return pack(this.collect(graph, boxes, outside), [...boxes.values()].filter((box) => !linked.has(box.item)));
  }

  private outside(group: Group): Map<number, number[]> {
    const ports = new Map<number, number[]>();
    const values = group.children.filter((item): item is number => !(item instanceof Group));
    if (group.children.length > 60) return ports;
    for (const at of values) {
      for (const read of this.model.reads(at)) {
        if (this.tree.within(group, read) !== null) continue;
        const readers = ports.get(read);
        if (readers) readers.push(at);
        else ports.set(read, [at]);
      }
    }
    return ports;
  }

  private collect(graph: graphlib.Graph, boxes: Map<string, Box>, outside: Map<number, number[]>): Inner {
    for (const [key, box] of boxes) {
      if (!graph.hasNode(key)) continue;
      const at = graph.node(key) as { x: number; y: number; height: number };
      box.x = at.x - box.width / 2;
      box.y = at.y - at.height / 2;
    }
    const ports = [...outside.keys()].map((value): Port => {
      const at = graph.node(`p${value}`) as { x: number; y: number; width: number; height: number };
      return { value, x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width };
    });
    const edges = graph.edges().map((end): Edge => {
      const edge = graph.edge(end) as { points: { x: number; y: number }[]; text?: string; x?: number; y?: number; link?: Link; port?: number };
      const points = edge.points.map(({ x, y }): [number, number] => [x, y]);
      const source = boxes.get(end.v);
      // A box with a stub is taller for dagre than it is drawn; edges start at what is drawn.
      if (source?.stub) points[0] = [points[0]![0], source.y + source.height];
      const at: [number, number] | null = edge.text && edge.x !== undefined ? [edge.x, edge.y!] : null;
      return { points, label: edge.text ?? "", at, values: edge.link?.values ?? [edge.port!] };
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
