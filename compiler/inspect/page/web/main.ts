// The page: its bars, its views, and the keys.

import { Alive } from "./alive";
import { CollectivesView } from "./collectives";
import { CompareView } from "./compare";
import type { PageData } from "./data";
import { h } from "./dom";
import { count } from "./format";
import { GraphView } from "./graph";
import { Help } from "./help";
import { patterns } from "./layouts";
import { Measured } from "./measured";
import { MemoryView } from "./memory";
import { MeshStrip } from "./mesh";
import { Model } from "./model";
import { OverviewView } from "./overview";
import type { Page, Shown } from "./page";
import { Panel } from "./panel";
import { Search } from "./search";
import { SourceView } from "./source";
import { Store, type View, VIEWS } from "./store";
import { themeButton } from "./theme";
import { TimelineView } from "./timeline";
import { Tree } from "./tree";

const TITLES: Record<View, string> = { overview: "Overview", graph: "Graph", collectives: "Collectives", memory: "Memory", timeline: "Timeline", source: "Source", compare: "Compare" };

const data = JSON.parse(document.getElementById("plan")!.textContent!) as PageData;
let live = new AbortController();

/** Shows the plan; of a program of several meshes what one of them runs. */
function start(part: number): void {
  live.abort();
  live = new AbortController();
  const { signal } = live;
  for (const each of [...document.body.children]) if (!["SCRIPT", "NOSCRIPT"].includes(each.tagName)) each.remove();
  const shownPart = data.several?.parts[part];
  const model = new Model(shownPart?.plan ?? data.plan!);
  const store = new Store(model, shownPart?.name ?? "", signal);
  const page: Page = {
    title: data.title,
    model,
    store,
    tree: new Tree(model),
    alive: new Alive(model),
    measured: data.trace && new Measured(model, data.trace),
    comparison: data.comparison,
    several: data.several,
    part,
    choose: (other) => {
      // What was selected is another mesh's.
      if (location.protocol !== "about:") history.replaceState(null, "", "#");
      start(other);
    },
  };
  const views = VIEWS.filter((view) => view !== "compare" || page.comparison);
  if (!views.includes(store.state.view)) store.set({ view: "overview" });

  const shown = new Map<View, Shown>();
  const main = h("main", { id: "main" });
  const graph = (): GraphView => (shown.get("graph") as GraphShown).graph;
  const tabs = views.map((view, at) =>
    h("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "main", title: `${TITLES[view]} (${at + 1})`, click: () => store.set({ view }) }, TITLES[view]),
  );
  const bar = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, ...tabs);
  bar.addEventListener("keydown", (event) => {
    const way = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!way) return;
    const to = (views.indexOf(store.state.view) + way + views.length) % views.length;
    store.set({ view: views[to]! });
    tabs[to]!.focus();
    event.preventDefault();
  });
  const search = new Search(page);
  const help = new Help();
  const theme = themeButton();
  const panel = new Panel(page);
  const ops = [...model.all()].filter((at) => model.isOp(at)).length;
  const parts = data.several && h(
    "select",
    { class: "part", "aria-label": "Which mesh is shown", change: (event: Event) => page.choose(Number((event.target as HTMLSelectElement).value)) },
    ...data.several.parts.map(({ name }, at) => h("option", { value: at, selected: at === part }, name)),
  );
  const top = h(
    "header",
    { class: "top" },
    h("div", { class: "name" }, h("h1", { title: data.title }, data.title), h("p", { class: "muted" }, `${count(ops, "op")}, ${count(model.workers, "worker")}, ${model.data.madeFor}`)),
    parts,
    bar,
    search.element,
    theme,
    h("button", { type: "button", class: "icon", "aria-label": "Keys (?)", title: "Keys (?)", click: () => help.toggle() }, "?"),
  );

  const make: Record<View, () => Shown> = {
    overview: () => new OverviewView(page),
    graph: () => new GraphShown(page),
    collectives: () => new CollectivesView(page),
    memory: () => new MemoryView(page),
    timeline: () => new TimelineView(page),
    source: () => new SourceView(page),
    compare: () => new CompareView(page, page.comparison!),
  };
  const show = () => {
    const { view } = store.state;
    if (!visit(view).element.isConnected) main.append(visit(view).element);
    document.body.dataset["view"] = view;
    for (const [name, each] of shown) each.element.hidden = name !== view;
    // The overview says what the panel says of the whole plan.
    panel.element.hidden = view === "overview" && store.state.value < 0 && !store.state.group;
    tabs.forEach((tab, at) => {
      const isOn = views[at] === view;
      tab.setAttribute("aria-selected", String(isOn));
      tab.tabIndex = isOn ? 0 : -1;
    });
    shown.get(view)!.update();
  };
  // All views are printed, one after the other, with their names; the panel only where something is selected.
  const visit = (view: View): Shown => {
    if (!shown.has(view)) {
      const made = make[view]();
      shown.set(view, made);
      made.element.setAttribute("role", "tabpanel");
      made.element.setAttribute("aria-labelledby", `tab-${view}`);
      made.element.dataset["name"] = TITLES[view];
    }
    return shown.get(view)!;
  };
  addEventListener("beforeprint", () => {
    document.body.dataset["printing"] = "";
    for (const view of views) {
      const { element } = visit(view);
      main.append(element);
      element.hidden = false;
    }
    for (const each of shown.values()) {
      each.update();
      each.print?.(true);
    }
  }, { signal });
  addEventListener("afterprint", () => {
    delete document.body.dataset["printing"];
    for (const each of shown.values()) each.print?.(false);
    show();
  }, { signal });
  document.body.append(patterns(), top, new MeshStrip(page).element, h("div", { class: "middle" }, main, panel.element), help.element);
  show();
  store.on(show);

  const step = (value: number | undefined) => value !== undefined && value >= 0 && value < model.size && store.select(value);
  const keys: Record<string, () => void> = {
    "/": () => search.focus(),
    "?": () => help.toggle(),
    t: () => theme.click(),
    p: () => panel.element.focus(),
    r: () => step(model.readers[store.state.value]?.[0]),
    w: () => step(store.state.value >= 0 ? model.reads(store.state.value)[0] : undefined),
    "[": () => step(store.state.value - 1),
    "]": () => step(store.state.value + 1),
    "+": () => store.state.view === "graph" && graph().zoomBy(1.35),
    "=": () => store.state.view === "graph" && graph().zoomBy(1.35),
    "-": () => store.state.view === "graph" && graph().zoomBy(1 / 1.35),
    "0": () => store.state.view === "graph" && graph().fitAll(),
    c: () => store.state.view === "graph" && graph().collapseAll(),
    Escape: () => store.set({ value: -1, group: "", dim: -1, layout: "" }),
  };
  document.addEventListener("keydown", (event) => {
    const inField = event.target instanceof Element && event.target.closest("input, select, textarea") !== null;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || inField || (help.element.open && event.key !== "?")) return;
    const view = views[Number(event.key) - 1];
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (view) {
      store.set({ view });
      shown.get(view)!.focus();
    } else if (act) act();
    else return;
    event.preventDefault();
  }, { signal });
  document.documentElement.dataset["ready"] = "true";
  performance.mark("monarch-ready");
}

class GraphShown implements Shown {
  readonly element: HTMLElement;
  readonly graph: GraphView;

  constructor(page: Page) {
    this.graph = new GraphView(page.model, page.tree, page.store);
    this.element = h("div", { class: "view graph-view" }, this.graph.element);
  }

  update(): void {}

  print(on: boolean): void {
    this.graph.print(on);
  }

  focus(): void {
    this.graph.focus();
  }
}

const named = new URLSearchParams(location.hash.slice(1)).get("part");
start(Math.max(0, data.several?.parts.findIndex(({ name }) => name === named) ?? 0));
