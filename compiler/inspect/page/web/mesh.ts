// The strip of the mesh: which worker's blocks are shown, and over which mesh dim traffic is picked out.

import { h, replace, type Child } from "./dom";
import { bytes, count } from "./format";
import { hue, kindOf } from "./layouts";
import type { Page } from "./page";
import { swatchIcon } from "./panel";

/** So many workers are drawn in a row, and so many rows. */
const [ACROSS, ROWS] = [16, 4];

export class MeshStrip {
  readonly element = h("div", { class: "mesh", role: "group", "aria-label": "The mesh" });
  private readonly legend = h("div", { class: "legend", role: "group", "aria-label": "Layouts" });

  constructor(private readonly page: Page) {
    page.store.on((state, before) => {
      if (state.point !== before.point || state.dim !== before.dim || state.layout !== before.layout) this.update();
    });
    this.update();
  }

  private update(): void {
    const focused = document.activeElement instanceof HTMLElement && this.element.contains(document.activeElement) ? document.activeElement.dataset["focus"] : undefined;
    const { model } = this.page;
    const dims = model.data.mesh.map(([name, size], dim) => this.dim(name, size, dim));
    replace(this.element, h("div", { class: "dims" }, ...dims), this.workers(), this.legend);
    this.updateLegend();
    if (focused) this.element.querySelector<HTMLElement>(`[data-focus="${focused}"]`)?.focus();
  }

  private dim(name: string, size: number, dim: number): HTMLElement {
    const { model, store } = this.page;
    const over = model.collectives.filter(({ dims }) => dims.includes(dim));
    const text = over.length ? `${bytes(over.reduce((sum, each) => sum + each.sent, 0))} in ${count(over.reduce((sum, each) => sum + each.count, 0), "collective")}` : "nothing moves";
    const isOn = store.state.dim === dim;
    const mark = h("span", { class: "dot", "aria-hidden": "true" });
    mark.style.background = hue(dim);
    const toggle = h(
      "button",
      { type: "button", class: "dim", "data-focus": `dim${dim}`, "aria-pressed": String(isOn), title: `Pick out what moves over ${name}`, click: () => store.set({ dim: isOn ? -1 : dim }) },
      mark, h("b", {}, name), h("span", { class: "muted" }, text),
    );
    const place = h("input", {
      type: "number", min: 0, max: size - 1, value: store.state.point[dim] ?? 0, "data-focus": `at${dim}`, "aria-label": `The worker's place on ${name}, 0 to ${size - 1}`,
      change: (event: Event) => {
        const at = Number((event.target as HTMLInputElement).value);
        const point = [...store.state.point];
        point[dim] = Math.min(size - 1, Math.max(0, Number.isFinite(at) ? Math.round(at) : 0));
        store.set({ point });
      },
    });
    return h("div", { class: "dim-group" }, toggle, h("label", { class: "coordinate" }, place, h("span", { class: "muted" }, `of ${size}`)));
  }

  /** The workers as a grid, where they are few: the last mesh dim goes across, the others down. */
  private workers(): Child {
    const { model, store } = this.page;
    const mesh = model.data.mesh;
    const across = mesh.at(-1)?.[1] ?? 1;
    if (across > ACROSS || model.workers / across > ROWS || !mesh.length) return h("span", { class: "muted many" }, count(model.workers, "worker"));
    const grid = h("div", { class: "workers", role: "group", "aria-label": "Workers" });
    grid.style.gridTemplateColumns = `repeat(${across}, auto)`;
    const down = mesh.slice(0, -1).map(([name]) => name).join(", ");
    const axes = h("div", { class: "axes muted", "aria-hidden": "true" }, h("span", {}, `${mesh.at(-1)![0]} →`), down && h("span", {}, `${down} ↓`));
    for (let worker = 0; worker < model.workers; worker += 1) {
      const point: number[] = [];
      let rest = worker;
      for (const [, size] of [...mesh].reverse()) {
        point.unshift(rest % size);
        rest = Math.floor(rest / size);
      }
      const isHere = point.every((place, dim) => place === store.state.point[dim]);
      const name = mesh.map(([dim], at) => `${dim}=${point[at]}`).join(", ");
      grid.append(h("button", { type: "button", class: "worker", "data-focus": `worker${worker}`, "aria-pressed": String(isHere), "aria-label": `Worker ${worker}: ${name}`, title: `Worker ${worker}: ${name}`, click: () => store.set({ point }) }, String(worker)));
    }
    return h("div", { class: "grid" }, axes, grid);
  }

  private updateLegend(): void {
    const { model, store } = this.page;
    const kinds = new Map<string, { at: number; many: number }>();
    for (const at of model.all()) {
      const kind = kindOf(model, model.type(at));
      if (kind.key === "none") continue;
      const entry = kinds.get(kind.key);
      if (entry) entry.many += 1;
      else kinds.set(kind.key, { at, many: 1 });
    }
    const entries = [...kinds].sort((a, b) => b[1].many - a[1].many);
    const buttons = entries.map(([key, { at, many }]) => {
      const isOn = store.state.layout === key;
      return h("button", { type: "button", class: "kind", "data-focus": `kind${key.replace(/\W/g, "_")}`, "aria-pressed": String(isOn), title: `${key}: ${count(many, "value")}. Click to pick them out.`, click: () => store.set({ layout: isOn ? "" : key }) }, swatchIcon(kindOf(model, model.type(at))), kindOf(model, model.type(at)).short);
    });
    const mark = h("span", { class: "kind static" }, h("span", { class: "pill", "aria-hidden": "true" }, "⇄"), "collective");
    replace(this.legend, mark, ...buttons);
  }
}
