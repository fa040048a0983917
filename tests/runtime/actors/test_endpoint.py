"""Marks on methods, classes of actors, and calls that are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from monarch.compiler.mesh import Shape
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.adverbs import Endpoint, as_endpoint, attribute, send
from monarch.runtime.actors.channel import Port
from monarch.runtime.actors.endpoint import ActorInterface, EndpointMethod, concurrent_endpoint, endpoint
from monarch.runtime.future import Future
from tests import python


class Trainer(Actor):
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    @endpoint
    def step(self, batch: int, /, lr: float = 0.1, *, clip: bool = False) -> float:
        return batch * lr

    @endpoint()
    def plain(self, a: int, b: int = 2) -> int:
        return a + b

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], question: str) -> None:
        port.send(question)

    def debug(self, n: int = 1) -> int:
        return n

    async def debug_async(self) -> None: ...


class Careful(Trainer):
    @endpoint
    def plain(self, a: int, b: int = 2) -> int:
        return super().plain(a, b) * 10  # type: ignore[operator]


class Sent:
    """Stands for a mesh of actors: notes what is sent."""

    def __init__(self, cls: type, **sizes: int) -> None:
        self._shape = Shape.of(sizes)
        self._label = "trainer"
        self.interface = ActorInterface.of(cls)
        self.sent: list[tuple[Any, ...]] = []

    def _ask(self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        self.sent.append(("all", method.name, args, kwargs))
        return Future.pending()

    def _ask_one(
        self, place: int, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        self.sent.append((place, method.name, args, kwargs))
        return Future.pending()

    def _ask_each(
        self, method: EndpointMethod[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Future[Any]]:
        self.sent.append(("each", method.name, args, kwargs))
        return iter(())

    def _tell(
        self,
        place: int | None,
        method: EndpointMethod[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: Port[Any] | None,
    ) -> None:
        self.sent.append(("tell", place, method.name, args, kwargs, port))

    def __getattr__(self, name: str) -> Any:
        return attribute(self, self.interface, name)


# -- classes -----------------------------------------------------------------------------------------------------------


def test_what_an_actor_offers() -> None:
    offered = ActorInterface.of(Careful)
    assert sorted(offered.endpoints) == ["later", "plain", "step"] and not offered.is_async
    assert offered.endpoints["later"].explicit_port
    assert str(offered.endpoints["later"].signature) == "(question: 'str') -> 'None'"


def test_within_the_actor_an_endpoint_is_a_plain_method() -> None:
    assert Careful().plain(1) == 30  # type: ignore[operator]


def test_a_class_of_a_script_survives_pickling_by_value() -> None:
    class Base(Actor):
        @endpoint
        def add(self, a: int) -> int:
            return a + 1

    class Local(Base):
        @endpoint
        def add(self, a: int) -> int:
            return super().add(a) * 10  # type: ignore[operator]

    elsewhere = """
import pickle, sys
from monarch.runtime.actors.endpoint import ActorInterface
cls = pickle.load(sys.stdin.buffer)
print(cls().add(1), ActorInterface.of(cls).endpoints["add"].signature)
"""
    found = python.run("-c", elsewhere, input=cloudpickle.dumps(Local), capture_output=True, timeout=60, check=True)
    assert found.stdout.decode() == "20 (a: 'int') -> 'int'\n"


def test_what_is_no_actor() -> None:
    class Other: ...

    for cls in (Other, 3, Trainer()):
        with pytest.raises(ValueError, match="derived from monarch.actor.Actor"):
            ActorInterface.of(cls)  # type: ignore[arg-type]


def test_def_and_async_def_do_not_mix() -> None:
    class Mixed(Actor):
        @endpoint
        def one(self) -> None: ...

        @endpoint
        async def other(self) -> None: ...

    with pytest.raises(ValueError, match=r"`async def` \(other\) and with `def` \(one\)"):
        ActorInterface.of(Mixed)


def test_hooks_need_an_event_loop_to_be_async() -> None:
    class Hooked(Actor):
        @endpoint
        def one(self) -> None: ...

        async def __cleanup__(self, exc: Exception | None) -> None: ...

    with pytest.raises(ValueError, match="async def __cleanup__"):
        ActorInterface.of(Hooked)


def test_names_that_every_mesh_has_are_refused() -> None:
    class Clash(Actor):
        @endpoint
        def size(self) -> int:  # type: ignore[override]
            return 3

        @endpoint
        def stop(self) -> None: ...  # type: ignore[override]

    with pytest.raises(ValueError, match="size, stop"):
        ActorInterface.of(Clash)


def test_what_cannot_be_marked() -> None:
    def generator(self: object) -> Iterator[int]:
        yield 1

    with pytest.raises(ValueError, match="generator"):
        endpoint(generator)
    with pytest.raises(ValueError, match="takes self and a port first"):
        endpoint(explicit_response_port=True)(lambda self: None)
    with pytest.raises(ValueError, match="takes self first"):
        endpoint(lambda: None)  # type: ignore[arg-type, misc]
    with pytest.raises(ValueError, match="`async def` methods, which .*plain is not"):
        concurrent_endpoint(Trainer.plain.function)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="one of the two marks"):
        concurrent_endpoint(Trainer.plain)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="not for 3"):
        endpoint(3)  # type: ignore[call-overload]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_each_adverb_sends_once() -> None:
    trainer = Sent(Trainer, x=3)
    trainer.plain.call(1)
    trainer.plain.choose(2, b=3)
    trainer.plain.stream(4)
    trainer.plain.broadcast(5)
    send(trainer.plain, (6,), {"b": 7})
    send(trainer.plain, (6,), {}, selection="choose")
    chosen, told = trainer.sent[1][0], trainer.sent.pop()
    assert chosen in range(3) and told[1] in range(3)
    assert trainer.sent == [
        ("all", "plain", (1,), {}),
        (chosen, "plain", (2,), {"b": 3}),
        ("each", "plain", (4,), {}),
        ("tell", None, "plain", (5,), {}, None),
        ("tell", None, "plain", (6,), {"b": 7}, None),
    ]


def test_call_one_is_for_one() -> None:
    one = Sent(Trainer)
    one.plain.call_one(1)
    Sent(Trainer, x=1).plain.call_one(1)
    assert one.sent == [(0, "plain", (1,), {})]
    with pytest.raises(ValueError, match=r"'trainer' \{'x': 2\} has 2"):
        Sent(Trainer, x=2).plain.call_one(1)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "message"),
    [
        ("plain", (), {}, "missing a required argument: 'a'"),
        ("plain", (1, 2, 3), {}, "too many positional"),
        ("plain", (1,), {"c": 1}, "unexpected keyword argument 'c'"),
        ("plain", (1,), {"a": 1}, "multiple values for argument 'a'"),
        ("step", (1, 2, 3), {}, "too many positional"),
        ("later", (), {}, "missing a required argument: 'question'"),
        ("later", ("x", "y"), {}, "too many positional"),
    ],
)
@pytest.mark.parametrize("adverb", ["call", "call_one", "choose", "stream", "broadcast", "send"])
def test_arguments_are_checked_before_anything_is_sent(
    adverb: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    trainer = Sent(Trainer)
    method: Endpoint[..., Any] = getattr(trainer, name)
    with pytest.raises(TypeError, match=rf"trainer\.{name}\(.*{message}"):
        if adverb == "send":
            send(method, args, kwargs)
        else:
            getattr(method, adverb)(*args, **kwargs)
    assert trainer.sent == []


def test_arguments_that_fit_are_sent() -> None:
    trainer = Sent(Trainer)
    trainer.plain.call(1)
    trainer.plain.call(1, 2)
    trainer.plain.call(b=1, a=2)
    trainer.step.call(1, clip=True)
    trainer.step.call(1, 0.5)
    trainer.later.call("why?")
    assert len(trainer.sent) == 6


def test_a_call_without_an_adverb_names_them() -> None:
    with pytest.raises(TypeError, match=r"trainer.step\(...\) does not choose.*trainer.step.call\(...\).get\(\)"):
        Sent(Trainer).step(1)  # type: ignore[operator]


def test_an_unmarked_method_says_how_it_can_be_called() -> None:
    trainer = Sent(Trainer)
    with pytest.raises(RuntimeError, match=r"Trainer.debug is no endpoint.*as_endpoint\(trainer.debug\)"):
        trainer.debug()
    for adverb in ("call", "call_one", "choose", "stream", "broadcast"):
        with pytest.raises(RuntimeError, match=r"as_endpoint\(trainer.debug\)"):
            getattr(trainer.debug, adverb)(1)
    as_endpoint(trainer.debug).call(n=3)
    assert trainer.sent == [("all", "debug", (), {"n": 3})]
    with pytest.raises(TypeError, match="trainer.debug"):
        as_endpoint(trainer.debug).call(1, 2)
    with pytest.raises(ValueError, match="event loop"):
        as_endpoint(trainer.debug_async)
    with pytest.raises(ValueError, match="unmarked method of spawned actors"):
        as_endpoint(Trainer().debug)
    with pytest.raises(AttributeError, match=r"no method 'fly'.*\['later', 'plain', 'step'\]"):
        trainer.fly.call()
    with pytest.raises(ValueError, match="neither 'all' nor 'choose'"):
        send(trainer.plain, (1,), {}, selection="some")  # type: ignore[arg-type]
