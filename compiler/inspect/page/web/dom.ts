// Elements made in code. Text goes in as text nodes only, so nothing in a plan can become markup.

export type Child = Node | string | number | null | undefined | false;
type Handler = (event: never) => void;
export type Attributes = Record<string, string | number | boolean | Handler | null | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, ...children);
}

export function add(parent: Element, ...children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

export function h<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  fill(element, attributes, children);
  return element;
}

export function svg<Name extends keyof SVGElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[Name] {
  const element = document.createElementNS(SVG, name);
  fill(element, attributes, children);
  return element;
}

export function replace(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  add(parent, ...children);
}

/** Calls `draw` at most once a frame, however often the result is called. */
export function framed(draw: () => void): () => void {
  let asked = 0;
  return () => {
    if (asked) return;
    asked = requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  };
}
