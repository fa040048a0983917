// The workers' time: for each a lane of computing and one of communicating, and the critical path through them; above
// them the schedule as it is estimated, which is all there is without a trace. Drawn on a canvas: a step can have hundreds of thousands of spans.

import { framed, h, replace } from "./dom";
import { bytes, clipped, count, seconds } from "./format";
import { hue } from "./layouts";
import { emptyLane, type Lane, type Run } from "./measured";
import type { Page, Shown } from "./page";

const [HEAD, GAP, NAMES] = [30, 12, 190];
/** The estimate's worker: none. */
const ESTIMATE = -1;
const [LOW, HIGH] = [20, 38];
/** What a canvas can have. */
const TALLEST = 12000;

export class TimelineView implements Shown {
  readonly element = h("div", { class: "view timeline" });
  private readonly canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": "Timeline of the workers. Arrow keys walk over the spans, plus and minus zoom." });
  private readonly note = h("p", { class: "summary", role: "status" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private readonly stage = h("div", { class: "stage" }, this.canvas, this.tip);
  private readonly runs: Run[];
  private run: Run;
  private readonly estimate: Run;
  /** the run's lanes, with the estimate above them where they are measured */
  private lanes: Lane[] = [];
  private from = 0;
  private to = 1;
  private top = 0;
  private row = LOW;
  private press: { x: number; y: number; moved: boolean } | null = null;
  private lane = 0;
  private before: [number, number, number] = [0, 1, 0];
  private readonly redraw = framed(() => this.draw());

  constructor(private readonly page: Page) {
    const { measured, store } = page;
    this.estimate = this.estimated();
    this.runs = measured?.runs ?? [this.estimate];
    this.run = this.runs.at(-1)!;
    this.lane = measured ? 1 : 0;
    const choose = h("select", { "aria-label": "Which run of the plan" }, ...this.runs.map((run, at) => h("option", { value: at, selected: run === this.run }, `run ${run.number}: ${seconds((run.end - run.start) * 1e-9)}`)));
    choose.addEventListener("change", () => this.choose(this.runs[Number(choose.value)]!));
    const button = (text: string, label: string, click: () => void) => h("button", { type: "button", class: "plain", title: label, "aria-label": label, click }, text);
    const bar = h(
      "p", { class: "key" },
      measured ? choose : h("span", { class: "chip" }, "estimated: there is no trace"),
      h("span", { class: "compute" }, "computing"), h("span", { class: "communicate" }, "communicating over"), ...page.model.data.mesh.map(([name], dim) => dimKey(name, dim)), h("span", { class: "waiting" }, "waiting"), measured && h("span", { class: "critical" }, "critical path"),
      button("+", "Zoom in", () => this.zoom(0.5, 0.6)), button("−", "Zoom out", () => this.zoom(0.5, 1.6)), button("Whole", "Show the whole run", () => this.whole()),
    );
    this.element.append(bar, this.note, this.stage);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.press = { x: event.offsetX, y: event.offsetY, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => {
      const found = this.press && !this.press.moved ? this.hit(event.offsetX, event.offsetY) : null;
      this.press = null;
      if (found) {
        this.lane = found[0];
        store.select(this.lanes[found[0]]!.values[found[1]]!);
      }
    });
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(this.redraw).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
    new MutationObserver(this.redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.choose(this.run);
  }

  private estimated(): Run {
    const { model } = this.page;
    const values = [...model.all()].filter((at) => model.data.values.seconds[at]! > 0);
    const lane = emptyLane(ESTIMATE, values.length);
    // Collectives that are started ahead pass while the worker computes, until their `wait`: see estimate.py.
    const ahead = new Set([...model.all()].filter((at) => model.op(at) === "wait").map((at) => model.reads(at)[0]!));
    const ends = new Map<number, number>();
    let [clock, free] = [0, 0];
    let index = 0;
    for (const at of model.all()) {
      if (model.op(at) === "wait") clock = Math.max(clock, ends.get(model.reads(at)[0]!) ?? clock);
      const took = model.data.values.seconds[at]! * 1e9;
      if (!(took > 0)) continue;
      const isMoving = model.isCollective(at);
      const start = isMoving ? Math.max(clock, free) : clock;
      Object.assign(lane.values, { [index]: at });
      lane.starts[index] = start;
      lane.ends[index] = start + took;
      lane.held[index] = model.held[at]!;
      index += 1;
      if (isMoving) ends.set(at, (free = start + took));
      if (!isMoving || !ahead.has(at)) clock = start + took;
    }
    return { number: 0, lanes: [lane], critical: [], start: 0, end: Math.max(clock, free) };
  }

  private choose(run: Run): void {
    const { measured } = this.page;
    this.run = run;
    this.lanes = measured ? [...this.estimate.lanes.map((lane) => shifted(lane, run.start)), ...run.lanes] : run.lanes;
    let [busy, waited] = [0, 0];
    for (const lane of run.lanes) {
      for (let span = 0; span < lane.values.length; span += 1) {
        if (!this.communicates(lane.values[span]!)) busy += lane.ends[span]! - lane.starts[span]!;
        waited += lane.waited[span]!;
      }
    }
    let [computing, communicating, between] = [0, 0, 0];
    for (const { value, start, end } of run.critical) {
      if (value < 0) between += (end - start) * 1e-9;
      else if (this.communicates(value)) communicating += (end - start) * 1e-9;
      else computing += (end - start) * 1e-9;
    }
    const total = (run.end - run.start) * 1e-9;
    const of = (time: number) => `${Math.round((100 * time * 1e-9) / Math.max(1e-12, total * run.lanes.length))}%`;
    const share = measured ? `${of(busy)} of the workers' time is computing, ${of(waited)} waiting for peers` : `${of(busy)} of it computing`;
    const path = `the critical path computes for ${seconds(computing)}, communicates for ${seconds(communicating)}, and is between ops for ${seconds(between)}`;
    const kept = measured && measured.data.runs > measured.runs.length ? `, the last ${measured.runs.length} of ${measured.data.runs} runs are here` : "";
    replace(this.note, h("b", {}, seconds(total)), ` on ${count(run.lanes.length, "worker")}; ${share}${measured ? `; ${path}` : ""}${kept}.${measured ? ` Estimated: ${seconds(this.estimate.end * 1e-9)}.` : ""}`);
    this.whole();
  }

  /** Collectives, and the commit at a step's end (-1), at which workers meet too. */
  private communicates(value: number): boolean {
    return value < 0 || this.page.model.isCollective(value);
  }

  private whole(): void {
    const margin = (this.run.end - this.run.start) * 0.01 || 1;
    this.from = this.run.start - margin;
    this.to = this.run.end + margin;
    this.redraw();
  }

  private zoom(share: number, factor: number): void {
    const least = 200;
    const width = Math.max(least, Math.min((this.run.end - this.run.start) * 1.2 || 1, (this.to - this.from) * factor));
    const pivot = this.from + share * (this.to - this.from);
    this.from = pivot - share * width;
    this.to = this.from + width;
    this.redraw();
  }

  private pan(dx: number, dy: number): void {
    const step = (dx * (this.to - this.from)) / (this.canvas.clientWidth - NAMES);
    this.from -= step;
    this.to -= step;
    const tall = this.lanes.length * (2 * this.row + GAP) + HEAD;
    this.top = Math.max(0, Math.min(tall - this.canvas.clientHeight, this.top - dy));
    this.redraw();
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    if (event.shiftKey) this.pan(-event.deltaY, 0);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(-event.deltaX, 0);
    else if (event.altKey) this.pan(0, -event.deltaY);
    else this.zoom(Math.max(0, (event.offsetX - NAMES) / (this.canvas.clientWidth - NAMES)), Math.exp(event.deltaY * 0.0016));
  }

  private move(event: PointerEvent): void {
    if (this.press) {
      const [dx, dy] = [event.offsetX - this.press.x, event.offsetY - this.press.y];
      if (!this.press.moved && Math.hypot(dx, dy) < 4) return;
      this.press = { x: event.offsetX, y: event.offsetY, moved: true };
      this.tip.hidden = true;
      return this.pan(dx, dy);
    }
    const found = this.hit(event.offsetX, event.offsetY);
    this.tip.hidden = !found;
    if (!found) return;
    const { model } = this.page;
    const lane = this.lanes[found[0]]!;
    const at = lane.values[found[1]]!;
    const took = (lane.ends[found[1]]! - lane.starts[found[1]]!) * 1e-9;
    const waited = lane.waited[found[1]]! * 1e-9;
    replace(this.tip, h("b", {}, at < 0 ? "commit" : `%${model.name(at)}`), h("span", {}, at < 0 ? "" : model.op(at)), h("span", {}, waited ? `${seconds(took)}, ${seconds(waited)} of it waiting` : seconds(took)), h("span", { class: "muted" }, `${bytes(lane.held[found[1]]!)} held`));
    this.tip.style.left = `${Math.min(event.offsetX + 14, this.stage.clientWidth - 220)}px`;
    this.tip.style.top = `${Math.min(event.offsetY + 14, this.stage.clientHeight - 84)}px`;
  }

  private hit(x: number, y: number): [number, number] | null {
    const row = y - HEAD + this.top;
    const at = Math.floor(row / (2 * this.row + GAP));
    const lane = this.lanes[at];
    if (!lane || x < NAMES || y < HEAD) return null;
    const within = row - at * (2 * this.row + GAP);
    if (within > 2 * this.row) return null;
    const time = this.from + ((x - NAMES) / (this.canvas.clientWidth - NAMES)) * (this.to - this.from);
    const near = (2 * (this.to - this.from)) / this.canvas.clientWidth;
    const communicates = within > this.row;
    for (let span = after(lane.ends, time - near); span < lane.values.length && lane.starts[span]! <= time + near; span += 1) {
      const value = lane.values[span]!;
      if (this.communicates(value) === communicates) return [at, span];
    }
    return null;
  }

  private key(event: KeyboardEvent): void {
    const { store } = this.page;
    const lane = this.lanes[this.lane];
    if (!lane) return;
    const span = lane.values.indexOf(store.state.value);
    const to: Record<string, number> = { ArrowRight: span + 1, ArrowLeft: span - 1, Home: 0, End: lane.values.length - 1 };
    if (to[event.key] !== undefined) {
      const next = Math.max(0, Math.min(lane.values.length - 1, to[event.key]!));
      if (lane.values[next]! >= 0) store.select(lane.values[next]!);
      const width = this.to - this.from;
      if (lane.starts[next]! < this.from || lane.ends[next]! > this.to) [this.from, this.to] = [lane.starts[next]! - width / 2, lane.starts[next]! + width / 2];
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      this.lane = Math.max(0, Math.min(this.lanes.length - 1, this.lane + (event.key === "ArrowDown" ? 1 : -1)));
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5, 0.6);
    else if (event.key === "-") this.zoom(0.5, 1.6);
    else if (event.key === "0") this.whole();
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.redraw();
  }

  update(): void {
    this.redraw();
  }

  /** All lanes of the whole run on paper, and afterwards what was seen before. */
  print(on: boolean): void {
    if (on) {
      this.before = [this.from, this.to, this.top];
      this.top = 0;
      this.stage.style.height = `${Math.min(TALLEST, this.lanes.length * (2 * LOW + GAP) + HEAD)}px`;
      this.whole();
    } else {
      [this.from, this.to, this.top] = this.before;
      this.stage.style.height = "";
    }
    this.draw();
  }

  focus(): void {
    this.canvas.focus();
  }

  private draw(): void {
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(this.element);
    const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
    const paint = this.canvas.getContext("2d")!;
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, height);
    const font = style.fontFamily;
    // Few workers get higher lanes.
    this.row = Math.max(LOW, Math.min(HIGH, Math.floor(((height - HEAD) / this.lanes.length - GAP) / 2)));
    const x = (time: number) => NAMES + ((time - this.from) / (this.to - this.from)) * (width - NAMES);
    const dark = luminance(colour("surface")) < 0.179;
    const edges = new Map(["whole", "muted", ...[0, 1, 2, 3, 4, 5].map((dim) => `dim${dim}`)].map((name) => [colour(name), strong(colour(name), colour("surface"), dark)]));
    const colours = { compute: colour("whole"), ...Object.fromEntries([0, 1, 2, 3, 4, 5].map((dim) => [`dim${dim}`, colour(`dim${dim}`)])), text: colour("text"), muted: colour("muted"), line: colour("line"), ground: colour("ground"), critical: colour("critical"), accent: colour("accent"), surface: colour("surface") };
    this.lanes.forEach((lane, at) => {
      const y = HEAD + at * (2 * this.row + GAP) - this.top;
      if (y > height || y + 2 * this.row < HEAD) return;
      paint.fillStyle = colours.surface;
      paint.fillRect(NAMES, y, width - NAMES, 2 * this.row);
      this.drawLane(paint, lane, y, x, width, colours, edges, font);
      paint.fillStyle = colours.ground;
      paint.fillRect(0, y - GAP / 2, NAMES, 2 * this.row + GAP);
      paint.fillStyle = at === this.lane && this.lanes.length > 1 ? colours.accent : colours.text;
      paint.font = `600 12px ${font}`;
      const isEstimate = lane.worker === ESTIMATE;
      paint.fillText(isEstimate ? "estimate" : `worker ${lane.worker}`, 12, y + this.row / 2 + 3);
      paint.fillStyle = colours.muted;
      paint.font = `11px ${font}`;
      paint.fillText(isEstimate ? "of any worker" : clipped(this.where(lane.worker), 20), 12, y + (3 * this.row) / 2 + 3);
      paint.textAlign = "right";
      paint.fillText("computes", NAMES - 8, y + this.row / 2 + 3);
      paint.fillText("moves", NAMES - 8, y + (3 * this.row) / 2 + 3);
      paint.textAlign = "left";
    });
    this.drawAxis(paint, x, width, colours, font);
  }

  private where(worker: number): string {
    const { model, measured } = this.page;
    return (measured?.point(worker) ?? []).map((place, dim) => `${model.dimName(dim)}=${place}`).join(" ");
  }

  private drawLane(paint: CanvasRenderingContext2D, lane: Lane, y: number, x: (time: number) => number, width: number, colours: Record<string, string>, edges: Map<string, string>, font: string): void {
    const { model, store } = this.page;
    const filled = [-1, -1];
    paint.font = `11px ${font}`;
    for (let span = after(lane.ends, this.from); span < lane.values.length && lane.starts[span]! < this.to; span += 1) {
      const value = lane.values[span]!;
      const row = this.communicates(value) ? 1 : 0;
      const left = Math.max(NAMES, x(lane.starts[span]!));
      const right = Math.min(width, x(lane.ends[span]!));
      const isChosen = value === store.state.value;
      const dim = store.state.dim;
      // A pixel is painted once.
      if (!isChosen && right < filled[row]! + 0.6) continue;
      filled[row] = right;
      const w = Math.max(0.8, right - left - (right - left > 3 ? 0.6 : 0));
      const isFaint = dim >= 0 && !(value >= 0 && model.data.values.dims[value]!.includes(dim));
      paint.globalAlpha = isFaint ? 0.25 : 1;
      const fill = row ? value < 0 ? colours["muted"]! : colours[`dim${model.data.values.dims[value]![0]! % 6}`]! : colours["compute"]!;
      const edge = edges.get(fill)!;
      const [top, high] = [y + row * this.row + 2, this.row - 6];
      // Waiting for peers is a pale slice, and moving the full one behind it. Narrow ones are all edge.
      const wait = lane.waited[span]! && w > 3 ? Math.min(w, Math.max(0, x(lane.starts[span]! + lane.waited[span]!) - left)) : 0;
      if (wait) {
        paint.fillStyle = fill;
        const full = paint.globalAlpha;
        paint.globalAlpha = 0.35 * full;
        paint.fillRect(left, top, wait, high);
        paint.globalAlpha = full;
      }
      paint.fillStyle = w > 3 ? fill : edge;
      if (w > 3) paint.fillRect(left + wait, top, w - wait, high);
      else paint.fillRect(Math.round(left), top, Math.max(1, Math.round(w)), high);
      if (w > 3) {
        paint.strokeStyle = edge;
        paint.lineWidth = 1;
        paint.strokeRect(left + 0.5, top + 0.5, w - 1, high - 1);
      }
      if (isChosen) {
        paint.strokeStyle = colours["text"]!;
        paint.lineWidth = 2;
        paint.strokeRect(left - 1, y + row * this.row + 1, Math.max(3, w + 2), this.row - 4);
      }
      if (isFaint) {
        paint.globalAlpha = 1;
        continue;
      }
      if (wait > 46 && w - wait < 46) {
        paint.fillStyle = colours["text"]!;
        paint.fillText(`${clipped(value < 0 ? "commit" : model.name(value), Math.floor((wait - 8) / 6.4))}`, left + 4, y + row * this.row + this.row / 2 + 3);
      } else if (w > 46 && value >= 0) {
        paint.fillStyle = readable(fill);
        paint.fillText(clipped(model.name(value), Math.floor((w - wait - 8) / 6.2)), left + wait + 4, y + row * this.row + this.row / 2 + 3);
      }
      paint.globalAlpha = 1;
    }
    paint.fillStyle = colours["critical"]!;
    for (const stretch of this.run.critical) {
      if (stretch.worker !== lane.worker || stretch.end < this.from || stretch.start > this.to) continue;
      const [left, right] = [Math.max(NAMES, x(stretch.start)), Math.min(width, x(stretch.end))];
      paint.fillRect(left, y + this.row - 3, Math.max(0.8, right - left), 3);
    }
  }

  private drawAxis(paint: CanvasRenderingContext2D, x: (time: number) => number, width: number, colours: Record<string, string>, font: string): void {
    paint.fillStyle = colours["ground"]!;
    paint.fillRect(0, 0, width, HEAD - 2);
    const span = this.to - this.from;
    const rough = span / Math.max(2, (width - NAMES) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough)!;
    paint.font = `11px ${font}`;
    for (let time = Math.ceil((this.from - this.run.start) / step) * step; time + this.run.start <= this.to; time += step) {
      const at = x(time + this.run.start);
      if (at < NAMES) continue;
      paint.fillStyle = colours["line"]!;
      paint.fillRect(at, HEAD - 8, 1, this.canvas.clientHeight);
      paint.fillStyle = colours["muted"]!;
      if (at < width - 56) paint.fillText(seconds(time * 1e-9), at + 4, HEAD - 12);
    }
  }
}

/** The same lane, begun `by` nanoseconds later. */
function shifted(lane: Lane, by: number): Lane {
  return { ...lane, starts: lane.starts.map((start) => start + by), ends: lane.ends.map((end) => end + by) };
}

/** WCAG's relative luminance of #rrggbb. */
function luminance(colour: string): number {
  const [red, green, blue] = channels(colour).map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4)) as [number, number, number];
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function channels(colour: string): number[] {
  return [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
}

/** Black or white, whichever stands out more from a colour: by 4.58 at least. */
function readable(colour: string): string {
  return luminance(colour) > 0.179 ? "#000" : "#fff";
}

/** The colour, made lighter on a dark ground and darker on a light one until its contrast with it is 4.5. */
function strong(colour: string, ground: string, dark: boolean): string {
  for (let share = 0; ; share += 0.05) {
    const mixed = `#${channels(colour).map((part) => Math.round(part + ((dark ? 255 : 0) - part) * Math.min(1, share)).toString(16).padStart(2, "0")).join("")}`;
    const [high, low] = [luminance(mixed), luminance(ground)].sort((a, b) => b - a) as [number, number];
    if ((high + 0.05) / (low + 0.05) >= 4.5 || share >= 1) return mixed;
  }
}

function dimKey(name: string, dim: number): HTMLElement {
  const key = h("span", {}, name);
  key.style.setProperty("--swatch", hue(dim));
  return key;
}

/** The first place in ascending `numbers` whose number is at least `least`. */
function after(numbers: Float64Array, least: number): number {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle]! < least) low = middle + 1;
    else high = middle;
  }
  return low;
}
