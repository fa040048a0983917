// Layouts as colours and as blocks. A mesh dim has one hue everywhere; what lies whole is grey, a pending sum is hatched,
// and what varies is dotted, so that nothing is told by hue alone.

import { svg } from "./dom";
import type { Model, TensorType } from "./model";

const HUES = 6;

export function hue(dim: number): string {
  return `var(--dim${dim % HUES})`;
}

export interface Kind {
  key: string;
  /** in a few words, for the legend */
  short: string;
  cut: number[];
  partial: number[];
  varying: number[];
}

export function kindOf(model: Model, type: TensorType | null): Kind {
  if (!type) return { key: "none", short: "no tensor", cut: [], partial: [], varying: [] };
  const cut = type.cut;
  const partial = type.partial.map(([dim]) => dim);
  const names = (dims: number[]) => dims.map((dim) => model.dimName(dim)).join(", ");
  const parts = [
    cut.length ? `sharded over ${names(cut)}` : "",
    partial.length ? `pending ${type.partial[0]![1]} over ${names(partial)}` : "",
    type.varying.length ? `varying over ${names(type.varying)}` : "",
  ].filter(Boolean);
  const short = [
    cut.length ? names(cut) : "",
    partial.length ? `pending ${names(partial)}` : "",
    type.varying.length ? `varying ${names(type.varying)}` : "",
  ].filter(Boolean);
  const key = parts.join(", ") || "replicated";
  return { key, short: short.join(" + ") || key, cut, partial, varying: type.varying };
}

/** The layout as a small swatch: one band for each mesh dim that cuts, hatched or dotted for the others. */
export function swatch(kind: Kind, x: number, y: number, width: number, height: number): SVGGElement {
  const group = svg("g", { class: "swatch" });
  const bands = [
    ...kind.cut.map((dim) => [hue(dim), ""] as const),
    ...kind.partial.map((dim) => [hue(dim), "url(#hatch)"] as const),
    ...kind.varying.map((dim) => [hue(dim), "url(#dots)"] as const),
  ];
  if (!bands.length) bands.push([kind.key === "none" ? "transparent" : "var(--whole)", ""]);
  const step = height / bands.length;
  bands.forEach(([fill, over], at) => {
    group.append(svg("rect", { x, y: y + at * step, width, height: step, fill }));
    if (over) group.append(svg("rect", { x, y: y + at * step, width, height: step, fill: over }));
  });
  return group;
}

/** The patterns that all swatches use, once for the whole page: those of a hidden picture would not be drawn. */
export function patterns(): SVGSVGElement {
  const hatch = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(svg("rect", { width: 2.2, height: 5, fill: "var(--ground)" }));
  const dots = svg("pattern", { id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse" });
  dots.append(svg("circle", { cx: 2.5, cy: 2.5, r: 1.4, fill: "var(--ground)" }));
  return svg("svg", { class: "shared", "aria-hidden": "true" }, svg("defs", {}, hatch, dots));
}

/** The range of indices, from and to (exclusive), that the worker at `point` has of each tensor dim. */
export function ranges(model: Model, type: TensorType, point: number[]): [number, number][] {
  return type.shape.map((size, dim) => {
    let start = 0;
    let extent = size;
    for (const meshDim of type.shards[dim]!) {
      extent /= model.data.mesh[meshDim]?.[1] ?? 1;
      start += extent * (point[meshDim] ?? 0);
    }
    return [start, start + extent];
  });
}

export function localShape(model: Model, type: TensorType): number[] {
  return ranges(model, type, []).map(([from, to]) => to - from);
}

export function localBytes(model: Model, type: TensorType): number {
  return localShape(model, type).reduce((product, size) => product * size, type.itemsize);
}

/** The tensor as a rectangle of its first and last dim, cut as the mesh cuts it, the worker's block filled. */
export function shards(model: Model, type: TensorType, point: number[], width = 320, height = 116): SVGSVGElement {
  const rows = type.shape.length > 1 ? type.shape.length - 2 : -1;
  const columns = type.shape.length - 1;
  // The two dims that are drawn: those that are cut first, the last ones otherwise.
  const cut = type.shape.map((_, dim) => dim).filter((dim) => type.shards[dim]!.length);
  const shown = [...new Set([...cut, columns, rows])].filter((dim) => dim >= 0).slice(0, 2).sort((a, b) => a - b);
  const [down, across] = shown.length > 1 ? [shown[0]!, shown[1]!] : [-1, shown[0] ?? -1];
  const pieces = (dim: number) =>
    dim < 0 ? 1 : type.shards[dim]!.reduce((product, meshDim) => product * (model.data.mesh[meshDim]?.[1] ?? 1), 1);
  const here = ranges(model, type, point);
  const mine = (dim: number) => (dim < 0 ? 0 : Math.round((here[dim]![0] / Math.max(1, type.shape[dim]!)) * pieces(dim)));
  const drawn = (dim: number) => Math.min(pieces(dim), 32);
  const m = drawn(down);
  const n = drawn(across);
  const left = 44;
  const top = 20;
  const label = `${type.text}: ${pieces(down)} by ${pieces(across)} blocks`;
  const picture = svg("svg", { class: "shards", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const w = (width - left - 4) / n;
  const h = (height - top - 4) / m;
  const fills = kindOf(model, type);
  for (let row = 0; row < m; row += 1) {
    for (let column = 0; column < n; column += 1) {
      const isMine = row === Math.floor((mine(down) * m) / pieces(down)) && column === Math.floor((mine(across) * n) / pieces(across));
      const box = { x: left + column * w + 1, y: top + row * h + 1, width: Math.max(1, w - 2), height: Math.max(1, h - 2) };
      const cell = svg("g", { class: isMine ? "block mine" : "block" });
      const hues = fills.cut.length ? fills.cut.map(hue) : fills.partial.length || fills.varying.length ? [...fills.partial, ...fills.varying].map(hue) : ["var(--whole)"];
      hues.forEach((fill, at) =>
        cell.append(svg("rect", { ...box, x: box.x + (at * box.width) / hues.length, width: box.width / hues.length, fill })),
      );
      if (fills.partial.length) cell.append(svg("rect", { ...box, fill: "url(#hatch)" }));
      if (fills.varying.length) cell.append(svg("rect", { ...box, fill: "url(#dots)" }));
      cell.append(svg("rect", { ...box, fill: "none", class: "rim" }));
      picture.append(cell);
    }
  }
  const dimLabel = (dim: number) => {
    const names = type.shards[dim]!.map((meshDim) => model.dimName(meshDim)).join(",");
    return `dim ${dim}: ${type.shape[dim]}${names ? ` @${names}` : ""}`;
  };
  if (across >= 0) picture.append(svg("text", { x: left, y: 13 }, dimLabel(across)));
  if (down >= 0) {
    const middle = top + (height - top) / 2;
    picture.append(
      svg("text", { x: 4, y: middle - 3 }, `dim ${down}`),
      svg("text", { x: 4, y: middle + 10 }, String(type.shape[down])),
    );
  }
  return picture;
}
