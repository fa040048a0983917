"""Endpoint: how a method of actors is called, and where its replies go. Arguments are checked on the caller's side."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from monarch.compiler.loading import load
from monarch.compiler.mesh import Shape
from monarch.runtime.actors.endpoint import ActorInterface, EndpointMethod, Propagate
from monarch.runtime.actors.shards import Shards
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.runtime.actors.channel import Port

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Selection = Literal["all", "choose"]

_random = random.SystemRandom()  # the user's seed is his own, and forked processes choose apart


class Recipients(Protocol):
    """The actors behind an endpoint, as a mesh of actors supplies them. Places are row-major in `_shape`, from 0.

    Each of these sends at once, in the caller's thread, and raises SupervisionError for a mesh that is stopped or dead.
    """

    _shape: Shape

    @property
    def _label(self) -> str:
        """The name of these actors in errors: the one they were spawned with."""

    def _ask(self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Send to all: a future of a ValueMesh over `_shape`."""

    def _ask_one(
        self, place: int, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Send to one: a future of its reply."""

    def _ask_shards(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Shards[Any]:
        """Send to all: their replies, which stay where they are."""

    def _ask_each(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Future[Any]]:
        """Send to all: a future for each reply, in the order in which they come."""

    def _tell(
        self,
        place: int | None,
        method: EndpointMethod[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: Port[Any] | None,
    ) -> None:
        """Send to one, or (None) to all; replies go to `port`, which may be anybody's, or nowhere."""


class Endpoint(Generic[P, R]):
    """A method of the actors of a mesh. All of these send at once, and none but `rref` waits.

        trainers.step.call(batch, lr=0.1)        -> Future[ValueMesh[float]]   from all
        trainers.step.call_one(batch)            -> Future[float]              from the only one
        trainers.step.choose(batch)              -> Future[float]              from one, at random
        trainers.step.stream(batch)              -> Iterator[Future[float]]    from all, as replies come
        trainers.step.broadcast(batch)           -> None                       and no reply
        trainers.step.shards(batch)              -> Shards[float]              from all, for a program
        trainers.step.rref(batch)                -> a distributed tensor       from all, each worker's own

    An exception of the method raises `ActorError` where the reply is looked at. After `broadcast` there is no such
    place: then an exception ends the actor, and its owner gets the failure.
    """

    __slots__ = ("_method", "_recipients")

    def __init__(self, recipients: Recipients, method: EndpointMethod[P, R]) -> None:
        self._recipients = recipients
        self._method = method

    if not TYPE_CHECKING:  # a type checker finds this by itself

        def __call__(self, *args, **kwargs):
            name = f"{self._recipients._label}.{self._method.name}"
            raise TypeError(
                f"{name}(...) does not choose the actors that it calls: {name}.call(...).get() returns the "
                "replies of all actors, .call_one(...) the reply of the only one"
            )

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call it on all actors: a future of their replies, in rank order, which fails with the first error."""
        self._check(args, kwargs)
        return self._recipients._ask(self._method, args, kwargs)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on the only actor: a future of its reply. Raises ValueError on a mesh of several."""
        self._check(args, kwargs)
        count = len(self._recipients._shape)
        if count != 1:
            raise ValueError(
                f"call_one is for one actor, and '{self._recipients._label}' {self._recipients._shape.extent} has "
                f"{count}: slice the mesh, or use call, or choose"
            )
        return self._recipients._ask_one(0, self._method, args, kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on one actor, each as likely as the others: a future of its reply."""
        self._check(args, kwargs)
        place = _random.randrange(len(self._recipients._shape))
        return self._recipients._ask_one(place, self._method, args, kwargs)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call it on all actors, at once: a future for each reply, in the order in which they come."""
        self._check(args, kwargs)
        return self._recipients._ask_each(self._method, args, kwargs)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it on all actors, and hear nothing of it; an exception ends the actor."""
        self._check(args, kwargs)
        self._recipients._tell(None, self._method, args, kwargs, None)

    def shards(self, *args: P.args, **kwargs: P.kwargs) -> Shards[R]:
        """Call it on all actors; the tensors that they return stay in their processes, as shards of distributed ones:

        mesh = Mesh(procs=procs)
        batch = mesh.from_shards(loaders.next.shards(), "[@data, -]")

        What is returned, tensors in any nesting of tuples, lists and dicts, is the mesh's from then on: the actor does
        not write to it any more.
        """
        self._check(args, kwargs)
        return self._recipients._ask_shards(self._method, args, kwargs)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on all actors, and have their results as distributed tensors that vary: each worker's own is that of
        the actor in its process.

        mesh = Mesh(procs=procs)
        with mesh.activate():
            x = torch.rand(3, 3)
        y = torch.relu(linear.forward.rref(x)) # x and y are f32[3, 3] varying<...>

        Each actor gets its worker's part of the distributed tensors in the arguments, as in every message; their mesh
        is that of the results. Without such, it is the mesh of the per-worker code that this stands in, or the only one
        that is open. Results come nested as they were returned, stay where they are, and have no gradient. Waits for
        the actors. The endpoint's `propagate`, if there is one, gives the types of the results beforehand.

        In a program that needs a `propagate`: each call of the program asks the actors, in order, before its step, with
        the program's arguments, its state as it is then, other answers, and plain values. An error that the actors
        raise is raised by the call, which changes nothing then, on the mesh or in Python; the actors have been called.

        Raises what they raised, LayoutError where `propagate` says otherwise, actors differ, or no mesh or several are
        meant, MonarchError where the workers are not in the actors' processes, and ProgramError for an argument that
        needs a gradient, and in a program for one that its step computes, without a `propagate`, and in branches,
        loops, checkpoints and pipelines.
        """
        self._check(args, kwargs)
        return load("monarch.language.placing.referred:referred")(
            self, self._method.propagate, args, kwargs, f"{self._recipients._label}.{self._method.name}"
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._method.check(args, kwargs, f"{self._recipients._label}.{self._method.name}")

    def __reduce__(self) -> tuple[object, ...]:
        """By name, so that a message with an endpoint in it is small, and the class is the receiver's."""
        found = getattr(self._recipients, self._method.name)
        if isinstance(found, Endpoint):
            return getattr, (self._recipients, self._method.name)
        return _as_endpoint, (found, self._method.explicit_port, self._method.propagate)

    def __repr__(self) -> str:
        return f"<endpoint {self._recipients._label}.{self._method.name}{self._method.signature}>"


class Addressed(Protocol[R_co]):
    """A function that an endpoint calls, and that is no endpoint itself: a `monarch.remote` function."""

    def addressed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Endpoint[..., Any], tuple[Any, ...], dict[str, Any]]: ...


def send(
    endpoint: Endpoint[Any, R] | Addressed[R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[R] | None = None,
    selection: Selection = "all",
) -> None:
    """Call an endpoint of all actors, or of one at random ("choose"), or a `monarch.remote` function in the active
    processes; replies go to `port`, if there is one. ValueError for another `selection`."""
    if selection not in ("all", "choose"):
        raise ValueError(f"selection={selection!r} is neither 'all' nor 'choose'")
    if not isinstance(endpoint, Endpoint):
        endpoint, args, kwargs = endpoint.addressed(args, kwargs)
    endpoint._check(args, kwargs)
    recipients = endpoint._recipients
    place = None if selection == "all" else _random.randrange(len(recipients._shape))
    recipients._tell(place, endpoint._method, args, kwargs, port)


class UnmarkedMethod:
    """A method of an actor class that is no endpoint, as found on a mesh: `as_endpoint` makes one of it."""

    def __init__(self, recipients: Recipients, interface: ActorInterface, name: str) -> None:
        self._recipients = recipients
        self._interface = interface
        self._name = name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._recipients, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name in ("call", "call_one", "choose", "stream", "broadcast", "shards", "rref"):
            raise self._refusal()
        raise AttributeError(name)

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"{self._interface.cls.__qualname__}.{self._name} is no endpoint: mark it with @endpoint, or call it as "
            f"as_endpoint({self._recipients._label}.{self._name}).call(...)"
        )


@overload
def as_endpoint(
    method: Callable[P, Coroutine[Any, Any, R]],
    /,
    *,
    propagate: Propagate = None,
    explicit_response_port: Literal[False] = False,
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    method: Callable[P, R], /, *, propagate: Propagate = None, explicit_response_port: Literal[False] = False
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    method: Callable[Concatenate[Port[R], P], Any],
    /,
    *,
    propagate: Propagate = None,
    explicit_response_port: Literal[True],
) -> Endpoint[P, R]: ...
def as_endpoint(method: Any, /, *, propagate: Propagate = None, explicit_response_port: bool = False) -> Any:
    """A method of spawned actors that was not marked, as an endpoint: `as_endpoint(trainers.debug).call()`.

    Raises ValueError for anything but such a method, and for one that is `async def` where the endpoints are not.
    """
    if not isinstance(method, UnmarkedMethod):
        raise ValueError(f"as_endpoint takes an unmarked method of spawned actors, such as mesh.method, not {method!r}")
    interface, name = method._interface, method._name
    marked: EndpointMethod[..., Any] = EndpointMethod(
        getattr(interface.cls, name), explicit_response_port, name=name, propagate=propagate
    )
    if marked.is_async and not interface.is_async:
        raise ValueError(
            f"{interface.cls.__qualname__}.{name} is `async def`, and the endpoints are `def`: such an actor has no "
            f"event loop to run it on"
        )
    return Endpoint(method._recipients, marked)


def _as_endpoint(method: Any, explicit_port: bool, propagate: Propagate) -> Any:
    if explicit_port:
        return as_endpoint(method, propagate=propagate, explicit_response_port=True)
    return as_endpoint(method, propagate=propagate)


def attribute(recipients: Recipients, interface: ActorInterface, name: str) -> Endpoint[..., Any] | UnmarkedMethod:
    """The attribute `name` of a mesh: an endpoint, or a method that is none. Raises AttributeError for anything
    else."""
    if (method := interface.endpoints.get(name)) is not None:
        return Endpoint(recipients, method)
    if not name.startswith("__") and interface.has(name):
        return UnmarkedMethod(recipients, interface, name)
    raise AttributeError(
        f"{interface.cls.__qualname__} has no method '{name}': its endpoints are {sorted(interface.endpoints)}"
    )
