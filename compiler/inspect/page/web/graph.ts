// The graph view: boxes and edges as SVG. Only what lies near the viewport and is large enough to be seen is in the
// document, so that opening every layer of a large plan costs no more than what fits on the screen.

import { add, h, replace, svg } from "./dom";
import { clipped, seconds } from "./format";
import { kindOf, swatch } from "./layouts";
import { type Model, PHASES } from "./model";
import { type Box, type Edge, HEADER, type Inner, keyOf, NAME, Placer, titleOf } from "./place";
import type { State, Store } from "./store";
import { Group, type Item, type Tree } from "./tree";
import { Zoom } from "./zoom";

interface Placed {
  box: Box;
  x: number;
  y: number;
  parent: Group;
}

const TINY = 5;
/** The least scale at which names can be read. */
const READABLE = 0.6;
/** With so many boxes inside them groups are not open at first. */
const FIRST = 48;

export class GraphView {
  readonly element = h("div", { class: "graph" });
  private readonly crumbs = h("nav", { class: "crumbs", "aria-label": "Path to the selection" });
  private readonly surface = svg("svg", { class: "surface", tabindex: 0, role: "tree", "aria-label": "The plan's graph, by phase and module" });
  private readonly world = svg("g", {});
  private readonly placer: Placer;
  private readonly zoom: Zoom;
  private readonly open = new Set<Group>();
  private root: Inner = { boxes: [], edges: [], ports: [], width: 0, height: 0 };
  private placed = new Map<string, Placed>();
  private drawn = { x: 0, y: 0, width: -1, height: -1, scale: 0 };
  private fitted = false;
  private before = { x: 0, y: 0, scale: 1 };

  constructor(
    private readonly model: Model,
    private readonly tree: Tree,
    private readonly store: Store,
  ) {
    this.placer = new Placer(model, tree);
    this.openPhases();
    this.zoom = new Zoom(this.surface, () => this.moved());
    const marker = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" });
    marker.append(svg("path", { d: "M0,0.8 L7.5,4 L0,7.2 z" }));
    this.surface.append(svg("defs", {}, marker), this.world);
    const button = (label: string, text: string, act: () => void) => h("button", { type: "button", "aria-label": label, title: label, click: act }, text);
    const controls = h(
      "div",
      { class: "controls" },
      button("Zoom in (+)", "+", () => this.zoomBy(1.35)),
      button("Zoom out (-)", "−", () => this.zoomBy(1 / 1.35)),
      button("Show everything (0)", "⤢", () => this.fitAll()),
      button("Collapse all groups (C)", "⊟", () => this.collapseAll()),
    );
    add(this.element, this.crumbs, this.surface, controls);
    this.surface.addEventListener("click", (event) => this.clicked(event));
    this.surface.addEventListener("dblclick", (event) => this.doubled(event));
    this.surface.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resized()).observe(this.surface);
    this.relayout();
    store.on((state, before) => this.changed(state, before));
    if (store.state.value >= 0 || store.state.group) this.reveal(store.state);
    this.showCrumbs();
  }

  private relayout(): void {
    this.root = this.placer.inside(this.tree.root, this.open);
    this.placed = new Map();
    const visit = (inner: Inner, x: number, y: number, parent: Group) => {
      for (const box of inner.boxes) {
        const [left, top] = [x + box.x, y + box.y];
        this.placed.set(keyOf(box.item), { box, x: left, y: top, parent });
        if (box.inner && box.item instanceof Group) visit(box.inner, left + (box.width - box.inner.width) / 2, top + HEADER, box.item);
      }
    };
    visit(this.root, 0, 0, this.tree.root);
    this.draw();
  }

  private resized(): void {
    if (this.fitted) return this.moved();
    if (!this.surface.clientWidth) return;
    this.fitted = true;
    const { value, group } = this.store.state;
    if (value >= 0 || group) return this.showItem(this.chosen()!, false);
    this.closeUnreadable();
    this.openReadable();
    this.relayout();
    this.fitStart();
  }

  /** At first: everything, if it can be read at that size; else the beginning. */
  private fitStart(): void {
    const { width, height } = this.root;
    this.zoom.fit(0, 0, width, height, 1, false);
    if (this.zoom.scale >= READABLE) return;
    const left = Math.max(24, (this.surface.clientWidth - width * READABLE) / 2);
    this.zoom.to(left, 24, READABLE, false);
  }

  fitAll(): void {
    this.zoom.fit(0, 0, this.root.width, this.root.height, 1.2);
  }

  /** Everything on paper, and afterwards what was seen before. */
  print(on: boolean): void {
    const { x, y, scale } = this.zoom;
    if (on) {
      this.before = { x, y, scale };
      this.zoom.fit(0, 0, this.root.width, this.root.height, 1.2, false);
    } else this.zoom.to(this.before.x, this.before.y, this.before.scale, false);
    this.moved();
    this.draw();
  }

  zoomBy(factor: number): void {
    this.zoom.around(this.surface.clientWidth / 2, this.surface.clientHeight / 2, factor);
  }

  collapseAll(): void {
    this.openPhases();
    this.closeUnreadable();
    this.relayout();
    this.fitAll();
  }

  private openPhases(): void {
    this.open.clear();
    this.open.add(this.tree.root);
    for (const child of this.tree.root.children) if (child instanceof Group) this.open.add(child);
  }

  /** Phases stand beside or below each other, and are closed, the last first, until all can be read that is open. */
  private closeUnreadable(): void {
    for (const phase of [null, ...[...this.tree.root.children].reverse()]) {
      if (phase instanceof Group) this.open.delete(phase);
      if (this.turn() >= READABLE) return;
    }
  }

  /** Opens what is in open groups, level by level, as far as all of it can still be read. */
  private openReadable(): void {
    const groupsIn = (level: Group[]) => level.flatMap((group) => group.drawn.filter((child): child is Group => child instanceof Group));
    const phases = groupsIn([this.tree.root]).filter((phase) => this.open.has(phase));
    for (let level = groupsIn(phases); level.length; level = groupsIn(level)) {
      for (const group of level) this.open.add(group);
      const boxes = level.reduce((sum, group) => sum + group.drawn.length, 0);
      if (boxes > FIRST || this.turn() < READABLE) {
        for (const group of level) this.open.delete(group);
        break;
      }
    }
    this.turn();
  }

  /** Puts the phases beside or below each other, as they are shown larger; how large that is. */
  private turn(): number {
    const [beside, below] = [true, false].map((across) => {
      this.placer.across = across;
      const { width, height } = this.placer.inside(this.tree.root, this.open);
      return this.zoom.fitting(width, height);
    }) as [number, number];
    this.placer.across = beside >= below;
    return Math.max(beside, below);
  }

  private moved(): void {
    const { x, y, scale } = this.zoom;
    this.world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
    const { clientWidth: width, clientHeight: height } = this.surface;
    const [left, top] = [-x / scale, -y / scale];
    const drawn = this.drawn;
    const inside = left >= drawn.x && top >= drawn.y && left + width / scale <= drawn.x + drawn.width && top + height / scale <= drawn.y + drawn.height;
    if (!inside || scale / drawn.scale > 1.5 || scale / drawn.scale < 0.66) this.draw();
  }

  private draw(): void {
    const { x, y, scale } = this.zoom;
    const { clientWidth: width, clientHeight: height } = this.surface;
    const [w, h] = [width / scale, height / scale];
    this.drawn = { x: -x / scale - w / 2, y: -y / scale - h / 2, width: 2 * w, height: 2 * h, scale };
    const parts: SVGElement[] = [];
    this.drawInner(this.root, 0, 0, parts);
    this.world.replaceChildren(...parts);
    this.world.classList.toggle("far", scale < 0.42);
    this.drawLinks();
  }

  private visible(x: number, y: number, width: number, height: number): boolean {
    const drawn = this.drawn;
    return x < drawn.x + drawn.width && x + width > drawn.x && y < drawn.y + drawn.height && y + height > drawn.y && height * drawn.scale > TINY;
  }

  private drawInner(inner: Inner, x: number, y: number, parts: SVGElement[]): void {
    const labels: SVGElement[] = [];
    for (const edge of inner.edges) this.drawEdge(edge, x, y, parts, labels);
    parts.push(...labels);
    for (const box of inner.boxes) {
      const [left, top] = [x + box.x, y + box.y];
      if (!this.visible(left, top, box.width, box.height)) continue;
      parts.push(box.item instanceof Group ? this.groupBox(box.item, box, left, top) : this.valueBox(box.item, box, left, top));
      if (box.inner) this.drawInner(box.inner, left + (box.width - box.inner.width) / 2, top + HEADER, parts);
    }
    for (const port of inner.ports) {
      if (!this.visible(x + port.x, y + port.y, port.width, 20)) continue;
      const chip = svg("g", { class: "port", "data-value": port.values[0], transform: `translate(${x + port.x} ${y + port.y})` });
      chip.append(svg("title", {}, `${port.values.slice(0, 12).map((value) => `%${this.model.name(value)}`).join(", ")}${port.values.length > 12 ? ", …" : ""}, from outside this group`), svg("rect", { width: port.width, height: 20, rx: 10 }));
      chip.append(svg("text", { x: port.width / 2, y: 14, "text-anchor": "middle" }, this.placer.portLabel(port.values)));
      parts.push(chip);
    }
  }

  private drawEdge(edge: Edge, x: number, y: number, parts: SVGElement[], labels: SVGElement[]): void {
    const xs = edge.points.map((point) => point[0] + x);
    const ys = edge.points.map((point) => point[1] + y);
    const [left, top] = [Math.min(...xs), Math.min(...ys)];
    if (!this.visible(left, top, Math.max(...xs) - left + 1, Math.max(TINY / this.drawn.scale + 1, Math.max(...ys) - top))) return;
    parts.push(svg("path", { class: edge.values.some((at) => this.model.isCollective(at)) && edge.values.length === 1 ? "edge moved" : "edge", d: curve(xs, ys, edge.across), "marker-end": "url(#arrow)" }));
    if (edge.at && this.drawn.scale > 0.3) {
      labels.push(svg("text", { class: "type", x: edge.at[0] + x, y: edge.at[1] + y + 4, "text-anchor": "middle" }, edge.label));
    }
  }

  private classes(item: Item, kind: string): string {
    const { value, group, dim, layout } = this.store.state;
    const names = [kind, PHASES[item instanceof Group ? item.phase : this.model.phase(item)] ?? ""];
    if (item instanceof Group ? item.key === group : item === value) names.push("selected");
    const members = item instanceof Group ? item.members : [item];
    const off =
      (dim >= 0 && !members.some((at) => this.model.collectivesOf(at).some(({ dims }) => dims.includes(dim)))) ||
      (layout && !members.some((at) => kindOf(this.model, this.model.type(at)).key === layout));
    if (off) names.push("faded");
    return names.join(" ");
  }

  private groupBox(group: Group, box: Box, x: number, y: number): SVGElement {
    const isOpen = box.inner !== null;
    const text = this.tree.describe(group);
    const label = `${titleOf(group)}, ${PHASES[group.phase] ?? ""} group, ${text}`;
    const element = svg("g", {
      id: `box-${keyOf(group)}`, class: this.classes(group, isOpen ? "group open" : "group"), "data-group": group.key, role: "treeitem",
      "aria-expanded": String(isOpen), "aria-selected": String(this.store.state.group === group.key), "aria-label": label, transform: `translate(${x} ${y})`,
    });
    element.append(svg("title", {}, label));
    // Those behind the first of a stack: it stands for several that are alike.
    if (group.times > 1 && !isOpen) for (const behind of [6, 3]) element.append(svg("rect", { class: "frame behind", x: behind, y: behind, width: box.width, height: box.height, rx: 8 }));
    element.append(svg("rect", { class: "frame", width: box.width, height: box.height, rx: 8 }));
    const toggle = svg("g", { class: "toggle", "data-toggle": group.key });
    toggle.append(svg("rect", { x: 8, y: 8, width: 18, height: 18, rx: 4 }), svg("path", { d: isOpen ? "M12,17 H22" : "M12,17 H22 M17,12 V22" }));
    element.append(toggle, svg("text", { class: "title", x: 34, y: 22 }, titleOf(group)));
    if (isOpen && group.times > 1) element.append(...this.pages(group, box));
    else if (isOpen) {
      const room = Math.floor((box.width - 60 - group.label.length * 8) / 6);
      if (room >= text.length) element.append(svg("text", { class: "stats", x: box.width - 12, y: 22, "text-anchor": "end" }, text));
    } else {
      element.append(svg("text", { class: "stats", x: 34, y: 38 }, text), this.mix(group, 34, 44, box.width - 46));
    }
    return element;
  }

  /** At the head of modules that are alike: which of them is drawn, and the ways to the others. */
  private pages(group: Group, box: Box): SVGElement[] {
    const shown = group.children[group.at] as Group;
    const step = (way: number, text: string) => {
      const x = box.width - (way < 0 ? 92 : 30);
      const button = svg("g", { class: "toggle", "data-toggle": group.key, "data-step": way, "aria-label": way < 0 ? "the one before" : "the next one" });
      button.append(svg("rect", { x, y: 8, width: 18, height: 18, rx: 4 }), svg("text", { x: x + 9, y: 21, "text-anchor": "middle" }, text));
      return button;
    };
    return [step(-1, "‹"), svg("text", { class: "stats", x: box.width - 52, y: 22, "text-anchor": "middle" }, clipped(shown.label, 6)), step(1, "›")];
  }

  /** How the group's values lie, as shares of a bar. */
  private mix(group: Group, x: number, y: number, width: number): SVGElement {
    const shares = new Map<string, { kind: ReturnType<typeof kindOf>; count: number }>();
    for (const at of group.members) {
      const kind = kindOf(this.model, this.model.type(at));
      const share = shares.get(kind.key);
      if (share) share.count += 1;
      else shares.set(kind.key, { kind, count: 1 });
    }
    const bar = svg("g", { class: "mix" });
    for (const { kind, count } of [...shares.values()].sort((a, b) => b.count - a.count)) {
      const w = (width * count) / group.members.length;
      bar.append(swatch(kind, x, y, Math.max(0.5, w - 1), 5));
      x += w;
    }
    return bar;
  }

  private valueBox(at: number, box: Box, x: number, y: number): SVGElement {
    const model = this.model;
    const moves = model.isCollective(at);
    const kind = moves ? "value collective" : model.isInput(at) ? "value input" : "value";
    const label = `%${model.name(at)}, ${model.op(at)}, ${model.typeText(at)}`;
    const element = svg("g", {
      id: `box-v${at}`, class: this.classes(at, kind), "data-value": at, role: "treeitem",
      "aria-selected": String(this.store.state.value === at), "aria-label": label, transform: `translate(${x} ${y})`,
    });
    element.append(svg("title", {}, label), svg("rect", { class: "frame", width: box.width, height: box.height, rx: moves ? 21 : model.isInput(at) ? 3 : 6 }));
    const left = moves ? 16 : 0;
    element.append(swatch(kindOf(model, model.type(at)), left + 5, 6, 6, box.height - 12));
    element.append(svg("text", { class: "title", x: left + 18, y: 18 }, `${moves ? "⇄ " : ""}${clipped(model.op(at), NAME)}`));
    const cost = model.data.values.seconds[at]!;
    const second = `%${clipped(model.name(at), NAME)}`;
    element.append(svg("text", { class: "name", x: left + 18, y: 33 }, second));
    const room = box.width - left - 30 - second.length * 6.4 - 44;
    if (cost > 0 && room > 0) element.append(svg("text", { class: "cost", x: box.width - (moves ? 16 : 8), y: 33, "text-anchor": "end" }, seconds(cost)));
    if (box.stub) element.append(svg("path", { class: "edge", d: `M${box.width / 2},${box.height} v6` }), svg("text", { class: "type", x: box.width / 2, y: box.height + 15, "text-anchor": "middle" }, box.stub));
    return element;
  }

  /** The selected value's readers and writers, wherever they lie, or the groups that hold them. */
  private drawLinks(): void {
    const { value } = this.store.state;
    if (value < 0) return;
    const here = this.placed.get(`v${value}`);
    if (!here) return;
    const lines = svg("g", { class: "links", "aria-hidden": "true" });
    const link = (from: Placed, to: Placed, kind: string) => {
      const [x1, y1, x2, y2] = [from.x + from.box.width / 2, from.y + from.box.height, to.x + to.box.width / 2, to.y];
      const bend = Math.min(160, Math.max(30, Math.abs(y2 - y1) / 2));
      lines.append(svg("path", { class: kind, d: `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`, "marker-end": "url(#arrow)" }));
    };
    const shown = new Set<Placed>();
    for (const [numbers, reading] of [[this.model.reads(value), true], [this.model.readers[value]!, false]] as const) {
      shown.clear();
      for (const at of numbers.slice(0, 60)) {
        const there = this.seen(at);
        if (!there || shown.has(there) || there === here) continue;
        shown.add(there);
        if (reading) link(there, here, "reads");
        else link(here, there, "read-by");
      }
    }
    this.world.append(lines);
  }

  /** The box of a value, or of the innermost closed group around it. */
  private seen(at: number): Placed | null {
    const own = this.placed.get(`v${at}`);
    if (own) return own;
    for (const group of this.tree.home[at]!.ancestors()) {
      const around = this.placed.get(keyOf(group));
      if (around) return around;
    }
    return null;
  }

  private chosen(): Item | null {
    const { value, group } = this.store.state;
    return value >= 0 ? value : (this.tree.groups.get(group) ?? null);
  }

  private changed(state: State, before: State): void {
    if (state.value !== before.value || state.group !== before.group) {
      this.reveal(state);
      this.showCrumbs();
    } else if (state.dim !== before.dim || state.layout !== before.layout) this.draw();
  }

  /** Opens what is around the selection, and brings it into view. */
  private reveal(state: State): void {
    const item = this.chosen();
    if (item === null) {
      this.surface.removeAttribute("aria-activedescendant");
      return this.draw();
    }
    const around = item instanceof Group ? item.parent : this.tree.home[item]!;
    let opened = false;
    for (const group of [...(item instanceof Group ? [item] : []), ...(around?.ancestors() ?? [])]) {
      if (group !== item) {
        opened ||= !this.open.has(group);
        this.open.add(group);
      }
      const { parent } = group;
      const at = parent && parent.at >= 0 ? parent.children.indexOf(group) : -1;
      if (parent && at >= 0 && at !== parent.at) {
        parent.at = at;
        opened = true;
      }
    }
    if (opened) this.relayout();
    else this.draw();
    this.surface.setAttribute("aria-activedescendant", `box-${keyOf(item)}`);
    if (state.view === "graph" && this.fitted) this.showItem(item, true);
  }

  private showItem(item: Item, animated: boolean): void {
    const found = this.placed.get(keyOf(item));
    if (!found) return;
    const { x, y, scale } = this.zoom;
    const { clientWidth: width, clientHeight: height } = this.surface;
    const { box } = found;
    const [left, top, right, bottom] = [found.x * scale + x, found.y * scale + y, (found.x + box.width) * scale + x, (found.y + box.height) * scale + y];
    if (animated && scale >= 0.45 && left >= 0 && top >= 0 && right <= width && bottom <= height) return;
    const tall = Math.min(box.height, height / 0.6);
    this.zoom.fit(found.x, found.y, box.width, tall, Math.min(1.1, Math.max(0.8, scale)), animated);
  }

  toggle(group: Group): void {
    const before = this.placed.get(keyOf(group));
    if (this.open.has(group)) this.open.delete(group);
    else this.open.add(group);
    this.relayout();
    // The box that was clicked stays where it is on the screen, unless it grew over the edge.
    const after = this.placed.get(keyOf(group));
    if (!before || !after) return;
    const { x, y, scale } = this.zoom;
    const [nx, ny] = [x + (before.x - after.x) * scale, y + (before.y - after.y) * scale];
    this.zoom.to(nx, ny, scale, false);
    if (this.open.has(group)) {
      const { clientWidth: width, clientHeight: height } = this.surface;
      const right = (after.x + after.box.width) * scale + nx;
      const bottom = (after.y + after.box.height) * scale + ny;
      if (right > width || bottom > height || after.x * scale + nx < 0) {
        const [w, h] = [after.box.width, after.box.height];
        if (Math.min((width - 48) / w, (height - 48) / h) >= 0.5) this.zoom.fit(after.x, after.y, w, h, Math.min(1, Math.max(scale, 0.6)));
        else this.zoom.to(width / 2 - (after.x + w / 2) * Math.max(scale, 0.6), 24 - after.y * Math.max(scale, 0.6), Math.max(scale, 0.6), true);
      }
    }
  }

  private target(event: Event): { group?: Group; value?: number; toggles: boolean; step?: number } {
    const hit = (event.target as Element).closest<SVGElement>("[data-toggle],[data-value],[data-group]");
    if (!hit) return { toggles: false };
    const { toggle, group, value, step } = hit.dataset;
    const found = this.tree.groups.get(toggle ?? group ?? " ");
    return { ...(found ? { group: found } : {}), ...(value ? { value: Number(value) } : {}), toggles: toggle !== undefined, ...(step ? { step: Number(step) } : {}) };
  }

  private clicked(event: MouseEvent): void {
    if (this.zoom.dragged) return;
    const { group, value, toggles, step } = this.target(event);
    if (group && step) {
      group.at = (group.at + step + group.times) % group.times;
      this.relayout();
    } else if (group && (toggles || (event.detail === 1 && !this.open.has(group)))) {
      this.toggle(group);
      if (!toggles) this.store.set({ group: group.key, value: -1 });
    } else if (group) this.store.set({ group: group.key, value: -1 });
    else if (value !== undefined) this.store.select(value);
    else this.store.set({ group: "", value: -1 });
  }

  private doubled(event: MouseEvent): void {
    const { group, toggles } = this.target(event);
    if (group && !toggles && this.open.has(group) && event.detail === 2) {
      const at = this.placed.get(keyOf(group));
      if (at) this.zoom.fit(at.x, at.y, at.box.width, at.box.height, 1.1);
    }
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const item = this.chosen();
    const arrows: Record<string, [number, number]> = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    const way = arrows[event.key];
    if (way) this.step(item, way);
    else if ((event.key === "Enter" || event.key === " ") && item instanceof Group) this.toggle(item);
    else if (event.key === "Backspace") this.outward();
    else if (event.key === "c" || event.key === "C") this.collapseAll();
    else return;
    event.preventDefault();
  }

  outward(): void {
    const item = this.chosen();
    const around = item instanceof Group ? item.parent : item === null ? null : this.tree.home[item]!;
    if (around?.parent) this.store.set({ group: around.key, value: -1 });
    else this.store.set({ group: "", value: -1 });
  }

  /** To the nearest box in one direction, first among those of the same group. */
  private step(item: Item | null, [dx, dy]: [number, number]): void {
    const here = item === null ? null : this.placed.get(keyOf(item));
    let best: Placed | null = null;
    let least = Infinity;
    for (const there of this.placed.values()) {
      if (there === here) continue;
      if (!here) {
        best = there;
        break;
      }
      const x = there.x + there.box.width / 2 - here.x - here.box.width / 2;
      const y = dy ? (dy > 0 ? there.y - here.y - here.box.height : here.y - there.y - there.box.height) : there.y - here.y;
      const along = dy ? y : dx > 0 ? there.x - here.x - here.box.width : here.x - there.x - there.box.width;
      const across = dy ? Math.abs(x) : Math.abs(y);
      // An open group's own boxes lie below its head, not beyond its end.
      const inward = dy > 0 && there.parent === here.box.item;
      if (along < -1 && !inward) continue;
      const far = (inward ? there.y - here.y : along) + 2 * across + (there.parent === here.parent || inward ? 0 : 5000);
      if (far < least) [best, least] = [there, far];
    }
    if (!best) return;
    const { item: next } = best.box;
    this.store.set(next instanceof Group ? { group: next.key, value: -1 } : { value: next, group: "" });
  }

  focus(): void {
    this.surface.focus();
  }

  private showCrumbs(): void {
    const item = this.chosen();
    const home = item instanceof Group ? item : item === null ? this.tree.root : this.tree.home[item]!;
    const path = [...home.ancestors()].reverse();
    const parts: (Node | string)[] = [];
    for (const group of path) {
      if (parts.length) parts.push(h("span", { class: "sep", "aria-hidden": "true" }, "›"));
      const go = () => {
        if (group === this.tree.root) {
          this.store.set({ group: "", value: -1 });
          this.fitAll();
        } else this.store.set({ group: group.key, value: -1 });
      };
      parts.push(h("button", { type: "button", click: go, "aria-current": group === item ? "true" : null }, group.label));
    }
    if (item !== null && !(item instanceof Group)) {
      parts.push(h("span", { class: "sep", "aria-hidden": "true" }, "›"), h("span", { class: "here", "aria-current": "true" }, `%${this.model.name(item)}`));
    }
    replace(this.crumbs, ...parts);
  }
}

/** A line through points in pairs: straight within a pair, and in a bend that leaves and arrives straight between pairs. */
function curve(xs: number[], ys: number[], across: boolean): string {
  let path = `M${xs[0]},${ys[0]}`;
  for (let at = 1; at < xs.length; at += 1) {
    const [x, y] = [xs[at]!, ys[at]!];
    const [left, above] = [xs[at - 1]!, ys[at - 1]!];
    if (x === left && y === above) continue; // an arrow at a line of no length has no direction
    if (at % 2) path += ` L${x},${y}`;
    else {
      path += across ? ` C${(left + x) / 2},${above} ${(left + x) / 2},${y} ${x},${y}` : ` C${left},${(above + y) / 2} ${x},${(above + y) / 2} ${x},${y}`;
    }
  }
  return path;
}
