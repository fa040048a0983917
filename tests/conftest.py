"""What all tests share: the verifier between passes, and Hypothesis that tries the same examples in every run."""

from __future__ import annotations

import gc
import linecache
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

# Threads that wait for each other spinning take the cores from the tests beside this one. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.optim.optimizer import _global_optimizer_pre_hooks

import monarch.actor
from monarch.language.tensors.mesh import Mesh, open_meshes

pytest_plugins = ["tests.retry", "tests.sample", "tests.slowest"]

SHOWN = (
    "CLICOLOR CLICOLOR_FORCE COLORTERM COLUMNS FORCE_COLOR GITHUB_ACTIONS LINES NO_COLOR PAGER PS1 PY_COLORS "
    "PYTHONUNBUFFERED SHELL TERM TERMINAL_WIDTH TTY_COMPATIBLE TTY_INTERACTIVE"
).split()
"""How what is printed looks, whether it is at once, and which shell a terminal has."""
SENT = "ALL_PROXY FTP_PROXY HTTP_PROXY HTTPS_PROXY NO_PROXY".split()
"""Where connections go, those within this machine too."""
for name in list(os.environ):  # what whoever runs the tests asks of programs
    if name.startswith("MONARCH_") or name in SHOWN or name.upper() in SENT:
        del os.environ[name]
os.environ["MONARCH_VERIFY"] = "1"
os.environ["MONARCH_CONFIG"] = os.devnull  # nor the settings in files
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

settings.register_profile(
    "monarch",
    derandomize=True,
    deadline=None,  # the first example of a test may well start workers or import half of torch
    max_examples=20,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("monarch")

torch.set_num_threads(1)  # the workers share the machine with the dense run that they are compared with


TOGETHER = ("tests/runtime/hosts/launch", "tests/compiler/inspect/page")
"""Folders of tests that share what is long in the making."""


@pytest.fixture(autouse=True)
def watches_end() -> Iterator[None]:
    """No trace that has ended, in whatever way, follows the optimizers of the tests behind it."""
    yield
    watching = [getattr(hook, "__self__", None) for hook in _global_optimizer_pre_hooks.values()]
    assert [each for each in watching if type(each).__name__ == "OptimizerWatch"] == []


@pytest.fixture(autouse=True, scope="module")
def meshes_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program without `mesh=` is on the mesh that is open: a file of tests leaves none to those behind it."""
    before = set(map(id, open_meshes()))
    yield

    def left() -> list[Mesh]:
        return [mesh for mesh in open_meshes() if id(mesh) not in before and not mesh.is_abstract]

    if left():
        gc.collect()  # one without references may only wait for the garbage collector
        assert left() == [], f"{request.node.nodeid} leaves meshes open"


@pytest.fixture(autouse=True)
def forgotten_files() -> Iterator[None]:
    """The lines of a relative `train.py` are those of one test's folder: no other test may be shown them, nor look for
    them in folders that loaded programs can import from."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for file in [file for file in linecache.cache if not os.path.isabs(file)]:  # to read others again takes long
        del linecache.cache[file]


# By its own way, an interrupt of the main thread, such a failure would end the whole run.
unhandled: list[monarch.actor.MeshFailure] = []


def _note_unhandled(failure: monarch.actor.MeshFailure) -> None:
    unhandled.append(failure)


monarch.actor.unhandled_fault_hook = _note_unhandled


@pytest.fixture(autouse=True)
def no_unhandled_failure() -> Iterator[None]:
    """An actor's failure that nobody handles fails the test during which it comes."""
    yield
    failures = list(unhandled)
    unhandled.clear()
    assert not failures, "\n".join(failure.report() for failure in failures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last come the tests that leave this process changed: with Ray, and with the stand-in of CUDA's driver loaded, it
    cannot fork workers any more, and with a browser open it has an event loop running. One process runs all of the
    launch folder, which takes longest: it comes first of these, so that the others have something to do meanwhile."""
    last = ("launch", "transport", "page")
    items.sort(key=lambda item: max((last.index(part) + 1 for part in item.path.parts if part in last), default=0))


# What is imported, collected and remembered stays, a million objects and more. Python's garbage collector need not look
# at it while tests run: that took a fifth of their time.
gc.set_threshold(50_000, 20, 20)  # as the command line has it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Between two files, where the fixtures of the first are gone, what still lives is what stays."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: two more than there are cores, which are idle where a test waits for its processes."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes, one runs all that needs a Ray cluster, and one all that needs a browser and pages of large
    plans: there is one of each. Files go to them in the order above, and not those of many tests first."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.partition("::")[0].rpartition("/")[0]
            return folder if folder in TOGETHER else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the expected texts of the passes' tests anew")
