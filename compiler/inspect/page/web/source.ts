// The user's lines, with what became of each and what it costs.

import { h } from "./dom";
import { bytes, flops, seconds } from "./format";
import { fileName, place } from "./model";
import type { Page, Shown } from "./page";
import { type Column, Table } from "./table";

interface Line {
  file: string;
  line: number;
  text: string;
  values: number[];
  collectives: number;
  sent: number;
  flops: number;
  seconds: number;
  measured: number;
}

export class SourceView implements Shown {
  readonly element = h("div", { class: "view source" });
  private readonly lines: Line[];
  private readonly table: Table<Line>;
  private readonly values: Table<number>;
  private readonly title = h("h3", {});
  private chosen: Line | undefined;

  constructor(private readonly page: Page) {
    const { model, measured, store } = page;
    this.lines = this.gather();
    const most = Math.max(1e-30, ...this.lines.map((line) => line.seconds));
    const files = new Set(this.lines.map((line) => line.file)).size;
    // What all lines are indented by says nothing.
    const indent = Math.min(...this.lines.filter((line) => line.text.trim()).map((line) => line.text.length - line.text.trimStart().length));
    const columns: Column<Line>[] = [
      { name: "line", width: files > 1 ? "8.5rem" : "4rem", cell: (line) => (files > 1 ? `${fileName(line.file)}:${line.line}` : String(line.line)), by: (line) => `${line.file}:${line.line}`, number: files <= 1 },
      { name: "code", width: "minmax(15rem, 4fr)", cell: (line) => h("code", { class: "line-code", title: line.text.trim() }, line.text.slice(indent) || "(the line could not be read)") },
      { name: "values", width: "4.2rem", cell: (line) => String(line.values.length), by: (line) => line.values.length, number: true },
      { name: "collectives", width: "5.8rem", cell: (line) => String(line.collectives || ""), by: (line) => line.collectives, number: true },
      { name: "sent", width: "5.2rem", cell: (line) => (line.sent ? bytes(line.sent) : ""), by: (line) => line.sent, number: true },
      { name: "computes", width: "6.6rem", cell: (line) => (line.flops ? flops(line.flops) : ""), by: (line) => line.flops, number: true },
      { name: "estimated", width: "6.4rem", cell: (line) => heat(line.seconds, most), by: (line) => line.seconds, number: true },
    ];
    if (measured) columns.push({ name: "measured", width: "5.6rem", cell: (line) => (line.measured ? seconds(line.measured) : ""), by: (line) => line.measured, number: true });
    this.table = new Table("Source lines", columns, (line) => this.choose(line), { picked: (line) => line === this.chosen, empty: "The plan names no source lines." });
    this.values = new Table<number>(
      "Values of the line",
      [
        { name: "name", width: "minmax(8rem, 1.2fr)", cell: (at) => `%${model.name(at)}`, by: (at) => model.name(at) },
        { name: "op", width: "minmax(7rem, 1fr)", cell: (at) => model.op(at), by: (at) => model.op(at) },
        { name: "type", width: "minmax(9rem, 1.6fr)", cell: (at) => model.typeText(at) },
        { name: "module", width: "minmax(6rem, 1fr)", cell: (at) => model.module(at), by: (at) => model.module(at) },
        { name: "sent", width: "6rem", cell: (at) => (model.data.values.sent[at] ? bytes(model.data.values.sent[at]!) : ""), by: (at) => model.data.values.sent[at]!, number: true },
        { name: "estimated", width: "6.4rem", cell: (at) => seconds(model.data.values.seconds[at]!), by: (at) => model.data.values.seconds[at]!, number: true },
      ],
      (at) => store.select(at),
      { picked: (at) => store.state.value === at, empty: "Choose a line to see what became of it." },
    );
    this.element.append(this.table.element, this.title, this.values.element);
    this.table.show(this.lines);
    store.on((state, before) => {
      if (state.value !== before.value) this.follow();
    });
    this.follow();
  }

  private gather(): Line[] {
    const { model, measured } = this.page;
    const found = new Map<string, Line>();
    for (const at of model.all()) {
      const source = model.source(at);
      if (!source) continue;
      const key = `${source.file}:${source.line}`;
      let line = found.get(key);
      if (!line) found.set(key, (line = { file: source.file, line: source.line, text: source.text, values: [], collectives: 0, sent: 0, flops: 0, seconds: 0, measured: 0 }));
      const values = model.data.values;
      line.values.push(at);
      line.collectives += model.runs([at]);
      line.sent += values.sent[at]!;
      line.flops += values.flops[at]!;
      line.seconds += values.seconds[at]!;
      line.measured += measured?.seconds[at] || 0;
    }
    return [...found.values()].sort((a, b) => a.file.localeCompare(b.file) || a.line - b.line);
  }

  private follow(): void {
    const source = this.page.store.state.value >= 0 ? this.page.model.source(this.page.store.state.value) : null;
    const line = source && this.lines.find((each) => each.file === source.file && each.line === source.line);
    if (line && line !== this.chosen) this.choose(line);
    else if (!this.chosen) this.choose(undefined);
  }

  private choose(line: Line | undefined): void {
    this.chosen = line;
    this.title.textContent = line ? `What became of ${place({ ...line, column: 0, end: 0 })}` : "Choose a line";
    this.values.show(line?.values ?? []);
    this.table.redraw();
  }

  update(): void {
    this.table.redraw();
    this.values.redraw();
  }

  focus(): void {
    this.table.focus();
  }
}

function heat(value: number, most: number): HTMLElement {
  const bar = h("span", { class: "heat", "aria-hidden": "true" });
  bar.style.width = `${(100 * value) / most}%`;
  return h("span", { class: "heated" }, bar, h("span", {}, value ? seconds(value) : ""));
}
