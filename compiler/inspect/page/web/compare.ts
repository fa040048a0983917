// Two plans side by side: what compiler/inspect/differences.py found between them, as a table.

import type { Changed, Comparison, Moved } from "./data";
import { h, replace } from "./dom";
import { bytes, count, flops, seconds, signedBytes } from "./format";
import type { Model } from "./model";
import type { Page, Shown } from "./page";
import { Table } from "./table";

type What = "interface" | "layout" | "collective" | "op" | "kernel";

interface Row {
  what: What;
  name: string;
  module: string;
  before: string;
  now: string;
  /** why it is there, for what the compiler added */
  why: string;
  bytes: number;
  line: string;
  /** the number of its first value in this plan, or -1 where it is gone */
  at: number;
}

const LABELS: Record<What, string> = { interface: "inputs, state, results", layout: "layouts", collective: "collectives", op: "other ops", kernel: "kernels" };

export class CompareView implements Shown {
  readonly element = h("div", { class: "view compare" });
  private readonly rows: Row[];
  private readonly table: Table<Row>;
  private readonly filters = h("div", { class: "filters", role: "group", "aria-label": "Which differences" });
  private only: What | "" = "";

  constructor(page: Page, comparison: Comparison) {
    const { model, store } = page;
    this.rows = rowsOf(comparison, model);
    this.table = new Table<Row>(
      "Differences",
      [
        { name: "what", width: "5.5rem", cell: (row) => row.what, by: (row) => row.what },
        { name: "name", width: "minmax(10rem, 2fr)", cell: (row) => row.name, by: (row) => row.name },
        { name: "module", width: "minmax(5rem, 1fr)", cell: (row) => row.module, by: (row) => row.module },
        { name: "before", width: "minmax(7rem, 1.5fr)", cell: (row) => row.before || h("span", { class: "muted" }, "not there"), by: (row) => row.before },
        { name: "now", width: "minmax(7rem, 1.5fr)", cell: (row) => (row.now ? h("span", { title: row.why || row.now }, row.now) : h("span", { class: "muted" }, "gone")), by: (row) => row.now },
        { name: "sent", width: "6rem", cell: (row) => (row.bytes ? signedBytes(row.bytes) : ""), by: (row) => row.bytes, number: true, title: "How many bytes a worker sends more or less" },
        { name: "line", width: "6.5rem", cell: (row) => row.line, by: (row) => row.line },
      ],
      (row) => row.at >= 0 && store.select(row.at),
      { picked: (row) => row.at >= 0 && row.at === store.state.value, empty: "The two plans do the same." },
    );
    this.element.append(summary(comparison), this.filters, this.table.element);
    this.show();
  }

  private show(): void {
    const button = (key: What | "", text: string, many: number) =>
      h("button", { type: "button", class: "plain", "aria-pressed": String(this.only === key), click: () => { this.only = key; this.show(); } }, `${text} ${many.toLocaleString("en-US")}`);
    const of = (key: What) => this.rows.filter((row) => row.what === key);
    const found = (Object.keys(LABELS) as What[]).filter((key) => of(key).length);
    replace(this.filters, button("", "all", this.rows.length), ...found.map((key) => button(key, LABELS[key], of(key).length)), h("span", { class: "muted" }, "values of one op, line and module are one row"));
    this.table.show(this.only ? of(this.only) : this.rows);
  }

  update(): void {
    this.table.redraw();
  }

  focus(): void {
    this.table.focus();
  }
}

function rowsOf(found: Comparison, model: Model): Row[] {
  const first = (names: string[]) => model.byName.get(names[0] ?? "") ?? -1;
  const title = (op: string, over: string, names: string[]) => `${names.length > 1 ? `${names.length} × ` : ""}${over ? `${op} over ${over}` : op}`;
  const labels = interfaceOf(model);
  const none = { module: "", why: "", bytes: 0, line: "", at: -1 };
  return [
    ...Object.entries(found.values).map(([name, [before, now]]): Row => ({ ...none, what: "interface", name, before, now, at: labels.get(name) ?? -1 })),
    ...found.layouts.map((each: Changed): Row => ({
      what: each.over ? "collective" : "layout", name: title(each.op, each.over, each.values), module: each.module, before: each.before, now: each.after,
      why: "", bytes: each.sent[1] - each.sent[0], line: each.where, at: first(each.values),
    })),
    ...found.ops.map((each: Moved): Row => {
      const [gone, there] = [each.sign === "-", count(each.values.length, "call")];
      return {
        what: each.over ? "collective" : "op", name: title(each.op, each.over, each.values), module: each.module, before: gone ? there : "", now: gone ? "" : there,
        why: each.why, bytes: gone ? -each.bytes : each.bytes, line: each.where, at: gone ? -1 : first(each.values),
      };
    }),
    ...Object.entries(found.kernels).map(([name, [before, now]]): Row => ({ ...none, what: "kernel", name, before: before ? count(before, "call") : "", now: now ? count(now, "call") : "" })),
  ];
}

/** Values by what they are to the program's caller, as differences.py names them. */
function interfaceOf(model: Model): Map<string, number> {
  const found = new Map<string, number>();
  for (const [at, kind, label] of model.data.outputs) found.set(`${kind} ${label}`, at);
  for (const at of model.all()) {
    if (model.op(at) === "input") found.set(`input ${model.name(at)}`, at);
    else if (model.op(at) === "state") found.set(model.call(at).replaceAll('"', ""), at);
  }
  return found;
}

function summary(found: Comparison): HTMLElement {
  const units = { bytes, flops, seconds, "": (value: number) => value.toLocaleString("en-US") };
  const rows = Object.entries(found.totals).map(([name, [was, now]]) => {
    const text = units[found.units[name] ?? ""];
    return line(name, text(was), text(now), change(was, now, text));
  });
  const over = Object.entries(found.collectives).map(([name, [was, now]]) => {
    const text = ([many, sent]: [number, number]) => (many ? `${bytes(sent)} in ${many.toLocaleString("en-US")}` : "none");
    return line(name, text(was), text(now), change(was[1], now[1], bytes));
  });
  const { before, now } = found;
  const head = (name: string, of: typeof before) => h("th", { scope: "col" }, name, h("span", { class: "muted" }, `${of.name} on ${of.mesh}${before.target === now.target ? "" : ` for ${of.target}`}`));
  return h("table", { class: "summary-table" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), head("before", before), head("now", now), h("th", { scope: "col" }, "change"))), h("tbody", {}, ...rows, ...over));
}

function line(name: string, was: string, now: string, changed: HTMLElement): HTMLElement {
  return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, was), h("td", {}, now), changed);
}

function change(was: number, is: number, text: (value: number) => string): HTMLElement {
  if (was === is) return h("td", { class: "muted" }, "same");
  const sign = is > was ? "+" : "−";
  const share = was ? ` (${sign}${percent(Math.abs((is - was) / was))})` : "";
  return h("td", { class: is > was ? "more" : "less" }, `${sign}${text(Math.abs(is - was))}${share}`);
}

function percent(share: number): string {
  return `${Number((100 * share).toFixed(share < 0.01 ? 1 : 0))}%`;
}
