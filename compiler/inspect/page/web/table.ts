// A table of any length: only the rows that can be seen are in the document. Sorted by a click on a column's head; walked
// with the arrow keys.

import { framed, h, replace, type Child } from "./dom";

export interface Column<Row> {
  name: string;
  /** a CSS grid track: `minmax(8rem, 2fr)` */
  width: string;
  cell: (row: Row) => Child;
  /** what it is sorted by; columns without it cannot be sorted */
  by?: (row: Row) => number | string;
  number?: boolean;
  title?: string;
}

const HEIGHT = 28;
const PRINTED = 500;

export class Table<Row> {
  readonly element: HTMLElement;
  private readonly body: HTMLElement;
  private readonly space: HTMLElement;
  private readonly head: HTMLElement;
  private rows: Row[] = [];
  private sorted: Row[] = [];
  private at = -1;
  private column = -1;
  private down = true;
  private readonly template: string;
  private readonly least: string;

  constructor(
    label: string,
    private readonly columns: Column<Row>[],
    private readonly pick: (row: Row) => void,
    private readonly options: { sort?: string; picked?: (row: Row) => boolean; empty?: string } = {},
  ) {
    this.template = columns.map((column) => column.width).join(" ");
    // Columns keep their least widths: a table that is wider than its place scrolls sideways, head and all.
    this.least = `${columns.reduce((sum, column) => sum + Number.parseFloat(/[\d.]+/.exec(column.width)![0]), 0)}rem`;
    this.head = h("div", { class: "row head", role: "row" });
    this.head.style.gridTemplateColumns = this.template;
    this.head.style.minWidth = this.least;
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.space.style.minWidth = this.least;
    this.body = h("div", { class: "rows", tabindex: 0, role: "grid", "aria-label": label }, h("div", { role: "rowgroup", class: "heads" }, this.head), this.space);
    this.element = h("div", { class: "table" }, this.body);
    const draw = framed(() => this.draw());
    this.body.addEventListener("scroll", draw, { passive: true });
    this.body.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(draw).observe(this.body);
    this.column = columns.findIndex((column) => column.name === options.sort);
    this.drawHead();
  }

  show(rows: Row[]): void {
    this.rows = rows;
    this.at = -1;
    this.sort();
    this.body.scrollTop = 0;
    this.draw();
  }

  redraw(): void {
    this.draw();
  }

  focus(): void {
    if (this.at < 0) this.move(0);
    this.body.focus();
  }

  private sort(): void {
    const by = this.columns[this.column]?.by;
    this.sorted = [...this.rows];
    if (!by) return;
    const sign = this.down ? -1 : 1;
    this.sorted.sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      return sign * (typeof x === "string" ? x.localeCompare(String(y), undefined, { numeric: true }) : x - Number(y));
    });
  }

  private drawHead(): void {
    const cells = this.columns.map((column, at) => {
      const isSorted = at === this.column;
      const cell = h("div", { class: column.number ? "cell number" : "cell", role: "columnheader", title: column.title, "aria-sort": isSorted ? (this.down ? "descending" : "ascending") : null });
      if (!column.by) cell.append(column.name);
      else {
        const click = () => {
          this.down = isSorted ? !this.down : column.number === true;
          this.column = at;
          this.drawHead();
          this.sort();
          this.draw();
        };
        cell.append(h("button", { type: "button", click }, column.name, h("span", { class: "arrow", "aria-hidden": "true" }, isSorted ? (this.down ? "▾" : "▴") : "")));
      }
      return cell;
    });
    const focused = this.head.contains(document.activeElement) ? [...this.head.children].indexOf(document.activeElement!.parentElement!) : -1;
    replace(this.head, ...cells);
    if (focused >= 0) this.head.children[focused]?.querySelector("button")?.focus();
  }

  private draw(): void {
    this.body.setAttribute("aria-rowcount", String(this.sorted.length + 1));
    const printing = document.body.dataset["printing"] !== undefined;
    const total = printing ? Math.min(this.sorted.length, PRINTED) : this.sorted.length;
    this.space.style.height = `${total * HEIGHT}px`;
    if (!total) return replace(this.space, h("p", { class: "empty" }, this.options.empty ?? "Nothing to show."));
    const first = printing ? 0 : Math.max(0, Math.floor(this.body.scrollTop / HEIGHT) - 6);
    const last = printing ? total : Math.min(total, Math.ceil((this.body.scrollTop + this.body.clientHeight) / HEIGHT) + 6);
    const drawn: HTMLElement[] = [];
    for (let at = first; at < last; at += 1) drawn.push(this.row(this.sorted[at]!, at));
    replace(this.space, ...drawn);
  }

  private row(row: Row, at: number): HTMLElement {
    const picked = this.options.picked?.(row) ?? false;
    const element = h("div", {
      class: `row${at === this.at ? " at" : ""}${picked ? " picked" : ""}`, role: "row", "aria-rowindex": at + 2, "aria-selected": String(picked), "data-row": at,
      click: () => {
        this.at = at;
        this.pick(row);
        this.draw();
      },
    });
    element.style.gridTemplateColumns = this.template;
    element.style.top = `${at * HEIGHT}px`;
    for (const column of this.columns) {
      const content = column.cell(row);
      const cell = h("div", { class: column.number ? "cell number" : "cell", role: "gridcell" }, content);
      if (typeof content === "string") cell.title = content;
      element.append(cell);
    }
    return element;
  }

  private move(at: number): void {
    this.at = Math.max(0, Math.min(this.sorted.length - 1, at));
    const top = this.at * HEIGHT;
    const seen = this.body.clientHeight - this.head.clientHeight;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + HEIGHT > this.body.scrollTop + seen) this.body.scrollTop = top + HEIGHT - seen;
    this.draw();
  }

  key(event: KeyboardEvent): void {
    const page = Math.max(1, Math.floor(this.body.clientHeight / HEIGHT) - 1);
    const steps: Record<string, number> = { ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: this.sorted.length - 1 };
    const to = steps[event.key];
    const row = this.sorted[this.at];
    if (to !== undefined) this.move(to);
    else if (event.key === "Enter" && row !== undefined) this.pick(row);
    else return;
    event.preventDefault();
  }
}
