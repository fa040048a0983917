// What the page shows now. The URL's fragment holds it, so that a link or a reload leads to the same place.

import type { Model } from "./model";

export const VIEWS = ["overview", "graph", "collectives", "memory", "timeline", "source", "compare"] as const;
export type View = (typeof VIEWS)[number];

export interface State {
  view: View;
  /** the selected value, or -1 */
  value: number;
  /** the selected group's key, or "" */
  group: string;
  /** the chosen worker's coordinates */
  point: number[];
  /** the mesh dim whose traffic is shown, or -1 */
  dim: number;
  /** the layout that is picked out in the legend, or "" */
  layout: string;
}

type Listener = (state: State, before: State) => void;

export class Store {
  state: State;
  private readonly listeners: Listener[] = [];

  constructor(
    private readonly model: Model,
    /** the mesh that is shown, of a program of several; else "" */
    private readonly part: string,
    signal: AbortSignal,
  ) {
    const point = model.data.mesh.map(() => 0);
    this.state = { view: "overview", value: -1, group: "", point, dim: -1, layout: "" };
    this.state = { ...this.state, ...this.read() };
    window.addEventListener("hashchange", () => this.set(this.read()), { signal });
  }

  on(listener: Listener): void {
    this.listeners.push(listener);
  }

  set(change: Partial<State>): void {
    const before = this.state;
    this.state = { ...before, ...change };
    this.write();
    for (const listener of this.listeners) listener(this.state, before);
  }

  select(value: number, view?: View): void {
    this.set({ value, group: "", ...(view ? { view } : {}) });
  }

  private read(): Partial<State> {
    const fields = new URLSearchParams(location.hash.slice(1));
    const found: Partial<State> = {};
    const view = fields.get("view");
    if (VIEWS.includes(view as View)) found.view = view as View;
    else if (fields.has("value") || fields.has("group")) found.view = "graph";
    const value = this.model.byName.get(fields.get("value") ?? "");
    if (value !== undefined) Object.assign(found, { value, group: "" });
    const group = fields.get("group");
    if (group) Object.assign(found, { group, value: -1 });
    const at = fields.get("worker")?.split(",").map(Number);
    const mesh = this.model.data.mesh;
    if (at?.length === mesh.length && at.every((place, dim) => Number.isInteger(place) && place >= 0 && place < mesh[dim]![1])) {
      found.point = at;
    }
    const dim = mesh.findIndex(([name]) => name === fields.get("dim"));
    if (dim >= 0) found.dim = dim;
    return found;
  }

  private write(): void {
    const { view, value, group, point, dim } = this.state;
    const fields = new URLSearchParams({ view, ...(this.part ? { part: this.part } : {}) });
    if (value >= 0) fields.set("value", this.model.name(value));
    if (group) fields.set("group", group);
    if (point.some(Boolean)) fields.set("worker", point.join(","));
    if (dim >= 0) fields.set("dim", this.model.dimName(dim));
    const hash = `#${fields}`;
    // A document made from text (an iframe's srcdoc) has no address of its own to change.
    if (location.protocol !== "about:" && location.hash !== hash) history.replaceState(null, "", hash);
  }
}
