"""The thread in which this process's streams run: one event loop for all controllers and hosts in it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("monarch.control")

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def control_loop() -> asyncio.AbstractEventLoop:
    """The loop, started where it does not run."""
    global _loop
    with _lock:
        if _loop is None:
            _quiet()
            _loop = asyncio.new_event_loop()
            _loop.set_exception_handler(_failed)
            threading.Thread(target=_loop.run_forever, name="monarch-control", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """Run it in the loop's thread, and wait for its result, so long at most: TimeoutError then."""
    return asyncio.run_coroutine_threadsafe(coroutine, control_loop()).result(seconds)


def soon(function: Callable[..., object], *arguments: Any) -> None:
    control_loop().call_soon_threadsafe(function, *arguments)


def _quiet() -> None:
    """gRPC reads these when it is first imported. Its own log is no reading for users. Its handlers at a fork wait for
    its threads, and could hang: processes forked here leave gRPC to the parent."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    logging.getLogger("grpc").addHandler(logging.NullHandler())


def _failed(loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
    log.error("%s", what.get("message"), exc_info=what.get("exception"))


def _after_fork() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
