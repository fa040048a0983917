"""How long the inspector's page takes in a browser: to open, to expand a layer, to search, and a frame while panning.

The plans are made up (`tests/compiler/inspect/page/plans.py`), so that this measures the page and not the compiler.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.page import page as html_of
from monarch.compiler.plan.plan import Plan
from tests.compiler.inspect.page import chromium
from tests.compiler.inspect.page.plans import small_plan, training_plan

REPETITIONS = 3
LAYERS = (0, 11, 213)
"""Of the plans with about 10, 1,000 and 20,000 ops; 0 is the small one."""

PANNED = """() => new Promise(done => {
  const surface = document.querySelector(".surface"), times = [];
  const at = name => (x, y) => surface.dispatchEvent(new PointerEvent(name,
    { clientX: x, clientY: y, pointerId: 1, button: 0, bubbles: true, isPrimary: true }));
  surface.setPointerCapture = () => {};
  at("pointerdown")(400, 400);
  let before = performance.now();
  const step = now => {
    times.push(now - before);
    before = now;
    const turn = times.length / 60 * 2 * Math.PI;
    at("pointermove")(400 + 300 * Math.sin(turn), 400 + 250 * (1 - Math.cos(turn)));
    if (times.length < 120) requestAnimationFrame(step);
    else { at("pointerup")(400, 400); done(times.slice(2)); }
  };
  requestAnimationFrame(step);
})"""

EXPANDED = """() => new Promise(done => {
  const toggle = document.querySelector("[aria-expanded=false] [data-toggle]");
  const begin = performance.now();
  toggle.dispatchEvent(new MouseEvent("click", { bubbles: true, detail: 1 }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""

SEARCHED = """() => new Promise(done => {
  const field = document.getElementById("search");
  const begin = performance.now();
  field.value = "all_reduce model";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""


@dataclass(frozen=True)
class PageTime:
    """Bytes of the file; seconds to make it, from opening it until it can be used, to expand a group of layers (None
    where there is none), and to search for the first time (medians); the median and the slowest frame while panning."""

    ops: int
    size: int
    write: float
    open: float
    expand: float | None
    search: float
    frame: float
    slowest: float


def _measure(browser: Browser, plan: Plan, folder: Path) -> PageTime:
    start = time.perf_counter()
    text = html_of(plan)
    write = time.perf_counter() - start
    path = folder / f"{len(plan.instructions)}.html"
    path.write_text(text)
    found: dict[str, list[float]] = {"open": [], "expand": [], "search": [], "frames": []}
    for _ in range(REPETITIONS):
        shown = browser.new_page(viewport={"width": 1280, "height": 800})
        shown.goto(path.as_uri() + "#view=graph")  # it opens on the overview, which has nothing to pan
        shown.wait_for_selector("html[data-ready]")

        def run(script: str, shown: Any = shown) -> Any:
            return shown.evaluate(script)

        found["open"].append(run("performance.getEntriesByName('monarch-ready')[0].startTime"))
        if run("document.querySelector('[aria-expanded=false] [data-toggle]') !== null"):
            found["expand"].append(run(EXPANDED))
        found["frames"] += run(PANNED)
        found["search"].append(run(SEARCHED))
        shown.close()
    middle = {name: statistics.median(times) / 1e3 for name, times in found.items() if times}
    return PageTime(
        len(plan.instructions),
        len(text),
        write,
        middle["open"],
        middle.get("expand"),
        middle["search"],
        middle["frames"],
        max(found["frames"]) / 1e3,
    )


def measure() -> list[PageTime]:
    if chromium.executable() is None:
        raise MonarchError("there is no chromium to measure the page in", hint="on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, chromium.browser() as browser:
        plans = [training_plan(layers) if layers else small_plan() for layers in LAYERS]
        return [_measure(browser, plan, Path(folder)) for plan in plans]
