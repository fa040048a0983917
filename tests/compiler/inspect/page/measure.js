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
