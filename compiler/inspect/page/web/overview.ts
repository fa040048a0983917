// What the page opens on: verdicts in words, where a step's time and memory go, the dearest lines, and the model's blocks.

import type { BlockData, OverviewData, VerdictData } from "./data";
import { add, type Child, h } from "./dom";
import { bytes, count, flops, seconds } from "./format";
import { hue } from "./layouts";
import { PHASES } from "./model";
import type { Page, Shown } from "./page";

interface Part {
  name: string;
  amount: number;
  colour: string;
}

const MARKS: Record<VerdictData["state"], string> = { good: "✓", note: "!", bad: "✗" };
const SAID: Record<VerdictData["state"], string> = { good: "good", note: "worth a look", bad: "a problem" };

export class OverviewView implements Shown {
  readonly element = h("div", { class: "view overview", tabindex: -1 });
  private readonly data: OverviewData;

  constructor(private readonly page: Page) {
    this.data = page.model.data.overview;
    add(this.element, this.meshes(), this.verdicts(), h("div", { class: "columns" }, this.time(), this.memory()), this.lines(), this.blocks());
  }

  update(): void {}

  focus(): void {
    this.element.focus();
  }

  /** Of a program of several meshes: each with its time and memory, the schedule, and what they send one another. */
  private meshes(): HTMLElement | null {
    const { several, part: shown, choose } = this.page;
    if (!several) return null;
    const longest = Math.max(...several.parts.map(({ plan }) => plan.overview.seconds), 1e-30);
    const rows = several.parts.map(({ name, workers, plan }, at) => {
      const filled = h("span", { class: "bar", "aria-hidden": "true" });
      filled.style.width = `${(100 * plan.overview.seconds) / longest}%`;
      const go = h("button", { type: "button", class: "link", "aria-pressed": String(at === shown), click: () => choose(at) }, name);
      return h("tr", {}, h("th", { scope: "row" }, h("span", { class: "indented" }, at === shown ? h("b", {}, `${name}, shown below`) : go), filled), cell(`mesh<${plan.mesh.map(([dim, size]) => `${dim}=${size}`).join(", ")}>`), cell(count(workers.length, "worker")), cell(seconds(plan.overview.seconds)), cell(bytes(plan.overview.memory.held)));
    });
    const sent = several.transfers.map((each) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, each.type)), cell(`${each.from} → ${each.to}`), cell(bytes(each.bytes)), cell(each.line)));
    const schedule = several.schedule && h("p", {}, several.schedule);
    const idle = several.bubble > 0 && bar([{ name: "busy", amount: 1 - several.bubble, colour: "var(--muted)" }, { name: "bubble", amount: several.bubble, colour: "var(--whole)" }], 1, share);
    return part("Meshes", "what each runs in a step, as estimated, and the most that a worker of it holds", schedule, idle, table(["mesh", "", "", "a step", "at the peak"], rows, "model"), sent.length ? h("details", { open: sent.length <= 12 }, h("summary", {}, `${count(sent.length, "transfer")} in a step`), table(["received as", "", "bytes", "line"], sent)) : null);
  }

  private verdicts(): HTMLElement | null {
    if (!this.data.verdicts.length) return null;
    const rows = this.data.verdicts.map(({ state, text, do: advice, value }) => {
      const at = this.page.model.byName.get(value);
      const go = at !== undefined && h("button", { type: "button", class: "link value-link", click: () => this.page.store.select(at, "graph") }, `%${value}`);
      return h("li", { class: state }, h("span", { class: "mark", title: SAID[state] }, MARKS[state]), h("div", {}, h("p", {}, text, " ", go), advice && h("p", { class: "muted" }, `→ ${advice}`)));
    });
    return part("In words", "", h("ul", { class: "verdicts" }, ...rows));
  }

  private time(): HTMLElement {
    const { data } = this;
    const names = this.page.model.data.mesh.map(([name]) => name);
    const colour = (name: string) => {
      if (name === "arithmetic") return "var(--muted)";
      const dim = names.indexOf(name.replace("waiting for ", "").split(",")[0]!);
      return dim < 0 ? "var(--whole)" : hue(dim);
    };
    const parts = Object.entries(data.time).map(([name, amount]): Part => ({ name, amount, colour: colour(name) }));
    const hidden = data.hidden > 0 && h("p", { class: "muted" }, `${seconds(data.hidden)} of collectives pass while it computes.`);
    return part("Where a step's time goes", `${seconds(data.seconds)}, estimated`, bar(parts, data.seconds, seconds), hidden, ...this.measured());
  }

  private measured(): Child[] {
    const { measured, model } = this.page;
    if (!measured) return [];
    let [computing, moving, waiting] = [0, 0, 0];
    for (const at of model.all()) {
      const took = measured.seconds[at] || 0;
      const waited = Math.min(took, measured.waited[at] || 0);
      if (!model.isCollective(at) && model.op(at) !== "wait") computing += took;
      else [moving, waiting] = [moving + took - waited, waiting + waited];
    }
    const parts = [
      { name: "computing", amount: computing, colour: "var(--muted)" },
      { name: "moving", amount: moving, colour: "var(--accent)" },
      { name: "waiting for peers", amount: waiting, colour: "var(--whole)" },
    ].filter((each) => each.amount);
    const total = computing + moving + waiting;
    return [h("p", { class: "second" }, "Measured ", h("span", { class: "muted" }, `${seconds(total)}, the median of ${count(measured.data.runs, "step")} of all workers`)), bar(parts, total, seconds)];
  }

  private memory(): HTMLElement {
    const { held, kinds, value, where, there, machine } = this.data.memory;
    const shades = ["var(--dim0)", "var(--dim2)", "var(--dim4)", "var(--muted)", "var(--whole)"];
    const named = (kind: string) => ((PHASES as readonly string[]).includes(kind) ? `made in ${kind}` : kind === "waiting" ? "to be given back" : kind);
    const parts = Object.entries(kinds).map(([name, amount], at): Part => ({ name: named(name), amount, colour: shades[Math.min(at, shades.length - 1)]! }));
    const at = this.page.model.byName.get(value);
    const link = at !== undefined && h("button", { type: "button", class: "link value-link", click: () => this.page.store.select(at, "memory") }, `%${value}`);
    const of = there === null ? "no machine was named: compile with --machine to compare" : `of ${bytes(there)}${machine ? ` on ${machine}` : ", the limit"}`;
    const peak = value && h("p", {}, "The peak is at ", link, where && `, ${where}`, parts[0] && `. Most of it: ${parts[0].name}.`);
    return part("Memory of a worker at the peak", bytes(held), bar(parts, Math.max(held, there ?? 0), bytes, there ?? undefined), h("p", { class: "muted" }, `${bytes(held)}: ${of}.`), peak);
  }

  private lines(): HTMLElement | null {
    const { lines } = this.data;
    if (!lines.length) return null;
    const total = this.data.seconds || 1;
    const rows = lines.map((line) =>
      h("tr", {}, h("th", { scope: "row" }, h("span", { class: "place", title: line.name }, line.name.slice(line.name.lastIndexOf("/") + 1)), h("code", {}, line.code.trim())), cell(seconds(line.seconds)), cell(share(line.seconds / total)), cell(line.sent ? bytes(line.sent) : ""), cell(line.held ? bytes(line.held) : "")),
    );
    const more = h("button", { type: "button", class: "link", click: () => this.page.store.set({ view: "source" }) }, "all lines");
    return part(lines.length > 1 ? `The ${lines.length} lines that cost most` : "The line that costs most", more, table(["line", "time", "of a step", "sends", "at the peak"], rows));
  }

  private blocks(): HTMLElement | null {
    const { blocks } = this.data;
    if (!blocks.length) return null;
    const most = Math.max(...blocks.map(secondsOf), 1e-30);
    // The repeated block that takes longest is open: the others are closed.
    const opened = [...blocks].filter((block) => block.times > 1).sort((a, b) => secondsOf(b) - secondsOf(a))[0];
    const rows: HTMLElement[] = [];
    const visit = (block: BlockData, depth: number, shown: boolean, open: boolean): HTMLElement[] => {
      const own: HTMLElement[] = [];
      const row = this.block(block, depth, most, open, (now) => {
        for (const [each, below] of inner) {
          each.hidden = !now;
          if (!now) for (const deeper of below) deeper.hidden = true;
        }
      });
      row.hidden = !shown;
      own.push(row);
      rows.push(row);
      const inner = block.parts.map((each): [HTMLElement, HTMLElement[]] => {
        const [first, ...rest] = visit(each, depth + 1, shown && open, false);
        return [first!, rest];
      });
      for (const [first, rest] of inner) own.push(first, ...rest);
      return own;
    };
    for (const block of blocks) visit(block, 0, true, block === opened);
    return part("The model", "what each of its blocks costs, all that are alike together", table(["block", "time", "of a step", "computes", "sends", "weights"], rows, "model"));
  }

  private block(block: BlockData, depth: number, most: number, open: boolean, toggled: (open: boolean) => void): HTMLElement {
    let isOpen = open;
    const fold = block.parts.length
      ? h("button", { type: "button", class: "fold", "aria-expanded": String(open), "aria-label": `What is in ${block.name}`, click: () => {
          isOpen = !isOpen;
          fold!.setAttribute("aria-expanded", String(isOpen));
          fold!.textContent = isOpen ? "▾" : "▸";
          toggled(isOpen);
        } }, open ? "▾" : "▸")
      : null;
    const group = this.page.tree.groups.get(`forward/${block.path.replaceAll(".", "/")}`);
    const go = () => this.page.store.set({ group: group!.key, value: -1, view: "graph" });
    const name = group ? h("button", { type: "button", class: "link", title: "Show it in the graph", click: go }, block.name) : h("span", {}, block.name);
    const filled = h("span", { class: "bar", "aria-hidden": "true" });
    filled.style.width = `${Math.min(100, (100 * secondsOf(block)) / most)}%`;
    const head = h("th", { scope: "row" }, h("span", { class: "indented" }, fold ?? h("span", { class: "fold" }), name, block.times > 1 && h("b", { class: "times" }, `×${block.times}`)), filled);
    (head.firstElementChild as HTMLElement).style.paddingLeft = `${depth * 18}px`;
    return h("tr", {}, head, cell(seconds(secondsOf(block))), cell(share(secondsOf(block) / (this.data.seconds || 1))), cell(block.flops ? flops(block.flops) : ""), cell(block.sent ? bytes(block.sent) : ""), cell(block.weights ? bytes(block.weights) : ""));
  }
}

const secondsOf = (block: BlockData): number => block.computing + block.communicating;

function part(title: string, note: Child, ...children: Child[]): HTMLElement {
  return h("section", {}, h("h2", {}, title, note ? h("span", { class: "muted" }, note) : null), ...children);
}

function share(of: number): string {
  if (of && of < 0.001) return "< 0.1%";
  return of ? `${Number((100 * of).toPrecision(of < 0.1 ? 1 : 2))}%` : "";
}

function cell(text: string): HTMLElement {
  return h("td", { class: "number" }, text);
}

function table(heads: string[], rows: HTMLElement[], kind = ""): HTMLElement {
  return h("div", { class: "scrolled" }, h("table", { class: `costs ${kind}` }, h("thead", {}, h("tr", {}, ...heads.map((name, at) => h("th", { scope: "col", class: at ? "number" : "" }, name)))), h("tbody", {}, ...rows)));
}

/** Parts of a whole as a bar, each named below with what it comes to; `limit` is marked. */
function bar(parts: Part[], whole: number, text: (amount: number) => string, limit?: number): HTMLElement {
  const strip = h("div", { class: "strip", "aria-hidden": "true" });
  const sum = parts.reduce((total, each) => total + each.amount, 0) || 1;
  const wide = Math.max(whole, sum);
  const named = h("ul", { class: "named" });
  for (const { name, amount, colour } of parts) {
    const filled = h("span", {});
    filled.style.width = `${(100 * amount) / wide}%`;
    filled.style.background = colour;
    strip.append(filled);
    const dot = h("span", { class: "dot", "aria-hidden": "true" });
    dot.style.background = colour;
    named.append(h("li", {}, dot, `${name} `, h("b", {}, text(amount)), h("span", { class: "muted" }, ` ${share(amount / sum)}`)));
  }
  if (limit !== undefined) {
    const mark = h("span", { class: "limit", title: `There are ${text(limit)}` });
    mark.style.left = `${(100 * limit) / wide}%`;
    strip.append(mark);
  }
  return h("div", { class: "parts" }, strip, named);
}
