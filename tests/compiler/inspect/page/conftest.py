"""Pages in a browser. Every test's page fails it if the console says anything, or if anything is asked of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
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
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the page of a plan of 10, about 800 or 24,000 values (20,000 of them ops), written when it is first asked
    for."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def written(name: str) -> Path:
        match name:
            case "small":
                text = html_of(small_plan(), title="A small plan")
            case "middle":
                middle = training_plan(7)
                text = html_of(middle, trace=trace_of(middle), against=training_plan(7, reduce_at_once=True))
            case _:
                text = html_of(training_plan(216))
        file = folder / f"{name}.html"
        file.write_text(text)
        return file

    return written


@pytest.fixture
def open_page(browser: Browser, files: Callable[[str], Path]) -> Iterator[Open]:
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
        address = (files(name) if isinstance(name, str) else name).as_uri()
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
