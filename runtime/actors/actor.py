"""Actor: the base class of users' actors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import cached_property
from typing import TYPE_CHECKING

from monarch.runtime.actors.errors import MeshFailure

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from monarch.compiler.mesh import MeshAlgebra
    from monarch.runtime.future import Future

    class _ActorsMesh(MeshAlgebra):
        """`spawn` returns a mesh with the endpoints of the class, and these."""

        def stop(self, reason: str = ...) -> Future[None]: ...

        @property
        def initialized(self) -> Future[bool]: ...

        async def __aenter__(self) -> Self: ...

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
else:
    # In a process an actor is one object, whose attributes are all the user's: `self.size = 3` is no method of a mesh.
    _ActorsMesh = object


class Actor(_ActorsMesh):
    """An object that lives in a process of a mesh, and handles messages one at a time.

        class Counter(Actor):
            def __init__(self, start: int) -> None:
                self.value = start

            @endpoint
            def add(self, n: int) -> int:
                self.value += n
                return self.value

        counters = this_host().spawn_procs({"gpus": 2}).spawn("counters", Counter, 0)
        counters.add.call(3).get()

    The type of `spawn`'s result is the class too, so that a type checker knows each endpoint's arguments and reply.

    Two methods of a subclass have a meaning of their own, both optional:

    `__supervise__(failure)` is told when something fails that this actor spawned, between messages. True: the failure
    is dealt with. False: it goes on to this actor's owner. What it raises is a new failure, chained to the old one.

    `__cleanup__(exc)` is called when the actor ends, after all that it owns has ended; `exc` is None when it was
    stopped, else what it died of. Not called when its process is killed.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """`logging.getLogger` of the class' name: its records come to the program's handlers, as all of actors do."""
        return logging.getLogger(type(self).__name__)

    if TYPE_CHECKING:

        def __supervise__(self, failure: MeshFailure) -> bool | Awaitable[bool]: ...

        def __cleanup__(self, exc: Exception | None) -> None | Awaitable[None]: ...
