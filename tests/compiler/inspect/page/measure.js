// What a picture of the page shows, measured: each function gives what is wrong, in words.

window.measurePage = () => {
  const wrong = [];
  const size = document.documentElement;
  if (size.scrollWidth > innerWidth || size.scrollHeight > innerHeight) wrong.push("the page is larger than the screen");
  const rect = (element) => element.getBoundingClientRect();
  for (const bar of document.querySelectorAll(".top, .mesh")) {
    const all = [...bar.querySelectorAll("h1, button, input, .name p")].filter((each) => rect(each).width && !each.closest(".legend, .tabs"));
    for (const each of all) {
      const { left, right } = rect(each);
      if (left < 0 || right > innerWidth + 0.5) wrong.push(`beyond the screen: ${each.textContent || each.tagName}`);
      if (each.scrollWidth > each.clientWidth + 1 && each.tagName !== "INPUT") wrong.push(`cut: ${each.textContent}`);
    }
  }
  const main = rect(document.querySelector("main"));
  if (main.height < innerHeight * 0.6) wrong.push(`the view has ${main.height} px of ${innerHeight}`);
  for (const text of document.querySelectorAll("main .view:not([hidden]) :is(h2, h3, p, li, th, td, .cell)")) {
    if (text.closest(".surface")) continue;
    const style = getComputedStyle(text);
    if (text.scrollWidth > text.clientWidth + 1 && style.overflowX === "hidden" && style.textOverflow !== "ellipsis") wrong.push(`cut: ${text.textContent}`);
  }
  return wrong;
};

window.measureGraph = () => {
  const wrong = [];
  const surface = document.querySelector(".surface").getBoundingClientRect();
  const boxes = [...document.querySelectorAll(".surface .value, .surface .group, .surface .port")].map((element) => {
    const frame = element.querySelector(":scope > rect:last-of-type, :scope > .frame:not(.behind)") ?? element;
    const { left, right, top, bottom } = frame.getBoundingClientRect();
    return { element, open: element.getAttribute("aria-expanded") === "true", name: element.getAttribute("aria-label") ?? element.textContent, left, right, top, bottom };
  });
  for (const box of boxes) {
    if (box.left < surface.left - 1 || box.right > surface.right + 1 || box.top < surface.top - 1 || box.bottom > surface.bottom + 1) wrong.push(`beyond the view: ${box.name}`);
    for (const text of box.element.querySelectorAll(":scope > text:not(.type)")) {
      const { left, right } = text.getBoundingClientRect();
      if (left < box.left - 1 || right > box.right + 1) wrong.push(`wider than its box: ${text.textContent}`);
    }
  }
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  for (const [at, a] of boxes.entries()) for (const b of boxes.slice(at + 1)) {
    const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    if (!apart && !(a.open && inside(b, a)) && !(b.open && inside(a, b))) wrong.push(`over each other: ${a.name} and ${b.name}`);
  }
  for (const path of document.querySelectorAll(".surface path.edge[marker-end]")) {
    const matrix = path.getScreenCTM();
    const length = path.getTotalLength();
    for (let step = 1; step < 60; step += 1) {
      const { x, y } = path.getPointAtLength((length * step) / 60).matrixTransform(matrix);
      const hit = boxes.find((box) => !box.open && x > box.left + 2 && x < box.right - 2 && y > box.top + 2 && y < box.bottom - 2);
      if (hit) {
        wrong.push(`an edge crosses ${hit.name}`);
        break;
      }
    }
  }
  const smallest = Math.min(...[...document.querySelectorAll(".surface .title")].map((text) => text.getBoundingClientRect().height));
  if (smallest < 8) wrong.push(`names are ${smallest} px high`);
  return wrong;
};

// How many texts can be seen, and those whose contrast (WCAG's) with what is painted behind them is below 4.5.
window.measureContrast = () => {
  const before = document.adoptedStyleSheets;  // a style element would not be let in
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { pointer-events: auto !important; transition: none !important; }");
  document.adoptedStyleSheets = [...before, sheet];
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (text) => {
    if (text === "none") return [0, 0, 0, 0];
    if (!known.has(text)) {
      paint.clearRect(0, 0, 1, 1);
      paint.fillStyle = "#000";
      paint.fillStyle = text;
      paint.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = ([r, g, b, a], below) => below.map((each, at) => [r, g, b][at] * a + each * (1 - a));
  const faded = (element) => {
    let opacity = 1;
    for (let at = element; at instanceof Element; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    return opacity;
  };
  const shown = (element, key, alpha = "") => {
    const computed = getComputedStyle(element);
    const [r, g, b, a] = rgba(computed[key]);
    return [r, g, b, a * faded(element) * (alpha ? Number(computed[alpha]) : 1)];
  };
  const light = (color) => {
    const [r, g, b] = color.map((each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const wrong = [];
  let measured = 0;
  const range = document.createRange();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "TITLE"].includes(element.tagName) || element.closest("[disabled], defs")) continue;
    range.selectNodeContents(node);
    const { left, top, width, height } = range.getBoundingClientRect();
    const [x, y] = [left + width / 2, top + height / 2];
    if (!width || !height || x < 0 || y < 0 || x > innerWidth || y > innerHeight) continue;
    const stack = document.elementsFromPoint(x, y);
    if (!stack.includes(element)) continue;  // hidden, or clipped
    const inside = element instanceof SVGElement;
    const behind = stack.filter((each) => !(each instanceof SVGTextContentElement)).reverse();
    const top_ = behind.findLastIndex((each) => each === element || each.contains(element));
    let ground = rgba(getComputedStyle(document.documentElement).backgroundColor).slice(0, 3);
    if (rgba(getComputedStyle(document.documentElement).backgroundColor)[3] === 0) ground = [255, 255, 255];
    for (const each of inside ? behind : behind.slice(0, top_ + 1)) {
      const shape = each instanceof SVGGeometryElement;
      ground = over(shape ? shown(each, "fill", "fillOpacity") : shown(each, "backgroundColor"), ground);
    }
    const text = over(inside ? shown(element, "fill", "fillOpacity") : shown(element, "color"), ground);
    measured += 1;
    const [high, low] = [light(text), light(ground)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.495) wrong.push(`${contrast.toFixed(2)}: "${node.data.trim().slice(0, 40)}" in ${element.tagName}.${element.getAttribute("class")}, ${text.map(Math.round)} on ${ground.map(Math.round)}`);
  }
  document.adoptedStyleSheets = before;
  return { measured, wrong: [...new Set(wrong)] };
};

// What a canvas shows is watched as it is drawn: texts with what is behind them, and slices (`high` px) with their edges
// and the ground beside them.
window.watchCanvas = () => {
  const seen = { texts: [], slices: [] };
  const own = CanvasRenderingContext2D.prototype;
  const { fillText, fillRect, strokeRect } = own;
  const light = (color) => {
    const [r, g, b] = color.map((each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const page = getComputedStyle(document.querySelector("main")).backgroundColor.match(/\d+/g).map(Number);
  const pixel = (paint, x, y) => {
    const scale = paint.getTransform().a;
    const [r, g, b, a] = paint.getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data;
    return [r, g, b].map((part, at) => (part * a + (page[3] === 0 ? 255 : page[at]) * (255 - a)) / 255);
  };
  const color = (paint, style) => {
    const at = style.match(/^#(..)(..)(..)$/);
    return at ? at.slice(1).map((part) => Number.parseInt(part, 16)) : style.match(/^#(.)(.)(.)$/).slice(1).map((part) => 17 * Number.parseInt(part, 16));
  };
  own.fillText = function (text, x, y) {
    const left = this.textAlign === "right" ? x - 4 : x + 4;
    const inside = left < this.canvas.clientWidth && y < this.canvas.clientHeight;
    if (inside && this.canvas.closest(".timeline")) seen.texts.push([text, this.globalAlpha * ratio(color(this, this.fillStyle), pixel(this, left, y + 3))]);
    fillText.call(this, text, x, y);
  };
  own.fillRect = function (x, y, wide, high) {
    fillRect.call(this, x, y, wide, high);
    if (this.canvas.closest(".timeline") && high > 8 && high < 40 && wide < 600 && y > 20 && Math.floor(x + wide / 2) < this.canvas.clientWidth) seen.slices.push([wide, pixel(this, Math.floor(x + wide / 2), y - 1), pixel(this, Math.floor(x + wide / 2), y + high / 2)]);
  };
  own.strokeRect = function (x, y, wide, high) {
    strokeRect.call(this, x, y, wide, high);
    for (const last of seen.slices.slice(-2)) last[3] ??= color(this, this.strokeStyle);  // what waits, and what moves
  };
  return () => ({
    texts: seen.texts.length,
    slices: seen.slices.length,
    wrong: [
      ...seen.texts.filter(([, contrast]) => contrast < 4.495).map(([text, contrast]) => `${contrast.toFixed(2)}: "${text}"`),
      ...seen.slices.filter(([wide, ground, fill, edge]) => Math.max(ratio(fill, ground), edge ? ratio(edge, ground) : 0) < 4.495).map(([wide, ground, fill, edge]) => `slice of ${wide.toFixed(1)} px: ${fill} with ${edge} on ${ground}`),
    ],
  });
};
