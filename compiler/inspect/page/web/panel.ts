// What is known of the selection: a value, a group, or the whole plan.

import { add, type Child, h, replace } from "./dom";
import { bytes, count, flops, seconds } from "./format";
import { hue, kindOf, localBytes, localShape, ranges, shards, swatch } from "./layouts";
import { type Model, PHASES, place, type TensorType } from "./model";
import type { Page } from "./page";
import { lineOf } from "./search";
import type { Group } from "./tree";
import { type Cause, type Line, lines, type Moved, Why } from "./why";

const LISTED = 12;
/** Tensors of a collective whose chains are shown at once. */
const TOLD = 2;

export class Panel {
  readonly element = h("aside", { class: "panel", "aria-label": "The selection", tabindex: -1 });
  private readonly model: Model;
  private readonly reasons: Why;

  constructor(private readonly page: Page) {
    this.model = page.model;
    this.reasons = new Why(page.model);
    page.store.on((state, before) => {
      if (state.value !== before.value || state.group !== before.group) this.element.scrollTop = 0;
      if (state.value !== before.value || state.group !== before.group || state.point !== before.point) this.update();
    });
    this.update();
  }

  private update(): void {
    const { value, group } = this.page.store.state;
    const found = this.page.tree.groups.get(group);
    if (value >= 0) replace(this.element, ...this.value(value));
    else if (found && group) replace(this.element, ...this.group(found));
    else replace(this.element, ...this.plan());
  }

  private link(at: number): HTMLElement {
    const { model } = this;
    return h("button", { type: "button", class: "link value-link", title: `${model.op(at)}: ${model.typeText(at)}`, click: () => this.page.store.select(at) }, `%${model.name(at)}`);
  }

  private links(numbers: number[], none: string): HTMLElement {
    const list = h("ul", { class: "links-list" });
    const show = (upTo: number) => {
      const rows = numbers.slice(0, upTo).map((at) => h("li", {}, this.link(at), " ", h("span", { class: "muted" }, this.model.op(at))));
      const more = numbers.length - upTo;
      if (more > 0) rows.push(h("li", {}, h("button", { type: "button", class: "link", click: () => show(upTo + 200) }, `${more.toLocaleString("en-US")} more`)));
      replace(list, ...rows);
    };
    show(LISTED);
    return numbers.length ? list : h("p", { class: "muted" }, none);
  }

  private value(at: number): Child[] {
    const { model } = this;
    const type = model.type(at);
    const dims = model.decisions(at).map((decision) => decision.dim);
    return [
      h(
        "header",
        {},
        h("h2", {}, `%${model.name(at)}`),
        h("p", { class: "call" }, model.call(at)),
        h("p", { class: "chips" }, h("span", { class: `chip ${PHASES[model.phase(at)]}` }, PHASES[model.phase(at)] ?? ""), model.isCollective(at) && h("span", { class: "chip collective" }, `⇄ ${model.dimNames(at)}`), model.module(at) && this.moduleChip(at)),
      ),
      this.sourceSection(at),
      this.presence(at),
      this.kernel(at),
      this.costs(at),
      type ? section("Layout", ...this.layout(at, type)) : null,
      dims.length ? section("Why it has this layout", ...this.reasons.chains([at], dims).map((chain) => this.decision(chain))) : null,
      section(`Reads (${model.reads(at).length})`, this.links(model.reads(at), "Nothing: it comes from outside.")),
      section(`Read by (${model.readers[at]!.length})`, this.links(model.readers[at]!, "Nothing else in the plan.")),
    ];
  }

  private moduleChip(at: number): HTMLElement {
    const group = this.page.tree.home[at]!;
    return h("button", { type: "button", class: "chip", title: "Show the group", click: () => this.page.store.set({ group: group.key, value: -1, view: "graph" }) }, this.model.module(at));
  }

  private sourceSection(at: number): HTMLElement | null {
    const source = this.model.source(at);
    if (!source) return null;
    const go = () => this.page.store.set({ view: "source" });
    return section(
      "Source",
      h("button", { type: "button", class: "link", title: `${source.file}: show the line's costs`, click: go }, place(source)),
      source.text ? codeLine(source.text, source.column, source.end) : h("p", { class: "muted" }, "The line could not be read when the plan was made."),
    );
  }

  private costs(at: number): HTMLElement {
    const values = this.model.data.values;
    const measured = this.page.measured?.seconds[at] ?? NaN;
    const until = this.page.alive.until(at);
    const output = this.model.data.outputs.find(([value]) => value === at);
    const facts: [string, Child][] = [];
    if (values.sent[at]) facts.push(["sent by a worker", bytes(values.sent[at]!)]);
    for (const each of values.within[at]!.length ? this.model.collectivesOf(at) : []) facts.push([`${count(each.count, each.op)} over ${this.model.dimsText(each.dims)}`, `${bytes(each.sent)}, ${seconds(each.seconds)}`]);
    if (values.flops[at]) facts.push(["computes", flops(values.flops[at]!)]);
    if (values.moved[at]) facts.push(["reads and writes", bytes(values.moved[at]!)]);
    facts.push(["takes", values.allocates[at] ? bytes(values.allocates[at]!) : "no memory of its own"]);
    if (values.frees[at]) facts.push(["gives back", bytes(values.frees[at]!)]);
    if (!this.model.isInput(at)) facts.push(["estimated", seconds(values.seconds[at]!)]);
    if (!Number.isNaN(measured)) facts.push(["measured", `${seconds(measured)} (${times(measured, values.seconds[at]!)})`]);
    const waited = this.page.measured?.waited[at] || 0;
    if (waited) facts.push(["of it waiting for peers", seconds(waited)]);
    facts.push(["in the schedule", `${(at + 1).toLocaleString("en-US")} of ${this.model.size.toLocaleString("en-US")}`]);
    if (until !== null && values.allocates[at] && until > at) facts.push(["kept until", this.link(until)]);
    if (output) facts.push([output[1] === "return" ? "returned as" : "new value of", output[1] === "return" ? `result ${output[2]}` : output[2]]);
    return section("Costs", definitions(facts));
  }

  private layout(at: number, type: TensorType): Child[] {
    const { model } = this;
    const { point } = this.page.store.state;
    const where = model.data.mesh.map(([name], dim) => `${name}=${point[dim]}`).join(", ");
    const here = ranges(model, type, point);
    const others = model.typesOf(at).slice(1);
    const facts: [string, Child][] = [
      ["type", h("code", {}, type.text)],
      ["lies", kindOf(model, type).key],
      ["a worker holds", h("code", {}, `${type.dtype}[${localShape(model, type).join(", ")}]`)],
      ["bytes", bytes(localBytes(model, type))],
    ];
    if (type.shape.length) facts.push([`worker ${where}`, h("code", {}, `[${here.map(([from, to]) => `${from}:${to}`).join(", ")}]`)]);
    if (others.length) facts.push(["more results", h("code", {}, others.map((other) => other?.text ?? "nothing").join(", "))]);
    return [type.shape.length ? shards(model, type, point) : null, definitions(facts)];
  }

  /** What a generated kernel does: what runs on the plan's target, and the loops that every emitter translates. */
  private kernel(at: number): HTMLElement | null {
    const by = this.model.data.values.kernel[at]!;
    if (by >= 0) return section("Generated kernel", h("p", {}, "computed by ", this.link(by)));
    const found = this.model.kernels.get(at);
    if (!found) return null;
    const code = (text: string) => h("pre", { class: "code kernel" }, text.trim());
    return section(
      "Generated kernel",
      h("details", { open: true }, h("summary", {}, this.model.data.target === "cpu" ? "C++" : "Triton"), code(found.source)),
      h("details", {}, h("summary", {}, "Loops"), code(found.loops)),
    );
  }

  /** Why the compiler added a value: what it moves, from where to where, and why both lie so. */
  private presence(at: number): HTMLElement | null {
    const { model } = this;
    const moved = this.reasons.moved(at);
    if (!moved.length) return model.why(at) ? section("Why it is here", h("p", { class: "why" }, model.why(at))) : null;
    const together = moved.length > TOLD && h("p", { class: "muted" }, `${moved.length} tensors travel together: select one of the results for its full explanation.`);
    return section("Why it is here", ...moved.map((each) => this.movement(each, moved.length <= TOLD)), together);
  }

  private movement(moved: Moved, whole: boolean): HTMLElement {
    const facts: [string, Child][] = [["from", h("code", {}, moved.before)], ["to", h("code", {}, moved.after)]];
    const told = h("div", { class: "movement" }, h("p", { class: "why" }, moved.why || "The compiler added it."), definitions(facts));
    if (!whole) return told;
    const more = moved.takers.length - 1;
    add(
      told,
      ...moved.valueChains.map((chain) => this.decision(chain, [this.link(chain.value)])),
      ...moved.takerChains.map((chain) => this.decision(chain, [this.link(chain.value), " reads it"], moved.value)),
      more > 0 && h("p", { class: "muted" }, `and ${count(more, "more takes", "more take")} it`),
    );
    return told;
  }

  /** What decided on one mesh dim, the alternatives, and the way back to what the user said. `apart` is told already. */
  private decision(chain: Cause, title: Child[] = [], apart = -1): HTMLElement {
    const { model } = this;
    const { decision } = chain;
    const mark = h("span", { class: "dot", "aria-hidden": "true" });
    mark.style.background = hue(decision.dim);
    const rows = decision.alternatives.map((alternative, at) =>
      h("tr", { class: at === 0 ? "chosen" : "" }, h("td", {}, at === 0 ? "✓" : ""), h("td", {}, h("code", {}, alternative.text)), h("td", { class: "number" }, at === 0 ? "chosen" : alternative.extra ? `+${bytes(alternative.extra)}` : "as dear")),
    );
    const causes = chain.causes.filter((cause) => cause.value !== apart);
    return h(
      "div",
      { class: "decision" },
      h("h4", {}, ...title, title.length > 0 && h("span", { class: "muted" }, " on "), mark, model.dimName(decision.dim), decision.factor ? h("span", { class: "muted" }, ` factor ${decision.factor}`) : null, !decision.exact && h("span", { class: "chip", title: "The search was cut short here: a cheaper whole program may exist." }, "not proven cheapest")),
      decision.why ? h("p", { class: "why" }, decision.why) : null,
      decision.rule ? h("p", {}, h("span", { class: "muted" }, "rule "), h("code", {}, decision.rule)) : null,
      rows.length > 0 && h("table", { class: "alternatives" }, h("caption", {}, "Alternatives, and how much more the best program with each costs"), h("tbody", {}, ...rows)),
      causes.length > 0 && h("ul", { class: "chain" }, ...causes.flatMap((cause) => this.chain(lines(cause)))),
    );
  }

  /** A way back to what the user said, one value a line; what was left out comes with a click. */
  private chain(way: Line[]): HTMLElement[] {
    const { model } = this;
    return way.map((each) => {
      if ("more" in each) {
        const item = h("li", {}, h("button", { type: "button", class: "link more", click: () => item.replaceWith(...this.chain(each.more)) }, `... and so on, through ${each.more.length} values more ...`));
        return item;
      }
      const line = lineOf(model, each.value);
      return h(
        "li",
        {},
        h("div", { class: "because" }, h("span", {}, h("span", { class: "muted" }, each.first ? "because " : "and that because "), this.link(each.value)), h("span", { class: "place" }, line), h("code", {}, model.fullType(each.value))),
        each.why && h("p", { class: "said" }, each.why),
        each.below.length > 0 && h("ul", { class: "chain" }, ...each.below.flatMap((branch) => this.chain(branch))),
      );
    });
  }

  private layoutShares(members: number[]): HTMLElement {
    const shares = new Map<string, { at: number; count: number }>();
    for (const at of members) {
      const { key } = kindOf(this.model, this.model.type(at));
      const share = shares.get(key);
      if (share) share.count += 1;
      else shares.set(key, { at, count: 1 });
    }
    const rows = [...shares.values()].sort((a, b) => b.count - a.count).map(({ at, count: many }) => {
      const kind = kindOf(this.model, this.model.type(at));
      return h("li", {}, swatchIcon(kind), ` ${kind.key} `, h("span", { class: "muted" }, String(many)));
    });
    return h("ul", { class: "shares" }, ...rows);
  }

  private group(group: Group): Child[] {
    const { model } = this;
    const collectives = group.members.filter((at) => model.collectivesOf(at).length).sort((a, b) => model.data.values.sent[b]! - model.data.values.sent[a]!);
    const heavy = group.members.filter((at) => model.data.values.seconds[at]! > 0).sort((a, b) => model.data.values.seconds[b]! - model.data.values.seconds[a]!).slice(0, 8);
    return [
      h("header", {}, h("h2", {}, group.label), h("p", { class: "call" }, this.page.tree.path(group)), h("p", { class: "chips" }, h("span", { class: `chip ${PHASES[group.phase]}` }, PHASES[group.phase] ?? ""))),
      section("Costs", definitions(this.totals(group.members))),
      section("Layouts of its values", this.layoutShares(group.members)),
      collectives.length ? section(`Collectives (${model.runs(collectives).toLocaleString("en-US")})`, this.costList(collectives.slice(0, LISTED), "sent")) : null,
      heavy.length ? section("Most time, as estimated", this.costList(heavy, "seconds")) : null,
    ];
  }

  private costList(numbers: number[], column: "sent" | "seconds"): HTMLElement {
    const most = Math.max(...numbers.map((at) => this.model.data.values[column][at]!), 1e-30);
    const rows = numbers.map((at) => {
      const value = this.model.data.values[column][at]!;
      const bar = h("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${(100 * value) / most}%`;
      return h("li", {}, this.link(at), h("span", { class: "of" }, h("span", { class: "muted" }, column === "sent" ? [...new Set(this.model.collectivesOf(at).map(({ dims }) => this.model.dimsText(dims)))].join("; ") : this.model.op(at)), h("span", { class: "number" }, column === "sent" ? bytes(value) : seconds(value))), bar);
    });
    return h("ul", { class: "cost-list" }, ...rows);
  }

  private totals(members: number[]): [string, Child][] {
    const { model } = this;
    const ops = members.filter((at) => model.isOp(at)).length;
    const inputs = members.filter((at) => model.isInput(at)).length;
    const collectives = model.runs(members);
    const measured = this.page.measured;
    const facts: [string, Child][] = [
      ["values", [ops && count(ops, "op"), inputs && count(inputs, "input")].filter(Boolean).join(", ")],
      ["collectives", collectives.toLocaleString("en-US")],
      ["sent by a worker", bytes(model.sum("sent", members))],
      ["computes", flops(model.sum("flops", members))],
      ["estimated", seconds(model.sum("seconds", members))],
    ];
    if (measured) facts.push(["measured", seconds(members.reduce((sum, at) => sum + (measured.seconds[at] || 0), 0))]);
    return facts;
  }

  private plan(): Child[] {
    const { model } = this;
    const byDim = new Map<string, { many: number; sent: number }>();
    for (const { dims, count: many, sent } of model.collectives) {
      const entry = byDim.get(model.dimsText(dims)) ?? { many: 0, sent: 0 };
      byDim.set(model.dimsText(dims), { many: entry.many + many, sent: entry.sent + sent });
    }
    const heavy = [...model.all()].filter((at) => model.collectivesOf(at).length).sort((a, b) => model.data.values.sent[b]! - model.data.values.sent[a]!).slice(0, 6);
    const slow = [...model.all()].filter((at) => !model.isCollective(at) && model.data.values.seconds[at]! > 0).sort((a, b) => model.data.values.seconds[b]! - model.data.values.seconds[a]!).slice(0, 6);
    const passes = Object.entries(model.data.passes);
    return [
      h("header", {}, h("h2", {}, model.data.name), h("p", { class: "call" }, `compiled for ${model.data.madeFor} on mesh<${model.data.mesh.map(([name, size]) => `${name}=${size}`).join(", ")}>`)),
      section("One step", definitions([...this.totals([...model.all()]), ["peak memory", h("span", {}, model.size ? bytes(model.held[model.peak]!) : "0 B", " at ", model.size ? this.link(model.peak) : "")]])),
      byDim.size ? section("Moves over the mesh", definitions([...byDim].map(([name, entry]): [string, Child] => [name, `${bytes(entry.sent)} in ${count(entry.many, "collective")}`]))) : null,
      heavy.length ? section("Largest collectives", this.costList(heavy, "sent")) : null,
      slow.length ? section("Most time, as estimated", this.costList(slow, "seconds")) : null,
      passes.length ? section("Compiling took", definitions(passes.map(([name, took]): [string, Child] => [name, seconds(took)]))) : null,
      h("p", { class: "muted hint" }, "Select a box to see its origin, layout and cost. Press ? for the keys."),
    ];
  }
}

export function swatchIcon(kind: ReturnType<typeof kindOf>): SVGSVGElement {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("viewBox", "0 0 14 14");
  icon.setAttribute("class", "swatch-icon");
  icon.setAttribute("aria-hidden", "true");
  icon.append(swatch(kind, 1, 1, 12, 12));
  return icon;
}

export function section(title: string, ...children: Child[]): HTMLElement {
  return h("section", {}, h("h3", {}, title), ...children);
}

export function definitions(facts: [string, Child][]): HTMLElement {
  return h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** A line of code with the expression marked; columns count from 1, and 0 means unknown. */
export function codeLine(text: string, column: number, end: number): HTMLElement {
  const lead = text.length - text.trimStart().length;
  const shown = text.trim();
  const [from, to] = [column - 1 - lead, Math.max(column, end - 1) - lead];
  if (column <= lead || from >= shown.length) return h("pre", { class: "code" }, shown);
  const stop = end ? to : from + 1;
  return h("pre", { class: "code" }, shown.slice(0, from), h("mark", {}, shown.slice(from, stop)), shown.slice(stop));
}

function times(measured: number, estimated: number): string {
  return estimated > 0 ? `${Number((measured / estimated).toPrecision(2))}× the estimate` : "not estimated";
}

