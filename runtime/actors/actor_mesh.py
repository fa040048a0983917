"""A mesh of actors: their endpoints, and how the mesh sends calls to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from monarch.compiler.mesh import Shape
from monarch.runtime.actors import classes
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.adverbs import attribute
from monarch.runtime.actors.endpoint import MESH_NAMES, ActorInterface, EndpointMethod
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY, NO_ARGUMENTS, Payload
from monarch.runtime.actors.messages.protocol import CALL, STOP, Head, Place, ReplyTo
from monarch.runtime.actors.owned import Owned, done, own_end
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import All, Each, One, failing
from monarch.runtime.actors.processes.spreading import Audience
from monarch.runtime.actors.shards import Shards
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.runtime.actors.channel import Port
    from monarch.runtime.actors.processes.process import Process

A = TypeVar("A", bound=Actor)


class ActorMesh(Owned, Generic[A]):
    """Actors of one class, one in each of some processes. Each endpoint of the class is an attribute; `id` is the
    `mesh_id` of a `MeshFailure` of theirs."""

    def __init__(
        self,
        actor_id: str,
        name: str,
        cls: type[A],
        addresses: tuple[str, ...],
        shape: Shape,
        agents: tuple[str, ...] = (),
    ) -> None:
        """`agents` are those of the hosts that they are on."""
        self._id = actor_id
        self._name = name
        self._cls = cls
        self._addresses = addresses
        self._shape = shape
        self._agents = agents
        self._to = [addresses[base] for base in shape.ndslice]
        self._audience = Audience(self._to, agents)
        extent = shape.extent
        labels, sizes = tuple(extent.labels), tuple(extent.sizes)
        self._places: list[Place | None] = [(rank, labels, sizes) if labels else None for rank in range(len(shape))]

    @property
    def _label(self) -> str:
        return self._name

    def stop(self, reason: str = "it was stopped") -> Future[None]:
        """End the actors: each handles the messages that came before, and ends the meshes that it owns. A future of the
        end; in one of these actors it is an error at once, RuntimeError, for that would wait for its own end.
        RuntimeError for a slice."""
        self._whole()
        process = current.process()
        error = SupervisionError(f"'{self._name}' takes no more messages: {reason}")
        for address in self._addresses:
            process.refused[self._id, address] = error
        stopped = self._meta(lambda reply: (STOP, self._id, reply, reason), EMPTY)
        if current.context().actor_instance.actor_id == self._id:
            stopped.fail(own_end(self._name, "actors"))
        return done(stopped, None)

    def _have_stopped(self, process: Process, ranks: Sequence[int], reason: str) -> None:
        for rank in ranks:
            process.router.send(self._addresses[rank], (STOP, self._id, None, reason), EMPTY)

    @property
    def initialized(self) -> Future[bool]:
        """A future of True that is done once all constructors are through; SupervisionError where one raised."""
        return done(self._meta(lambda reply: (CALL, self._id, reply, "", False, None), NO_ARGUMENTS), True)

    def _meta(self, head: Callable[[ReplyTo], tuple[Any, ...]], payload: Payload) -> Future[ValueMesh[None]]:
        process = current.process()
        waiting: All[None] = All(self._shape, self._to, mesh=self._id)
        port = process.ports.open(waiting)
        for place in self._audience.send(process, lambda place: head((process.address, port, place)), payload):
            process.ports.reply(port, place, False, failing(process.lost(self._to[place], self._name)))
        return waiting.future

    # -- what `Endpoint` stands on -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in MESH_NAMES or name.startswith("__") or name in ("_cls", "_shape"):
            raise AttributeError(name)
        interface = ActorInterface.of(cast("type", self._cls))
        if name == "id" and not interface.has(name):  # or else it is the class's
            return self._id
        found = attribute(self, interface, name)
        self.__dict__[name] = found
        return found

    def _head(self, place: int, reply: ReplyTo | None, method: EndpointMethod[..., Any]) -> Head:
        return CALL, self._id, reply, method.name, method.explicit_port, self._places[place]

    def _lost(self, process: Process, place: int, method: EndpointMethod[..., Any]) -> SupervisionError:
        return process.lost(self._to[place], f"{self._label}.{method.name}")

    def _pickled(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], to: Sequence[str]
    ) -> Payload:
        try:
            return Payload.of((args, kwargs), to)
        except Exception as error:  # of the user's classes, and raised as it is
            error.add_note(f"in the arguments of {self._label}.{method.name}, which are pickled to be sent")
            raise

    def _ask(self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._ask_all(method, args, kwargs, None)

    def _ask_all(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], keep: int | None
    ) -> Future[ValueMesh[Any]]:
        """With a number in `keep`: the replies stay where they are, and are described."""
        payload = self._pickled(method, args, kwargs, self._to)
        process = current.process()
        waiting: All[Any] = All(self._shape, self._to, f"{self._label}.{method.name}", self._id)
        port = process.ports.open(waiting)
        address = process.address

        def head(place: int) -> Head:
            return self._head(place, (address, port, place) if keep is None else (address, port, place, keep), method)

        gather = keep is None and not method.explicit_port
        for place in self._audience.send(process, head, payload, gather):
            process.ports.reply(port, place, False, failing(self._lost(process, place, method)))
        return waiting.future

    def _ask_shards(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Shards[Any]:
        programs = current.process().programs
        number = programs.number()
        replies = self._ask_all(method, args, kwargs, number)
        return Shards(programs, number, f"{self._label}.{method.name}", self._to, replies)

    def _ask_one(
        self, place: int, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        payload = self._pickled(method, args, kwargs, self._to[place : place + 1])
        process = current.process()
        waiting: One[Any] = One(self._to[place], f"{self._label}.{method.name}", self._shape, place, self._id)
        port = process.ports.open(waiting)
        if not process.router.send(self._to[place], self._head(place, (process.address, port, place), method), payload):
            process.ports.reply(port, place, False, failing(self._lost(process, place, method)))
        return waiting.future

    def _ask_each(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Future[Any]]:
        payload = self._pickled(method, args, kwargs, self._to)
        process = current.process()
        waiting: Each[Any] = Each(self._to, f"{self._label}.{method.name}", self._shape, self._id)
        port = process.ports.open(waiting)
        for place in self._audience.send(
            process, lambda place: self._head(place, (process.address, port, place), method), payload
        ):
            process.ports.reply(port, place, False, failing(self._lost(process, place, method)))
        return waiting.futures()

    def _tell(
        self,
        place: int | None,
        method: EndpointMethod[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: Port[Any] | None,
    ) -> None:
        process = current.process()
        places = range(len(self._to)) if place is None else (place,)
        for at in places if process.refused else ():
            refused = process.refused.get((self._id, self._to[at]))
            if refused is not None:
                raise refused.with_traceback(None)
        payload = self._pickled(method, args, kwargs, [self._to[at] for at in places])
        reply: ReplyTo | None = getattr(port, "_to", None)

        def head(at: int) -> Head:
            return self._head(at, None if reply is None else (*reply[:2], at), method)

        if place is None:
            failed = self._audience.send(process, head, payload)
        else:
            failed = [] if process.router.send(self._to[place], head(place), payload) else [place]
        if failed:
            raise self._lost(process, failed[-1], method)

    # -- mesh ----------------------------------------------------------------------------------------------------------

    def _over(self, shape: Shape) -> ActorMesh[A]:
        return ActorMesh(self._id, self._label, self._cls, self._addresses, shape, self._agents)

    def _describe(self, base: int) -> str:
        return f"{self._label}[{base}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorMesh) and (self._id, self._shape) == (other._id, other._shape)

    def __hash__(self) -> int:
        return hash((self._id, self._shape))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (self._id, self._label, classes.sent(self._cls), self._addresses, self._shape, self._agents)

    def __repr__(self) -> str:
        return f"ActorMesh('{self._label}', {self._cls.__name__}, {self.extent})"


def _unpickle(
    actor_id: str,
    name: str,
    cls: type[A] | classes.Pickled,
    addresses: tuple[str, ...],
    shape: Shape,
    agents: tuple[str, ...],
) -> ActorMesh[A]:
    return ActorMesh(actor_id, name, classes.read(cls), addresses, shape, agents)
