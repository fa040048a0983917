// What a worker holds over the schedule: an area chart by what it is, the peak, and what is alive at a chosen place.

import { add, h, replace, svg } from "./dom";
import { bytes, count } from "./format";
import { PHASES } from "./model";
import type { Page, Shown } from "./page";
import { Table } from "./table";

const KINDS = ["inputs and state", "made in forward", "made in backward", "made in update"];
const [LEFT, RIGHT, TOP, BOTTOM] = [78, 16, 22, 30];

export class MemoryView implements Shown {
  readonly element = h("div", { class: "view memory" });
  private readonly chart = svg("svg", { class: "chart", tabindex: 0, role: "slider", "aria-label": "Place in the schedule", "aria-valuemin": 1 });
  private readonly summary = h("p", { class: "summary", "aria-live": "polite" });
  private readonly layers = h("ul", { class: "layers" });
  private readonly table: Table<number>;
  private readonly sums: Float64Array[];
  private at: number;
  private size = "";
  private cursor: SVGGElement | null = null;

  constructor(private readonly page: Page) {
    const { model, alive, store } = page;
    this.at = store.state.value >= 0 ? Math.max(model.start, store.state.value) : model.peak;
    this.sums = this.stack();
    const values = model.data.values;
    this.table = new Table<number>(
      "What is alive there",
      [
        { name: "name", width: "minmax(8rem, 1.4fr)", cell: (at) => `%${model.name(at)}`, by: (at) => model.name(at) },
        { name: "bytes", width: "6rem", cell: (at) => bytes(values.allocates[at]!), by: (at) => values.allocates[at]!, number: true },
        { name: "type", width: "minmax(8rem, 1.6fr)", cell: (at) => model.typeText(at) },
        { name: "module", width: "minmax(6rem, 1fr)", cell: (at) => model.module(at), by: (at) => model.module(at) },
        { name: "kept until", width: "minmax(6rem, 1fr)", cell: (at) => untilText(alive.until(at), (value) => `%${model.name(value)}`), by: (at) => alive.until(at) ?? Infinity },
      ],
      (at) => store.select(at),
      { sort: "bytes", picked: (at) => store.state.value === at, empty: "Nothing is held." },
    );
    const toPeak = h("button", { type: "button", class: "plain", click: () => this.go(model.peak) }, "Go to the peak");
    const legend = h("p", { class: "key" }, ...KINDS.map((kind, at) => h("span", { class: `kind-${at}` }, kind)), toPeak);
    const below = h("div", { class: "below" }, h("div", { class: "by-layer" }, h("h3", {}, "By layer"), this.layers), this.table.element);
    add(this.element, legend, this.chart, this.summary, below);
    const place = (event: PointerEvent) => {
      const box = this.chart.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.go(Math.round(share * (model.size - 1)));
    };
    this.chart.addEventListener("pointerdown", (event) => {
      this.chart.setPointerCapture(event.pointerId);
      place(event);
    });
    this.chart.addEventListener("pointermove", (event) => {
      if (this.chart.hasPointerCapture(event.pointerId)) place(event);
    });
    this.chart.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.round(model.size / 20));
      const to: Record<string, number> = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: model.size - 1 };
      if (to[event.key] === undefined) return;
      event.preventDefault();
      this.go(to[event.key]!);
    });
    new ResizeObserver(() => this.draw()).observe(this.chart);
    store.on((state, before) => {
      if (state.value !== before.value && state.value >= 0 && state.view !== "memory") this.at = Math.max(model.start, state.value);
    });
  }

  /** Bytes of each kind that are held while each value is made, each on top of those before. */
  private stack(): Float64Array[] {
    const { model, alive } = this.page;
    const sums = KINDS.map(() => new Float64Array(model.size + 1));
    for (const at of model.all()) {
      const size = model.data.values.allocates[at]!;
      if (!size) continue;
      const sum = sums[model.isInput(at) ? 0 : model.phase(at) + 1]!;
      sum[at] = sum[at]! + size;
      const until = alive.until(at);
      if (until !== null) sum[until + 1] = sum[until + 1]! - size;
    }
    for (const [kind, sum] of sums.entries()) {
      for (let at = 1; at < sum.length; at += 1) sum[at] = sum[at]! + sum[at - 1]!;
      if (kind) for (let at = 0; at < sum.length; at += 1) sum[at] = sum[at]! + sums[kind - 1]![at]! - 0;
    }
    // What the compiler counted is the truth; where a buffer was shared in a way that is not in the report, the parts
    // are scaled to it.
    for (const at of model.all()) {
      const total = sums.at(-1)![at]!;
      for (const sum of sums) sum[at] = total > 0 ? (sum[at]! * model.held[at]!) / total : model.held[at]!;
    }
    return sums;
  }

  private go(at: number): void {
    this.at = Math.max(this.page.model.start, Math.min(this.page.model.size - 1, at));
    this.show();
  }

  update(): void {
    this.draw();
    this.show();
  }

  private x(at: number, width: number): number {
    return LEFT + (at / Math.max(1, this.page.model.size - 1)) * (width - LEFT - RIGHT);
  }

  private draw(): void {
    const { model } = this.page;
    const [width, height] = [this.chart.clientWidth, this.chart.clientHeight];
    if (!width || !model.size || this.size === `${width} ${height}`) return;
    this.size = `${width} ${height}`;
    const most = model.held[model.peak]! || 1;
    const y = (held: number) => height - BOTTOM - (held / most) * (height - TOP - BOTTOM);
    // A pixel shows the most that is held anywhere in it.
    const columns = Math.min(model.size, Math.max(2, Math.round(width - LEFT - RIGHT)));
    const parts: SVGElement[] = [];
    const areas = this.sums.map((sum) => {
      let line = "";
      for (let column = 0; column < columns; column += 1) {
        const from = Math.floor((column * model.size) / columns);
        const to = Math.max(from + 1, Math.floor(((column + 1) * model.size) / columns));
        let high = 0;
        for (let at = from; at < to; at += 1) high = Math.max(high, sum[at]!);
        line += `${line ? "L" : "M"}${this.x((column * (model.size - 1)) / Math.max(1, columns - 1), width).toFixed(1)},${y(high).toFixed(1)}`;
      }
      return line;
    });
    areas.reverse().forEach((line, at) => parts.push(svg("path", { class: `area kind-${KINDS.length - 1 - at}`, d: `${line} L${width - RIGHT},${y(0)} L${LEFT},${y(0)} z` })));
    parts.push(svg("path", { class: "outline", d: areas[0]! }));
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * most), y2: y(share * most) }));
      parts.push(svg("text", { x: LEFT - 8, y: y(share * most) + 4, "text-anchor": "end" }, bytes(share * most)));
    }
    let from = 0;
    for (let at = 1; at <= model.size; at += 1) {
      if (at < model.size && model.phase(at) === model.phase(from)) continue;
      // States of every phase are met first: a phase's name stands where it has room.
      const [left, right] = [this.x(from, width), this.x(at, width)];
      parts.push(svg("line", { class: "phase", x1: left, x2: left, y1: TOP, y2: height - BOTTOM }));
      if (right - left > 70) parts.push(svg("text", { x: left + 6, y: height - BOTTOM + 18 }, PHASES[model.phase(from)] ?? ""));
      from = at;
    }
    const peakX = this.x(model.peak, width);
    const end = peakX > width - 230;
    parts.push(svg("circle", { class: "peak", cx: peakX, cy: y(most), r: 4 }), svg("text", { class: "peak-label", x: peakX + (end ? -8 : 8), y: TOP - 8, "text-anchor": end ? "end" : "start" }, `peak ${bytes(most)} at %${model.name(model.peak)}`));
    this.cursor = svg("g", { class: "cursor" }, svg("line", { y1: TOP, y2: height - BOTTOM }));
    replace(this.chart, ...parts, this.cursor);
    this.placeCursor();
  }

  private placeCursor(): void {
    this.cursor?.setAttribute("transform", `translate(${this.x(this.at, this.chart.clientWidth)} 0)`);
  }

  private show(): void {
    const { model, alive } = this.page;
    if (!model.size) return;
    this.placeCursor();
    const found = alive.behind(this.at);
    const text = `${bytes(model.held[this.at]!)} at %${model.name(this.at)}`;
    this.chart.setAttribute("aria-valuemax", String(model.size));
    this.chart.setAttribute("aria-valuenow", String(this.at + 1));
    this.chart.setAttribute("aria-valuetext", text);
    replace(this.summary, h("b", {}, text), ` in ${count(found.length, "buffer")}, place ${(this.at + 1).toLocaleString("en-US")} of ${model.size.toLocaleString("en-US")}. Drag over the chart, or use the arrow keys.`);
    const sums = new Map<string, number>();
    for (const at of found) {
      const layer = model.module(at).split(".").slice(0, 2).join(".") || "outside modules";
      sums.set(layer, (sums.get(layer) ?? 0) + model.data.values.allocates[at]!);
    }
    const rows = [...sums].sort((a, b) => b[1] - a[1]);
    const most = rows[0]?.[1] ?? 1;
    replace(
      this.layers,
      ...rows.slice(0, 60).map(([layer, size]) => {
        const bar = h("span", { class: "bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * size) / most}%`;
        return h("li", {}, h("span", { class: "name", title: layer }, layer), h("span", { class: "number" }, bytes(size)), bar);
      }),
      rows.length > 60 && h("li", { class: "muted" }, `and ${rows.length - 60} more`),
    );
    this.table.show(found);
  }

  focus(): void {
    this.chart.focus();
  }
}

function untilText(until: number | null, name: (at: number) => string): string {
  return until === null ? "stays" : name(until);
}
