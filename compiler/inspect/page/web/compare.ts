// Two plans side by side: what differs in layouts, collectives, bytes and memory. A value is the same
// if it stems from the same traced value, and a collective if it moves the same values over the same mesh dims; what else
// the compiler added is matched by its name.

import { h, replace } from "./dom";
import { bytes, count, flops, seconds, signedBytes } from "./format";
import type { Model } from "./model";
import type { Page, Shown } from "./page";
import { lineOf } from "./search";
import { Table } from "./table";

type What = "layout" | "collective" | "op";

export interface Difference {
  what: What;
  name: string;
  before: string;
  after: string;
  bytes: number;
  line: string;
  /** its number in the new plan, or -1 where it is gone */
  at: number;
}

const LABELS: Record<What, string> = { layout: "layouts", collective: "collectives", op: "other ops" };

export function differences(before: Model, after: Model): Difference[] {
  const found: Difference[] = [];
  const olds = keys(before);
  const news = keys(after);
  for (const [key, at] of news) {
    const old = olds.get(key);
    const sent = after.data.values.sent[at]!;
    if (old === undefined) {
      found.push({ what: after.isCollective(at) ? "collective" : "op", name: after.name(at), before: "", after: what(after, at), bytes: sent, line: lineOf(after, at), at });
      continue;
    }
    const [was, is] = [before.typeText(old), after.typeText(at)];
    const change = sent - before.data.values.sent[old]!;
    if (before.isCollective(old) && (change || before.dimNames(old) !== after.dimNames(at) || was !== is)) {
      found.push({ what: "collective", name: after.name(at), before: what(before, old), after: what(after, at), bytes: change, line: lineOf(after, at), at });
    } else if (was !== is) found.push({ what: "layout", name: after.name(at), before: was, after: is, bytes: change, line: lineOf(after, at), at });
  }
  for (const [key, old] of olds) {
    if (news.has(key)) continue;
    found.push({ what: before.isCollective(old) ? "collective" : "op", name: before.name(old), before: what(before, old), after: "", bytes: -before.data.values.sent[old]!, line: lineOf(before, old), at: -1 });
  }
  return found;
}

function keys(model: Model): Map<string, number> {
  const found = new Map<string, number>();
  const counts = new Map<string, number>();
  for (const at of model.all()) {
    const traced = model.traced(at);
    const moves = model.isCollective(at);
    const read = () => model.reads(at).map((other) => model.traced(other) || model.name(other));
    const stem = moves ? `c${model.op(at)} ${model.dimNames(at)} ${read()}` : traced ? `t${traced} ${model.op(at)}` : `n${model.op(at)} ${model.name(at)}`;
    const place = counts.get(stem) ?? 0;
    counts.set(stem, place + 1);
    found.set(`${stem} ${place}`, at);
  }
  return found;
}

function what(model: Model, at: number): string {
  return model.isCollective(at) ? `${model.op(at)} over ${model.dimNames(at)}, ${bytes(model.data.values.sent[at]!)}` : `${model.op(at)}: ${model.typeText(at)}`;
}

export class CompareView implements Shown {
  readonly element = h("div", { class: "view compare" });
  private readonly found: Difference[];
  private readonly table: Table<Difference>;
  private readonly filters = h("div", { class: "filters", role: "group", "aria-label": "Which differences" });
  private only: What | "" = "";

  constructor(page: Page, before: Model) {
    const { model, store } = page;
    this.found = differences(before, model);
    this.table = new Table<Difference>(
      "Differences",
      [
        { name: "what", width: "6.5rem", cell: (row) => row.what, by: (row) => row.what },
        { name: "name", width: "minmax(8rem, 1fr)", cell: (row) => `%${row.name}`, by: (row) => row.name },
        { name: "before", width: "minmax(9rem, 1.8fr)", cell: (row) => (row.before ? row.before : h("span", { class: "muted" }, "not there")), by: (row) => row.before },
        { name: "now", width: "minmax(9rem, 1.8fr)", cell: (row) => (row.after ? row.after : h("span", { class: "muted" }, "gone")), by: (row) => row.after },
        { name: "sent", width: "7rem", cell: (row) => (row.bytes ? signedBytes(row.bytes) : ""), by: (row) => row.bytes, number: true },
        { name: "line", width: "6.5rem", cell: (row) => row.line, by: (row) => row.line },
      ],
      (row) => row.at >= 0 && store.select(row.at),
      { picked: (row) => row.at >= 0 && row.at === store.state.value, empty: "The two plans do the same." },
    );
    this.element.append(this.summary(before, model), this.filters, this.table.element);
    this.show();
  }

  private summary(before: Model, after: Model): HTMLElement {
    const dims = [...new Set([...before.data.mesh, ...after.data.mesh].map(([name]) => name))];
    const over = (model: Model, name: string) => model.collectives.filter((at) => model.data.values.dims[at]!.some((dim) => model.dimName(dim) === name));
    const ops = (model: Model) => [...model.all()].filter((at) => !model.isInput(at)).length;
    const plain = (value: number) => value.toLocaleString("en-US");
    const rows: [string, number, number, (value: number) => string][] = [
      ["ops", ops(before), ops(after), plain],
      ["collectives", before.collectives.length, after.collectives.length, plain],
      ["sent by a worker", before.sum("sent", before.all()), after.sum("sent", after.all()), bytes],
      ...dims.map((name): [string, number, number, (value: number) => string] => [`sent over ${name}`, before.sum("sent", over(before, name)), after.sum("sent", over(after, name)), bytes]),
      ["peak memory", before.held[before.peak] ?? 0, after.held[after.peak] ?? 0, bytes],
      ["computes", before.sum("flops", before.all()), after.sum("flops", after.all()), flops],
      ["estimated", before.sum("seconds", before.all()), after.sum("seconds", after.all()), seconds],
    ];
    const mesh = (model: Model) => model.data.mesh.map(([name, size]) => `${name}=${size}`).join(", ");
    const head = h("tr", {}, h("th", { scope: "col" }, ""), h("th", { scope: "col" }, "before", h("span", { class: "muted" }, `${before.data.name} on ${mesh(before)}`)), h("th", { scope: "col" }, "now", h("span", { class: "muted" }, `${after.data.name} on ${mesh(after)}`)), h("th", { scope: "col" }, "change"));
    return h("table", { class: "summary-table" }, h("thead", {}, head), h("tbody", {}, ...rows.map(([name, was, is, text]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text(was)), h("td", {}, text(is)), change(was, is, text)))));
  }

  private show(): void {
    const button = (key: What | "", text: string, many: number) =>
      h("button", { type: "button", class: "plain", "aria-pressed": String(this.only === key), click: () => { this.only = key; this.show(); } }, `${text} ${many.toLocaleString("en-US")}`);
    const of = (key: What) => this.found.filter((row) => row.what === key);
    replace(this.filters, button("", "all", this.found.length), ...(Object.keys(LABELS) as What[]).map((key) => button(key, LABELS[key], of(key).length)), h("span", { class: "muted" }, `${count(this.found.length, "difference")} between the plans`));
    this.table.show(this.only ? of(this.only) : this.found);
  }

  update(): void {
    this.table.redraw();
  }

  focus(): void {
    this.table.focus();
  }
}

function change(was: number, is: number, text: (value: number) => string): HTMLElement {
  if (was === is) return h("td", { class: "muted" }, "same");
  const sign = is > was ? "+" : "−";
  const share = was ? ` (${sign}${Math.abs(Math.round((100 * (is - was)) / was))}%)` : "";
  return h("td", { class: is > was ? "more" : "less" }, `${sign}${text(Math.abs(is - was))}${share}`);
}
