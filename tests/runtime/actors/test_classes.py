"""Classes that are pickled by value, as a script's and a notebook's are, in messages that refer to their actors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from monarch.actor import Actor, endpoint, this_host
from monarch.runtime.actors import classes
from monarch.runtime.actors.messages.message import Payload
from tests.runtime.actors.conftest import WAIT


def test_a_reference_leaves_the_class_as_it_is_where_it_is_read() -> None:
    class Counter(Actor):
        told = 0

        @endpoint
        def tell(self, other: Any) -> int:
            type(self).told += 1
            return type(self).told

    counters = this_host().spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter)
    one, two = counters.slice(gpus=0), counters.slice(gpus=1)
    assert [one.tell.call_one(two).get(timeout=WAIT) for _ in range(3)] == [1, 2, 3]
    assert Counter.told == 0


def test_a_reference_is_handed_on_and_comes_back() -> None:
    class Relay(Actor):
        @endpoint
        def hand(self, other: Any, last: Any) -> Any:
            return other.hand.call_one(last, None).get(timeout=WAIT) if last is not None else (other, type(self))

    relays = this_host().spawn_procs(per_host={"gpus": 2}).spawn("relays", Relay)
    one, two = relays.slice(gpus=0), relays.slice(gpus=1)
    back, cls = one.hand.call_one(two, relays).get(timeout=WAIT)
    assert back == relays and back.hand and cls is Relay


def test_what_is_spawned_has_the_class_as_it_is_then() -> None:
    class Scale(Actor):
        by = 2

        @endpoint
        def scale(self, number: int) -> int:
            return number * self.by

    first = this_host().spawn_procs().spawn("first", Scale)
    assert first.scale.call_one(5).get(timeout=WAIT) == 10
    Scale.by = 3
    second = this_host().spawn_procs().spawn("second", Scale)
    assert second.scale.call_one(5).get(timeout=WAIT) == 15


def test_a_class_whose_methods_use_a_mesh_of_it() -> None:
    class Peer(Actor):
        @endpoint
        def name(self) -> str:
            return repr(peers)

    peers = this_host().spawn_procs().spawn("peers", Peer)
    later = this_host().spawn_procs().spawn("later", Peer)
    assert later.name.call_one().get(timeout=WAIT) == repr(peers)
    assert Payload.of(later).decode() == later


def test_a_class_is_pickled_once() -> None:
    class Made(Actor):
        weight = torch.ones(3)

        @endpoint
        def ask(self) -> None: ...

    token, data = classes.sent(Made)  # type: ignore[misc]
    assert classes.sent(Made) == (token, data) and classes.read((token, data)) is Made
    classes.renew(Made)
    again = classes.sent(Made)
    assert again != (token, data) and classes.read(again) is Made and classes.read((token, data)) is Made


def test_a_large_class_is_kept_by_nobody() -> None:
    table = torch.arange(2.0 * classes.LARGEST)

    class Large(Actor):
        @endpoint
        def at(self, place: int) -> float:
            return float(table[place])

    large = this_host().spawn_procs().spawn("large", Large)
    assert classes.sent(Large) is Large and large.at.call_one(-1).get(timeout=WAIT) == table[-1]


def test_what_cannot_be_pickled_alone_is_pickled_with_the_message() -> None:
    """And raises there what it raises."""

    class Bare(Actor):
        held = (each for each in ())

        @endpoint
        def ask(self) -> None: ...

    assert classes.sent(Bare) is Bare
    with pytest.raises((TypeError, pickle.PicklingError), match="generator"):
        this_host().spawn_procs().spawn("bare", Bare)
