"""How other processes reach this one. A process says so before its endpoint is made (`rdma`), and here, so that it need
not load the transports for it."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from monarch.compiler.plan import MonarchError

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


class Reached(Protocol):
    """The endpoint that `configure` describes."""

    def use_tls(self, tls: Contexts | None) -> None: ...


Endpoint = TypeVar("Endpoint", bound=Reached)

lock = threading.Lock()
_options: dict[str, Any] = {}
_made: Reached | None = None


def configure(
    *,
    bind: str = "127.0.0.1",
    advertise: str | None = None,
    transports: Sequence[str] | None = None,
    tls: Contexts | None = None,
) -> None:
    """How this process is reached: see `transport.endpoint.Endpoint`; all transports, unless they are named. Before the
    first buffer is made or used; without this call, from processes on this machine only. Raises MonarchError where it
    comes too late."""
    with lock:
        if _made is not None:
            raise MonarchError(
                "this process's endpoint exists already",
                hint="Call monarch.rdma.configure before the first RDMABuffer is made or used.",
            )
        _options.clear()
        _options.update(bind=bind, advertise=advertise, tls=tls)
        if transports is not None:
            _options["transports"] = transports


def use_tls(tls: Contexts | None) -> None:
    """For TCP connections of this process from now on, also where its endpoint exists already: the program attaches
    hosts."""
    with lock:
        _options["tls"] = tls
        if _made is not None:
            _made.use_tls(tls)


def make(endpoint: Callable[..., Endpoint]) -> Endpoint:
    """This process's endpoint, made as it was configured. Called once, with `lock` held."""
    global _made
    made = _made = endpoint(**_options)
    return made


def forget() -> None:
    """The endpoint has been closed: the next one may be configured anew."""
    global _made
    _made = None
    _options.clear()


def _after_fork() -> None:
    global _made, lock
    _made = None
    lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
