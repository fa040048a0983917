// Finding values by name, op, module, source line and layout: every word of the query has to occur somewhere.

import { framed, h } from "./dom";
import { count } from "./format";
import { kindOf } from "./layouts";
import { type Model, place } from "./model";
import type { Page } from "./page";
import { Table } from "./table";

export class Search {
  readonly element: HTMLElement;
  private readonly input = h("input", { type: "search", id: "search", placeholder: "Search  /", autocomplete: "off", spellcheck: "false", role: "combobox", "aria-expanded": "false", "aria-controls": "results", "aria-label": "Search values by name, op, module, source line or layout" });
  private readonly popup = h("div", { class: "results", id: "results", hidden: true });
  private readonly found = h("p", { class: "found", role: "status" });
  private readonly table: Table<number>;
  private texts: string[] | null = null;

  constructor(private readonly page: Page) {
    const { model } = page;
    this.table = new Table<number>(
      "Search results",
      [
        { name: "name", width: "minmax(7rem, 1.3fr)", cell: (at) => `%${model.name(at)}` },
        { name: "op", width: "minmax(6rem, 1fr)", cell: (at) => model.op(at) },
        { name: "type", width: "minmax(8rem, 1.5fr)", cell: (at) => model.typeText(at) },
        { name: "module", width: "minmax(6rem, 1fr)", cell: (at) => model.module(at) },
        { name: "line", width: "6.5rem", cell: (at) => lineOf(model, at) },
      ],
      (at) => this.jump(at),
      { empty: "Nothing has all of these words." },
    );
    this.popup.append(this.found, this.table.element);
    this.element = h("div", { class: "search" }, this.input, this.popup);
    const look = framed(() => this.look());
    this.input.addEventListener("input", look);
    this.input.addEventListener("focus", look);
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("focusout", (event) => {
      if (!this.element.contains(event.relatedTarget as Node | null)) this.close();
    });
    this.popup.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.input.focus();
    });
    this.popup.addEventListener("mousedown", (event) => event.preventDefault());
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  /** What each value is found by, in lower case. Made at the first search: it takes a moment for large plans. */
  private index(): string[] {
    const { model } = this.page;
    this.texts ??= [...model.all()].map((at) => {
      const source = model.source(at);
      const where = source ? `${place(source)} ${source.text}` : "";
      return `%${model.name(at)} ${model.call(at)} ${model.op(at)} ${model.module(at)} ${model.typeText(at)} ${kindOf(model, model.type(at)).key} ${where}`.toLowerCase();
    });
    return this.texts;
  }

  private look(): void {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.close();
    const { model } = this.page;
    const texts = this.index();
    const numbers = [...model.all()].filter((at) => words.every((word) => texts[at]!.includes(word)));
    // Names that begin so stand first.
    const start = words[0]!.replace(/^%/, "");
    const rank = (at: number) => (model.name(at) === start ? 0 : model.name(at).toLowerCase().startsWith(start) ? 1 : 2);
    numbers.sort((a, b) => rank(a) - rank(b) || a - b);
    this.found.textContent = `${count(numbers.length, "value")} of ${model.size.toLocaleString("en-US")}`;
    this.popup.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.table.show(numbers);
    this.first = numbers[0];
  }

  private first: number | undefined;

  private key(event: KeyboardEvent): void {
    if (event.key === "Escape") {
      this.close();
      this.input.blur();
    } else if (event.key === "ArrowDown" && !this.popup.hidden) this.table.focus();
    else if (event.key === "Enter" && this.first !== undefined && !this.popup.hidden) this.jump(this.first);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private jump(at: number): void {
    this.close();
    const { view } = this.page.store.state;
    this.page.store.select(at, view === "compare" ? "graph" : view);
    this.input.blur();
  }

  private close(): void {
    this.popup.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }
}

export function lineOf(model: Model, at: number): string {
  const source = model.source(at);
  return source ? place(source) : "";
}
