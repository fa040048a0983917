"""Which methods of a class can be called through messages, and the requirements on an actor's class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from monarch.runtime.actors.actor import Actor

if TYPE_CHECKING:
    from monarch.runtime.actors.adverbs import Endpoint
    from monarch.runtime.actors.channel import Port

P = ParamSpec("P")
R = TypeVar("R")
Propagate = Callable[..., Any] | Literal["inspect"] | None


class EndpointMethod(Generic[P, R]):
    """A method that was marked with `@endpoint`. On a mesh it is an `Endpoint`; within the actor, a plain method.

    `function`       the method as written
    `explicit_port`  it gets a port as its first argument, and replies through that
    `concurrent`     it runs as a task beside the actor's other messages
    `propagate`      what `Endpoint.rref` gives for tensors without data: see `endpoint`
    """

    def __init__(
        self,
        function: Callable[..., Any],
        explicit_port: bool = False,
        concurrent: bool = False,
        name: str = "",
        propagate: Propagate = None,
    ) -> None:
        if propagate is not None and propagate != "inspect" and not callable(propagate):
            raise ValueError(
                f"propagate={propagate!r} of {function.__qualname__}: it is a function that gives tensors of the "
                f"results' shapes, or 'inspect' for an endpoint without a result"
            )
        self.function = function
        self.explicit_port = explicit_port
        self.concurrent = concurrent
        self.name = name or function.__name__
        self.propagate = propagate
        self.__doc__ = function.__doc__

    if TYPE_CHECKING:
        # An actor class stands for a mesh of its actors, so that `trainers.step.call(...)` has the types of `step`.
        def __get__(self, instance: object, owner: type | None = None) -> Endpoint[P, R]: ...
    else:

        def __get__(self, instance, owner=None):
            return self if instance is None else self.function.__get__(instance, owner)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as it was written: `Base.step(self, batch)`."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:  # without the signature, which is worked out again
        return EndpointMethod, (self.function, self.explicit_port, self.concurrent, self.name, self.propagate)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def signature(self) -> inspect.Signature:
        """The parameters that a caller passes: without `self`, and without the port."""
        whole = inspect.signature(self.function)
        taken = 2 if self.explicit_port else 1
        return whole.replace(parameters=list(whole.parameters.values())[taken:])

    @cached_property
    def _positions(self) -> range:
        """How many arguments there may be if all are positional; empty where that takes a closer look."""
        parameters = list(self.signature.parameters.values())
        simple = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if any(parameter.kind not in simple for parameter in parameters):
            return range(0)
        needed = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
        return range(needed, len(parameters) + 1)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> None:
        """Raise TypeError unless the method can take these arguments; `where` names it, as in "trainer.step"."""
        if not kwargs and len(args) in self._positions:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{where}{self.signature}: {error}") from None


# -- decorators --------------------------------------------------------------------------------------------------------


class _Mark(Protocol):
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R]: ...


class _MarkPorted(Protocol):
    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, None]], /
    ) -> EndpointMethod[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, Port[R], P], None], /) -> EndpointMethod[P, R]: ...


@overload
def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R]: ...
@overload
def endpoint(*, propagate: Propagate = None, explicit_response_port: Literal[False] = False) -> _Mark: ...
@overload
def endpoint(*, propagate: Propagate = None, explicit_response_port: Literal[True]) -> _MarkPorted: ...
def endpoint(method: Any = None, /, *, propagate: Propagate = None, explicit_response_port: bool = False) -> Any:
    """Mark a method of an actor as one that is called through messages.

        class Trainer(Actor):
            @endpoint
            def step(self, batch: Batch, lr: float = 0.1) -> float: ...

            @endpoint(explicit_response_port=True)
            def later(self, port: Port[str], question: str) -> None: ...

    With `explicit_response_port=True` the method gets a port as its first argument, and its result is dropped: it
    replies, now or later and from any thread, by `port.send` or `port.exception`.

    `propagate` gives the types of `trainers.step.rref(x)` (see `Endpoint.rref`): a function that takes the same
    arguments, with tensors that have no data, and gives tensors of the results' shapes and dtypes. "inspect" is for an
    endpoint whose result nobody needs: `rref` then gives None. Raises ValueError for anything else.
    """

    def mark(method: Any) -> Any:
        _check_method(method, "endpoint", explicit_response_port)
        return EndpointMethod(method, explicit_response_port, propagate=propagate)

    return mark if method is None else mark(method)


class _MarkConcurrent(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...


class _MarkConcurrentPorted(Protocol):
    def __call__(
        self, method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, None]], /
    ) -> EndpointMethod[P, R]: ...


@overload
def concurrent_endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...
@overload
def concurrent_endpoint(*, explicit_response_port: Literal[False] = False) -> _MarkConcurrent: ...
@overload
def concurrent_endpoint(*, explicit_response_port: Literal[True]) -> _MarkConcurrentPorted: ...
def concurrent_endpoint(method: Any = None, /, *, explicit_response_port: bool = False) -> Any:
    """Mark an `async def` method whose calls run as tasks: the actor handles its next message at the first `await`.

    Calls start in the order sent. Those that still run when the actor stops are cancelled before its `__cleanup__`.
    ValueError for a method that is not `async def`.
    """

    def mark(method: Any) -> Any:
        _check_method(method, "concurrent_endpoint", explicit_response_port)
        if not inspect.iscoroutinefunction(method):
            raise ValueError(f"@concurrent_endpoint is for `async def` methods, which {method.__qualname__} is not")
        return EndpointMethod(method, explicit_response_port, concurrent=True)

    return mark if method is None else mark(method)


def _check_method(method: Any, mark: str, explicit_port: bool) -> None:
    if isinstance(method, EndpointMethod):
        raise ValueError(f"{method.function.__qualname__} is an endpoint already: use one of the two marks")
    if not inspect.isfunction(method):
        raise ValueError(f"@{mark} is for methods, written with `def` or `async def`, not for {method!r}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"an endpoint cannot be a generator, as {method.__qualname__} is: send its values to a port")
    needed = ("self", "a port") if explicit_port else ("self",)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p for p in inspect.signature(method).parameters.values() if p.kind in positional]
    if len(found) < len(needed):
        raise ValueError(f"an endpoint takes {' and '.join(needed)} first, which {method.__qualname__} does not")


# -- classes -----------------------------------------------------------------------------------------------------------

MESH_NAMES = frozenset(
    ("slice", "split", "flatten", "rename", "size", "sizes", "extent", "to_table", "stop", "initialized")
)
"""The attributes of every mesh of actors, whatever their class: no endpoint can have these names."""


class ActorInterface:
    """The methods that can be called on the actors of a class.

    `endpoints`  the marked methods, by name
    `is_async`   endpoints are `async def`: calls run on an event loop of the actor's own. A class without endpoints is.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.endpoints: dict[str, EndpointMethod[Any, Any]] = {
            name: method for name in dir(cls) if isinstance(method := getattr(cls, name, None), EndpointMethod)
        }
        in_loop = [name for name, method in self.endpoints.items() if method.is_async]
        in_thread = [name for name, method in self.endpoints.items() if not method.is_async]
        self.is_async = not in_thread
        if in_loop and in_thread:
            raise ValueError(
                f"{cls.__qualname__} has endpoints with `async def` ({', '.join(in_loop)}) and with `def` "
                f"({', '.join(in_thread)}): one that waits would block the others. Make all of one kind"
            )
        if in_thread:
            for hook in ("__supervise__", "__cleanup__"):
                if inspect.iscoroutinefunction(getattr(cls, hook, None)):
                    raise ValueError(
                        f"{cls.__qualname__} has endpoints with `def`, so no event loop for its `async def {hook}`"
                    )
        if clash := sorted(MESH_NAMES & self.endpoints.keys()):
            raise ValueError(
                f"{cls.__qualname__} has endpoints that every mesh has as its own: {', '.join(clash)}. Rename them"
            )

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(cls: type) -> ActorInterface:
        """The interface of an actor class. Raises ValueError for a class that cannot be spawned."""
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise ValueError(f"an actor's class is derived from monarch.actor.Actor, which {cls!r} is not")
        return ActorInterface(cls)

    def has(self, name: str) -> bool:
        """Whether the class has such a method at all, marked or not."""
        return callable(getattr(self.cls, name, None))
