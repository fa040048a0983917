// The collectives, sorted by bytes, time or mesh dim; and what moves over each mesh dim in all.

import { h, replace } from "./dom";
import { bytes, count, seconds } from "./format";
import { hue } from "./layouts";
import { type Collectives, PHASES } from "./model";
import type { Page, Shown } from "./page";
import { lineOf } from "./search";
import { type Column, Table } from "./table";

export class CollectivesView implements Shown {
  readonly element = h("div", { class: "view collectives" });
  private readonly totals = h("div", { class: "totals" });
  private readonly table: Table<Collectives>;
  private dim = -2;

  constructor(private readonly page: Page) {
    const { model, measured, store } = page;
    const columns: Column<Collectives>[] = [
      { name: "name", width: "minmax(8rem, 2fr)", cell: ({ at }) => `%${model.name(at)}`, by: ({ at }) => model.name(at) },
      { name: "op", width: "minmax(5.4rem, 0.8fr)", cell: (each) => each.op, by: (each) => each.op },
      { name: "over", width: "minmax(3.8rem, 0.5fr)", cell: (each) => model.dimsText(each.dims), by: (each) => model.dimsText(each.dims) },
      { name: "sent", width: "4.8rem", cell: (each) => bytes(each.sent), by: (each) => each.sent, number: true, title: "Bytes that a worker puts in; for all_gather what it gets out" },
      { name: "estimated", width: "5.6rem", cell: (each) => seconds(each.seconds), by: (each) => each.seconds, number: true },
    ];
    if (model.collectives.some((each) => each.count > 1)) columns.splice(2, 0, { name: "times", width: "4rem", cell: (each) => each.count.toLocaleString("en-US"), by: (each) => each.count, number: true, title: "How often a step runs it: in the rounds of a loop" });
    if (measured) columns.push({ name: "measured", width: "5.6rem", cell: ({ at }) => (Number.isNaN(measured.seconds[at]!) ? "" : seconds(measured.seconds[at]!)), by: ({ at }) => measured.seconds[at] || 0, number: true, title: "Median over steps and workers, waiting for peers included" });
    columns.push(
      { name: "phase", width: "4.8rem", cell: ({ at }) => PHASES[model.phase(at)] ?? "", by: ({ at }) => model.phase(at) },
      { name: "module", width: "minmax(5rem, 1fr)", cell: ({ at }) => model.module(at), by: ({ at }) => model.module(at) },
      { name: "line", width: "5.6rem", cell: ({ at }) => lineOf(model, at), by: ({ at }) => lineOf(model, at) },
      { name: "why", width: "minmax(5rem, 2fr)", cell: ({ at }) => model.why(at) },
    );
    this.table = new Table("Collectives", columns, ({ at }) => store.select(at), { sort: "sent", picked: ({ at }) => store.state.value === at, empty: "Nothing moves between workers." });
    this.element.append(this.totals, this.table.element);
  }

  update(): void {
    const { model, store } = this.page;
    const { dim } = store.state;
    if (dim !== this.dim) {
      this.dim = dim;
      this.showTotals();
      this.table.show(dim < 0 ? model.collectives : model.collectives.filter(({ dims }) => dims.includes(dim)));
    } else this.table.redraw();
  }

  private showTotals(): void {
    const { model, store } = this.page;
    const most = Math.max(1, ...model.data.mesh.map((_, dim) => this.over(dim).sent));
    const cards = model.data.mesh.map(([name], dim) => {
      const { many, sent, took } = this.over(dim);
      const bar = h("span", { class: "meter", "aria-hidden": "true" });
      bar.style.background = hue(dim);
      bar.style.width = `${(100 * sent) / most}%`;
      const isOn = store.state.dim === dim;
      return h("button", { type: "button", class: "card", "aria-pressed": String(isOn), click: () => store.set({ dim: isOn ? -1 : dim }) }, h("b", {}, name), h("span", {}, bytes(sent)), h("span", { class: "muted" }, `${count(many, "collective")}, ${seconds(took)} estimated`), bar);
    });
    replace(this.totals, ...cards);
  }

  private over(dim: number): { many: number; sent: number; took: number } {
    const { model } = this.page;
    const found = model.collectives.filter(({ dims }) => dims.includes(dim));
    return {
      many: found.reduce((sum, each) => sum + each.count, 0),
      sent: found.reduce((sum, each) => sum + each.sent, 0),
      took: found.reduce((sum, each) => sum + each.seconds, 0),
    };
  }

  focus(): void {
    this.table.focus();
  }
}
