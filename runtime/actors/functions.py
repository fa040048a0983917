"""monarch.remote: a function of the user's, run in every process of a mesh."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.adverbs import Endpoint
from monarch.runtime.actors.endpoint import concurrent_endpoint
from monarch.runtime.actors.meshes import ProcMesh, active
from monarch.runtime.actors.processes.current import context
from monarch.runtime.actors.processes.identity import Instance
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

P = ParamSpec("P")
R = TypeVar("R")


class _Functions(Actor):
    """Runs functions for the process that spawned it, in the order sent; one that is `async def` does not delay the
    next."""

    @concurrent_endpoint
    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        return await result if isinstance(result, Awaitable) else result


_spawned: weakref.WeakKeyDictionary[Instance, dict[ProcMesh, _Functions]] = weakref.WeakKeyDictionary()


class Remote(Generic[P, R]):
    """A function that runs in the processes of the active mesh: the result of `remote`. The adverbs are an
    endpoint's."""

    def __init__(self, function: Callable[P, Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        self.__name__ = getattr(function, "__name__", repr(function))
        self.__doc__ = function.__doc__

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Run it in all processes: a future of its results, in rank order."""
        return self._run(args, kwargs).call(self._function, args, kwargs)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run it in the only process of the mesh. Raises ValueError on a mesh of several."""
        return self._run(args, kwargs).call_one(self._function, args, kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run it in one of the processes, each as likely as the others."""
        return self._run(args, kwargs).choose(self._function, args, kwargs)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Run it in all processes: a future of each result, in the order in which they come."""
        return self._run(args, kwargs).stream(self._function, args, kwargs)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run it in all processes, without results; its error is a failure of the caller's."""
        self._run(args, kwargs).broadcast(self._function, args, kwargs)

    def addressed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Endpoint[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The endpoint that runs it in the processes that are active, and what that is called with: for `send`."""
        return self._run(args, kwargs), (self._function, args, kwargs), {}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endpoint[..., Any]:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__name__}{self._signature}: {error}") from None
        procs = active.get()
        if procs is None:
            raise MonarchError(
                f"the remote function '{self.__name__}' has no processes to run in",
                hint="with procs.activate():\n    function.call(...)",
            )
        mine = _spawned.setdefault(context().actor_instance, {})
        if procs not in mine:
            mine[procs] = procs.spawn("functions", _Functions)
        return mine[procs].run

    def __repr__(self) -> str:
        return f"<remote {self.__name__}{self._signature}>"
