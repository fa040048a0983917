"""What an actor knows of itself and of who spawned it, and how it ends itself."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
    this_proc,
)
from tests.runtime.actors.conftest import WAIT

Faults = queue.SimpleQueue[MeshFailure]


class Named(Actor):
    """Spawns another of its class, and says who both are."""

    @endpoint
    def about(self) -> tuple[Any, ...]:
        me = context().actor_instance
        creator = me.creator
        assert creator is not None
        return me.class_name, me.proc_mesh, repr(creator), creator.class_name, creator.creator, creator.proc_mesh

    @endpoint
    def about_child(self) -> tuple[Any, ...]:
        return this_proc().spawn("child", Named).about.call_one().get(WAIT)


def test_an_actor_knows_its_class_its_processes_and_who_spawned_it() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="crew")
    part = procs.slice(gpus=slice(1, 3))
    actors = part.spawn("named", Named)
    name = f"{__name__}.Named"
    assert (
        list(actors.about.call().get(WAIT).values())
        == [
            (name, part, "<actor root>", None, None, this_proc()),
        ]
        * 2
    )
    class_name, inner, creator, creator_class, above, creators = actors.slice(gpus=1).about_child.call_one().get(WAIT)
    assert (class_name, creator, creator_class, creators) == (name, "<actor named[1]>", name, part)
    assert isinstance(inner, ProcMesh) and inner.extent == {} and repr(above) == "<actor root>"


def test_outside_actors_there_is_neither_class_nor_creator() -> None:
    me = context().actor_instance
    assert (me.class_name, me.creator, me.proc_mesh) == (None, None, this_proc())
    with pytest.raises(RuntimeError, match="'root' is a process, and no actor"):
        me.abort()


class Ends(Actor):
    """Ends itself, in one way or another, and would answer."""

    @endpoint
    def abort(self, reason: str | None) -> str:
        context().actor_instance.abort(reason)
        return "answered"

    @endpoint
    def raise_after_abort(self, reason: str) -> None:
        context().actor_instance.abort(reason)
        raise ValueError("which nobody hears of")

    @endpoint
    def finish(self) -> str:
        context().actor_instance.stop("all is done")
        return "answered"

    @endpoint
    def echo(self, value: int) -> int:
        return value


class EndsInLoop(Actor):
    """Likewise with an event loop."""

    @endpoint
    async def abort(self, reason: str, how: str) -> str:
        me = context().actor_instance
        if how == "from a thread":
            threading.Thread(target=me.abort, args=(reason,)).start()
        else:
            me.abort(reason)
        if how != "at once":
            await asyncio.Event().wait()
        return "answered"

    @concurrent_endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("reason", "said"), [("no reason", "it aborted itself: no reason"), (None, "aborted itself")])
@pytest.mark.parametrize("method", ["abort", "raise_after_abort"])
def test_an_actor_that_aborts_fails_and_its_caller_hears_of_it(
    method: str, reason: str | None, said: str, faults: Faults
) -> None:
    actor = this_proc().spawn("ends", Ends)
    with pytest.raises(SupervisionError, match=f"takes no more messages: .*{said}"):
        getattr(actor, method).call_one(reason).get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert failure.is_of(actor) and said in failure.reason
    assert failure.mesh_id == actor.id  # type: ignore[attr-defined]
    with pytest.raises(SupervisionError, match=said):
        actor.echo.call_one(1).get(WAIT)


@pytest.mark.parametrize("how", ["at once", "while it awaits", "from a thread"])
def test_an_endpoint_that_awaits_ends_with_its_actor(how: str, faults: Faults) -> None:
    actor = this_host().spawn_procs().spawn("ends", EndsInLoop)
    beside = actor.wait.call_one()
    with pytest.raises(SupervisionError, match="it aborted itself: enough"):
        actor.abort.call_one("enough", how).get(WAIT)
    with pytest.raises(SupervisionError, match="it aborted itself: enough"):
        beside.get(WAIT)
    assert faults.get(timeout=WAIT).reason == "it aborted itself: enough"


def test_an_actor_that_stops_itself_answers_and_is_no_failure() -> None:
    actor = this_host().spawn_procs().spawn("ends", Ends)
    assert actor.finish.call_one().get(WAIT) == "answered"
    with pytest.raises(SupervisionError, match="takes no more messages"):
        actor.echo.call_one(1).get(WAIT)
