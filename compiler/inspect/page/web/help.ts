// The keys, in an overlay; and the licences of what is inlined.

import { h } from "./dom";

const KEYS: [string, string][] = [
  ["/", "search; then ↓ and Enter choose a result"],
  ["1 … 7", "overview, graph, collectives, memory, timeline, source, compare"],
  ["arrows", "graph: to the next box in that direction; tables and charts: to the next row or place"],
  ["Enter", "graph: open or close the selected group; tables: select the row"],
  ["Backspace", "graph: select the group around the selection"],
  ["R, W", "to the first reader of the selected value, or to what writes its first operand"],
  ["[ and ]", "to the value before or after in the schedule"],
  ["+, -, 0", "zoom in, zoom out, show everything"],
  ["C", "graph: collapse all groups"],
  ["P", "to the panel of the selection"],
  ["T", "dark or light"],
  ["Esc", "close what is open, then select nothing"],
  ["?", "these keys"],
];

export class Help {
  readonly element: HTMLDialogElement;

  constructor() {
    const rows = KEYS.map(([keys, text]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, keys)), h("td", {}, text)));
    const licences = document.getElementById("licences")?.textContent?.trim() ?? "";
    this.element = h(
      "dialog",
      { class: "help", "aria-labelledby": "help-title" },
      h("h2", { id: "help-title" }, "Keys"),
      h("table", {}, h("tbody", {}, ...rows)),
      h("p", {}, "Drag to pan, turn the wheel to zoom. A click on a closed group opens it; its ⊟ closes it. The address in the bar leads back to what is shown."),
      h("p", {}, "Bytes, operations and seconds are those of one worker in one step."),
      h("details", {}, h("summary", {}, "Licences"), h("pre", {}, licences)),
      h("form", { method: "dialog" }, h("button", { class: "plain" }, "Close")),
    );
    // A form's submission is what the page's policy forbids; the dialog is closed by hand.
    this.element.querySelector("form")!.addEventListener("submit", (event) => {
      event.preventDefault();
      this.element.close();
    });
    this.element.addEventListener("click", (event) => {
      if (event.target === this.element) this.element.close();
    });
  }

  toggle(): void {
    if (this.element.open) this.element.close();
    else {
      this.element.showModal();
      this.element.querySelector<HTMLElement>("form button")!.focus();
    }
  }
}
