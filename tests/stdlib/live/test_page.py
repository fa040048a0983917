"""The live page in Chromium: what it shows, in two sizes and both themes, and that nothing it shows is run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import marimo
import pytest
from IPython.core.formatters import DisplayFormatter
from playwright.sync_api import Browser, Page

from monarch.compiler.errors import MonarchError
from monarch.stdlib.live import page as live
from monarch.stdlib.live.serving import Server
from tests.compiler.inspect.page import chromium
from tests.stdlib.live.seen import MESH, snapshot


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder."""

    def log_message(self, format: str, *args: Any) -> None: ...


Show = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium.executable() is None:
        pytest.skip("there is no chromium on the PATH (on Debian: apt-get install chromium)")
    with chromium.browser() as running:
        yield running


@pytest.fixture
def answers() -> dict[str, Callable[[], Any]]:
    """What the program says; a test may change it while the page is open."""
    return {"snapshot": snapshot, "stacks": lambda: {"program": "File <b>train.py", "mesh worker 0": "in all_reduce"}}


@pytest.fixture
def show(browser: Browser, answers: dict[str, Callable[[], Any]]) -> Iterator[Show]:
    """`show(width=1280, theme="dark")` opens the page. It fails a test that something is said on the console, or asked
    of another server."""
    server = Server(answers)
    pages: list[Page] = []
    said: list[str] = []

    def open_(width: int = 1280, height: int = 800, theme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        here = server.url.split("?")[0]
        page.on("request", lambda asked: asked.url.startswith(here) or said.append(f"asked for {asked.url}"))
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_
    for page in pages:
        page.close()
    server.close()
    assert [line for line in said if "410 (Gone)" not in line] == []


def test_it_shows_meshes_actors_curves_and_failures(show: Show) -> None:
    page = show()
    assert page.title() == "train.py · Monarch"
    assert page.text_content("#about") == "process 4711 on node1 · watched for 1:02:05 · 1.5 GiB"
    assert page.text_content("#state") == "live"
    first, ended = page.locator("#meshes .card").all()
    assert first.inner_text().split("\n") == [
        "mesh<data=2, model=2>",
        "runs train_step",
        "8.3 steps a second",
        "12,345 steps",
        "3 in the queue",
        "3.5 GiB of memory, 1.0 GiB at most on one of 4 workers",
    ]
    assert [bar.get_attribute("title") for bar in first.locator(".memory i").all()] == [
        f"worker {rank}: {size}" for rank, size in enumerate(["1.0 GiB", "1.0 GiB", "512.0 MiB", "1.0 GiB"])
    ]
    assert "ended" in (ended.get_attribute("class") or "") and "ended" in ended.inner_text()
    loss, rate = page.locator("#logs .card").all()
    assert "loss" in loss.inner_text() and "1 to 4" in loss.inner_text() and "step 3" in loss.inner_text()
    # A value that is no number leaves a gap; the axis goes on.
    assert loss.locator("path").get_attribute("d") == "M0.00 0.00M66.67 66.67L100.00 100.00"
    assert "<i>rate" in rate.inner_text() and "0.001" in rate.inner_text()
    rows = [row.inner_text().split("\t") for row in page.locator("#processes tbody tr").all()]
    assert rows[0] == ["procs gpus=0", "99", "node2", "5.0 MiB", "samplers[0]", "17", "sample, score"]
    assert rows[1][4] == "does not answer"
    assert "samplers[1]: ValueError: <b>no data</b>" in page.inner_text("#failures summary")
    assert page.inner_text("#failures h2") == "Failures"
    page.evaluate("seen => draw(seen)", snapshot(failed=1234))
    assert page.inner_text("#failures h2") == "Failures: the last 1 of 1,234"
    assert page.locator("#failures b, #logs i, #stacks b").count() == 0, "text is text"


@pytest.mark.sample()
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (420, 900)])
def test_it_fits_the_window_and_follows_the_theme(show: Show, width: int, height: int, theme: str) -> None:
    many = [{**MESH, "name": f"mesh<{'a_long_name_of_a_dim' * 3}=2>", "memory": [1 << 30] * 512}, MESH]
    page = show(width, height, theme)
    page.evaluate("seen => draw(seen)", snapshot(meshes=many))
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # The table of processes wraps rather than run out of its frame.
    assert page.evaluate("(each => each.scrollWidth - each.clientWidth)(document.querySelector('.scroll'))") == 0
    look = page.evaluate("(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))")
    assert (look[1] == "rgb(255, 255, 255)") == (theme == "light") and look[0] != look[1]


def test_it_goes_on_and_keeps_what_is_open(show: Show, answers: dict[str, Callable[[], Any]]) -> None:
    page = show()
    page.click("#failures summary")
    answers["snapshot"] = lambda: snapshot(meshes=[{**MESH, "steps": 77}])
    page.get_by_text("77 steps").wait_for()
    assert page.locator("#failures details[open]").count() == 1
    assert page.locator("#meshes .card").count() == 1


def test_stacks_come_on_request(show: Show) -> None:
    page = show()
    assert page.locator("#stacks details").count() == 0
    page.click("#ask")
    page.wait_for_selector("#stacks details")
    page.click("#stacks details:first-of-type summary")
    assert page.locator("#stacks pre").all_text_contents() == ["File <b>train.py", "in all_reduce"]


def test_it_says_when_the_program_has_ended(show: Show, answers: dict[str, Callable[[], Any]]) -> None:
    page = show()

    def gone() -> object:
        raise MonarchError("process 4711 does not answer: it may have ended")

    answers["snapshot"] = gone
    page.get_by_text("may have ended").wait_for()
    assert page.locator("#meshes .card").count() == 2, "what was last known stays"


def test_a_program_that_runs_nothing_says_so(show: Show, answers: dict[str, Callable[[], Any]]) -> None:
    answers["snapshot"] = lambda: snapshot(meshes=[], processes=[], logs={}, failures=[])
    page = show()
    assert page.is_visible("#nothing")
    assert not any(page.is_visible(f"#{name}") for name in ("meshes", "failures", "logs", "processes"))


def test_a_notebook_shows_it_in_a_frame(browser: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's policy lets notebooks on this machine embed it."""

    class Watched:
        snapshot = stacks = staticmethod(snapshot)

    monkeypatch.setattr(live, "watch", Watched)
    monkeypatch.setattr(live, "start", lambda: None)
    dashboard = live.dashboard()
    assert live.dashboard() is dashboard
    assert f'<iframe src="{dashboard.url}"' in marimo.as_html(dashboard).text
    assert f'<iframe src="{dashboard.url}"' in DisplayFormatter().format(dashboard)[0]["text/html"]
    (tmp_path / "notebook.html").write_text(dashboard._repr_html_())
    notebook = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=notebook.serve_forever, daemon=True).start()
    page = browser.new_page()
    page.goto(f"http://localhost:{notebook.server_address[1]}/notebook.html")
    page.frame_locator("iframe").locator("#meshes .card").first.wait_for()
    page.close()
    notebook.shutdown()
    notebook.server_close()
    dashboard.close()
    dashboard.close()
    assert live.dashboard() is not dashboard
    live.dashboard().close()
