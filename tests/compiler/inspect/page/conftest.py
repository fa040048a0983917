"""Pages in a browser. Every test's page fails it if the console says anything, or if anything is asked of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from monarch.compiler.inspect.page import page as html_of
from tests.compiler.inspect.page import chromium
from tests.compiler.inspect.page.plans import small_plan, trace_of, training_plan

Open = Callable[..., Page]
GRAPH = "#view=graph"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if chromium.executable() is None:
        pytest.skip("there is no chromium on the PATH (on Debian: apt-get install chromium)")
    with chromium.browser() as running:
        yield running


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of plans of 10, about 800 and 24,000 values (20,000 of them ops)."""
    folder = tmp_path_factory.mktemp("pages")
    small, middle, large = small_plan(), training_plan(7), training_plan(216)
    pages = {
        "small": html_of(small, title="A small plan"),
        "middle": html_of(middle, trace=trace_of(middle), against=training_plan(7, reduce_at_once=True)),
        "large": html_of(large),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def open_page(browser: Browser, files: dict[str, Path]) -> Iterator[Open]:
    """`open_page("small", fragment=GRAPH, width=1280, height=800, theme="light")`; a Path is opened as it is."""
    said: list[str] = []
    pages: list[Page] = []

    def open_(
        name: str | Path,
        fragment: str = GRAPH,
        width: int = 1280,
        height: int = 800,
        theme: str = "light",
        path: str = "",
    ) -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
        pages.append(page)
        address = (files[name] if isinstance(name, str) else name).as_uri()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: asked.url.split("#")[0] != address and said.append(f"asked for {asked.url}"))
        page.goto(address + fragment)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_
    for page in pages:
        page.close()
    assert said == []
