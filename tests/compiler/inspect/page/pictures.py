"""Pictures of every view of the page, to be looked at: python -m tests.compiler.inspect.page.pictures FOLDER [VIEW …]

Three plans (2, 14 and 48 layers), two sizes, light and dark; of the graph also with all groups closed, and a layer
open.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from playwright.sync_api import Page

from monarch.compiler.inspect.page import page as html_of
from tests.compiler.inspect.page import chromium
from tests.compiler.inspect.page.plans import trace_of, training_plan

LAYERS = (2, 14, 48)
SIZES = ((1280, 800), (800, 600))
THEMES = ("light", "dark")
VIEWS = ("overview", "graph", "graph-closed", "graph-layer", "collectives", "memory", "timeline", "source", "compare")


def show(page: Page, view: str) -> None:
    """Bring a page to one of VIEWS."""
    name, _, state = view.partition("-")
    page.locator(f"#tab-{name}").click()
    if state == "closed":
        page.keyboard.press("c")
    elif state == "layer":
        page.keyboard.press("c")
        page.locator('[data-group="forward"] >> nth=0').wait_for()
        page.evaluate("location.hash = '#view=graph&group=forward/blocks/0/mlp'")
    page.wait_for_timeout(300)  # the graph glides to where it goes


def main(folder: Path, views: list[str]) -> None:
    """Write `LAYERS-VIEW-WIDTH-THEME.png` files."""
    folder.mkdir(parents=True, exist_ok=True)
    with chromium.browser() as browser:
        for layers in LAYERS:
            plan = training_plan(layers)
            file = folder / f"{layers}.html"
            trace = trace_of(plan)
            against = training_plan(layers, reduce_at_once=True)
            file.write_text(html_of(plan, trace=trace, against=against), encoding="utf-8")
            for (width, height), theme in product(SIZES, THEMES):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
                page.goto(file.resolve().as_uri())
                page.wait_for_selector("html[data-ready]")
                for view in views:
                    show(page, view)
                    page.screenshot(path=str(folder / f"{layers}-{view}-{width}-{theme}.png"))
                page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(VIEWS))
