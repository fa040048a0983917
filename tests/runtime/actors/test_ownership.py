"""Supervision, in a made-up cluster: processes that come, end and are killed, and messages that take their time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.processes.ownership import (
    PROCESS,
    Born,
    Bury,
    Cleaned,
    Cleanup,
    Command,
    EndProcess,
    Ends,
    Event,
    Exit,
    Owns,
    PlaceEnded,
    ProcessGone,
    StopActor,
    StopMesh,
    Supervise,
    Supervised,
    Supervision,
    Tell,
)
from tests.sample import is_full

ROOT = "root"


@dataclass
class Actor:
    """An actor as its process sees it. `mesh` and `rank` are where it was spawned, `owner` by whom."""

    process: str
    name: str
    mesh: str
    rank: int
    owner: tuple[str, str]
    stopped: bool = False
    ending: bool = False
    cleaning: bool = False
    buried: bool = False
    heard: deque[MeshFailure] = field(default_factory=deque)


@dataclass(frozen=True)
class StopPlace:
    mesh: str
    rank: int


class Cluster(RuleBasedStateMachine):
    """Carries out the commands, later or sooner; messages between two processes keep their order."""

    @initialize()
    def start(self) -> None:
        self.number = 0
        self.states: dict[str, Supervision] = {ROOT: Supervision()}
        self.dead: set[str] = set()
        self.told: set[tuple[str, str]] = set()
        """Of whose end which process hears: those that are there when it ends."""
        self.exited: set[str] = set()
        self.actors: dict[tuple[str, str], Actor] = {
            (ROOT, PROCESS): Actor(ROOT, PROCESS, "", 0, ("", ""))  # the user's program
        }
        self.meshes: dict[str, list[str]] = {}  # addresses, by place
        self.of_processes: set[str] = set()
        self.under_way: dict[tuple[str, str], deque[Event | StopPlace]] = {}
        self.ending = False
        # The program's processes, with an actor in each; the first of these owns a process, and an actor there.
        self.spawn_processes_of(self.actors[ROOT, PROCESS], 2)
        self.spawn_actors_of(self.actors[ROOT, PROCESS], self.meshes["procs1"])
        self.deliver_all()
        first = self.actors["procs1.0", "actors2"]
        self.spawn_processes_of(first, 1)
        self.spawn_actors_of(first, self.meshes["procs3"])

    def deliver_all(self) -> None:
        while waiting := [pair for pair, messages in self.under_way.items() if messages]:
            self.deliver_one(*waiting[0])

    # -- what commands do ------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        return [address for address in self.states if address not in self.dead]

    def send(self, sender: str, to: str, message: Event | StopPlace) -> None:
        self.under_way.setdefault((sender, to), deque()).append(message)

    def handle(self, address: str, event: Event) -> list[Command]:
        commands = self.states[address].handle(event)
        for command in commands:
            self.carry_out(address, command)
        return commands

    def carry_out(self, address: str, command: Command) -> None:
        match command:
            case Supervise(name, failure):
                actor = self.actors[address, name]
                assert not actor.ending and not actor.buried
                actor.heard.append(failure)
            case StopActor(name):
                self.actors[address, name].stopped = True
            case StopMesh(mesh, ranks):
                assert ranks
                for rank in ranks:
                    self.send(address, self.meshes[mesh][rank], StopPlace(mesh, rank))
            case Cleanup(name):
                actor = self.actors[address, name]
                assert actor.ending and not actor.cleaning and not actor.buried
                assert all(child.buried or child.process in self.dead for child in self.children(actor))
                actor.cleaning = True
            case Bury(name):
                actor = self.actors[address, name]
                assert actor.cleaning and not actor.buried
                actor.buried = True
            case Tell(owner, event):
                assert owner[0] != "" and event.mesh in self.meshes
                self.send(address, owner[0], event)
            case Exit():
                assert all(actor.buried for actor in self.of(address) if actor.name != PROCESS)
                self.exited.add(address)
                self.end(address, failed=False)

    def of(self, address: str) -> list[Actor]:
        return [actor for actor in self.actors.values() if actor.process == address]

    def children(self, owner: Actor) -> list[Actor]:
        return [actor for actor in self.actors.values() if actor.owner == (owner.process, owner.name)]

    def end(self, address: str, failed: bool) -> None:
        self.dead.add(address)
        for other in self.alive():
            gone = ProcessGone(address, "killed" if failed else "ended", failed, -9 if failed else 0)
            self.send(address, other, gone)  # behind all that it had sent
            self.told.add((address, other))

    def choose(self, data: st.DataObject, actors: list[Actor]) -> Actor:
        return actors[data.draw(st.integers(0, len(actors) - 1))]

    def running(self) -> list[Actor]:
        return [
            actor
            for actor in self.actors.values()
            if actor.process not in self.dead and not actor.ending and not (actor.name == PROCESS and self.ending)
        ]

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def spawn_processes(self, data: st.DataObject) -> None:
        if not self.running() or len(self.alive()) > 6:
            return
        self.spawn_processes_of(self.choose(data, self.running()), data.draw(st.integers(1, 3)))

    def spawn_processes_of(self, owner: Actor, count: int) -> None:
        self.number += 1
        mesh = f"procs{self.number}"
        self.meshes[mesh] = places = [f"{mesh}.{rank}" for rank in range(count)]
        self.of_processes.add(mesh)
        for address in places:
            self.states[address] = Supervision(owner.process)
        self.handle(owner.process, Owns(owner.name, mesh, mesh, places, processes=True))

    @rule(data=st.data())
    def spawn_actors(self, data: st.DataObject) -> None:
        if self.running():
            places = st.lists(st.sampled_from(sorted(self.states)), min_size=1, max_size=3, unique=True)
            self.spawn_actors_of(self.choose(data, self.running()), data.draw(places))

    def spawn_actors_of(self, owner: Actor, places: list[str]) -> None:
        self.number += 1
        mesh = f"actors{self.number}"
        self.meshes[mesh] = places
        ref = (owner.process, owner.name)
        self.handle(owner.process, Owns(owner.name, mesh, mesh, places))
        for rank, address in enumerate(places):
            self.send(owner.process, address, Born(mesh, ref, mesh, mesh, rank))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        waiting = sorted(pair for pair, messages in self.under_way.items() if messages)
        if waiting:
            self.deliver_one(*data.draw(st.sampled_from(waiting)))

    def deliver_one(self, sender: str, to: str) -> None:
        message = self.under_way[sender, to].popleft()
        if to in self.dead:
            if isinstance(message, Born) and (to, sender) not in self.told:  # sending it fails
                failure = MeshFailure(message.mesh, message.mesh, message.rank, "its process is gone")
                self.send(to, sender, PlaceEnded(message.mesh, message.rank, failure))
            return
        if isinstance(message, StopPlace):
            if message.mesh in self.of_processes:
                self.handle(to, EndProcess("stopped"))
            elif (to, message.mesh) in self.actors:
                self.actors[to, message.mesh].stopped = True
            return
        if isinstance(message, Born):
            self.actors[to, message.actor] = Actor(to, message.actor, message.mesh, message.rank, message.owner)
        commands = self.handle(to, message)
        if isinstance(message, PlaceEnded) and message.failure is not None:
            owner = self.owner(message.mesh)
            if owner is not None and not owner.ending and not self.ending:
                assert Supervise(owner.name, message.failure) in commands

    def owner(self, mesh: str) -> Actor | None:
        refs = {actor.owner for actor in self.actors.values() if actor.mesh == mesh}
        return self.actors.get(refs.pop()) if refs else None

    @rule(data=st.data(), raises=st.booleans())
    def end_actor(self, data: st.DataObject, raises: bool) -> None:
        """An actor takes its stop, or raises."""
        ready = [actor for actor in self.running() if actor.name != PROCESS and (raises or self.takes_stop(actor))]
        if ready:
            self.end_one(self.choose(data, ready), raises)

    def takes_stop(self, actor: Actor) -> bool:
        return actor.stopped and not actor.heard and not actor.ending

    def end_one(self, actor: Actor, raises: bool) -> None:
        actor.ending = True
        self.handle(actor.process, Ends(actor.name, f"{actor.name} raised" if raises else "stopped", raises))

    @rule(data=st.data(), outcome=st.sampled_from(["handled", "not", "raises"]))
    def supervise(self, data: st.DataObject, outcome: str) -> None:
        hearing = [actor for actor in self.running() if actor.heard]
        if hearing:
            self.supervise_one(self.choose(data, hearing), outcome)

    def supervise_one(self, actor: Actor, outcome: str) -> None:
        failure = actor.heard.popleft()
        actor.ending = outcome != "handled" and actor.name != PROCESS
        error = "ValueError" if outcome == "raises" else ""
        self.handle(actor.process, Supervised(actor.name, failure, outcome == "handled", error))

    @rule(data=st.data(), raises=st.booleans())
    def clean(self, data: st.DataObject, raises: bool) -> None:
        cleaning = self.cleaning()
        if cleaning:
            actor = self.choose(data, cleaning)
            self.handle(actor.process, Cleaned(actor.name, "ValueError" if raises else ""))

    def cleaning(self) -> list[Actor]:
        alive = [actor for actor in self.actors.values() if actor.process not in self.dead]
        return [actor for actor in alive if actor.cleaning and not actor.buried]

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from([address for address in self.alive() if address != ROOT])), failed=True)

    @precondition(lambda self: not self.ending)
    @rule()
    def end_program(self) -> None:
        self.ending = True
        self.handle(ROOT, EndProcess("the program ended"))

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_buried_is_owned_by_nobody_here(self) -> None:
        for actor in self.actors.values():
            if actor.buried and actor.process not in self.dead:
                assert all(child.buried or child.process in self.dead for child in self.children(actor))

    def teardown(self) -> None:
        """However it went, the program's end is the end of all."""
        if not self.ending:
            self.ending = True
            self.handle(ROOT, EndProcess("the program ended"))
        for _ in range(10_000):
            waiting = [pair for pair, messages in self.under_way.items() if messages]
            hearing = [actor for actor in self.running() if actor.heard and actor.name != PROCESS]
            stopping = [actor for actor in self.running() if self.takes_stop(actor) and actor.name != PROCESS]
            if waiting:
                self.deliver_one(*waiting[0])
            elif hearing:
                self.supervise_one(hearing[0], "handled")
            elif stopping:
                self.end_one(stopping[0], raises=False)
            elif cleaning := self.cleaning():
                self.handle(cleaning[0].process, Cleaned(cleaning[0].name))
            else:
                break
        assert self.alive() == []
        assert ROOT in self.exited


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=200 if is_full() else 80, stateful_step_count=40)


# -- one at a time ----------------------------------------------------------------------------------------------------


def child_and_parent() -> Supervision:
    """One process with `parent`, which the process owns, and `child`, which `parent` owns."""
    state = Supervision()
    state.handle(Owns(PROCESS, "m0", "parent", ["here"]))
    state.handle(Born("parent", ("here", PROCESS), "m0", "parent", 0))
    state.handle(Owns("parent", "m1", "child", ["here"]))
    state.handle(Born("child", ("here", "parent"), "m1", "child", 0))
    return state


def failed(state: Supervision, actor: str = "child") -> MeshFailure:
    """Have an actor fail, and give what its owner is told."""
    state.handle(Ends(actor, "it raised", failed=True))
    told = state.handle(Cleaned(actor))[0]
    assert isinstance(told, Tell) and told.event.failure is not None
    return told.event.failure


def test_children_end_first_and_then_the_owner_cleans_up() -> None:
    state = child_and_parent()
    assert state.handle(Ends("parent", "stopped", failed=False)) == [
        StopMesh("m1", (0,), "its owner parent[0] has ended: stopped")
    ]
    assert state.handle(Ends("child", "stopped", failed=False)) == [Cleanup("child", "")]
    assert state.handle(Cleaned("child")) == [
        Tell(("here", "parent"), PlaceEnded("m1", 0)),
        Bury("child", "stopped"),
    ]
    assert state.handle(PlaceEnded("m1", 0)) == [Cleanup("parent", "")]


def test_a_failure_that_is_handled_goes_no_further() -> None:
    state = child_and_parent()
    failure = failed(state)
    assert state.handle(PlaceEnded("m1", 0, failure)) == [Supervise("parent", failure)]
    assert state.handle(Supervised("parent", failure, handled=True)) == []


def test_a_failure_that_is_not_handled_is_the_owners_too() -> None:
    state = child_and_parent()
    failure = failed(state)
    state.handle(PlaceEnded("m1", 0, failure))
    [cleanup] = state.handle(Supervised("parent", failure, handled=False))
    assert isinstance(cleanup, Cleanup) and cleanup.actor == "parent"
    told = state.handle(Cleaned("parent"))[0]
    assert told == Tell(
        ("here", PROCESS),
        PlaceEnded("m0", 0, MeshFailure("m0", "parent", 0, "it did not handle the failure of child", cause=failure)),
    )


def test_what_supervise_raises_is_a_new_failure_chained_to_the_old() -> None:
    state = child_and_parent()
    failure = failed(state)
    state.handle(PlaceEnded("m1", 0, failure))
    state.handle(Supervised("parent", failure, handled=False, error="KeyError: 'x'"))
    told = state.handle(Cleaned("parent"))[0]
    assert isinstance(told, Tell) and told.event.failure is not None
    assert told.event.failure.cause == failure
    assert told.event.failure.reason == "its __supervise__ raised KeyError: 'x'"


def test_what_cleanup_raises_is_a_failure() -> None:
    state = child_and_parent()
    state.handle(Ends("child", "stopped", failed=False))
    told = state.handle(Cleaned("child", "OSError: disk"))[0]
    assert told == Tell(
        ("here", "parent"), PlaceEnded("m1", 0, MeshFailure("m1", "child", 0, "its __cleanup__ raised OSError: disk"))
    )


def test_a_child_that_fails_while_its_owner_ends_is_reported_by_the_owner() -> None:
    state = child_and_parent()
    state.handle(Ends("parent", "stopped", failed=False))
    failure = failed(state)
    assert state.handle(PlaceEnded("m1", 0, failure)) == [Cleanup("parent", "")]
    told = state.handle(Cleaned("parent"))[0]
    assert isinstance(told, Tell) and told.event.failure is not None
    assert told.event.failure.cause == failure


def test_a_killed_process_is_a_failure_with_its_status_and_log() -> None:
    state = Supervision()
    state.handle(Owns(PROCESS, "procs", "procs", ["a", "b"], processes=True))
    state.handle(Owns(PROCESS, "m", "workers", ["a", "b"]))
    gone = ProcessGone("b", "killed by signal 9", failed=True, status=-9, log=("last words",))
    [told] = state.handle(gone)
    assert told == Supervise(
        PROCESS, MeshFailure("m", "workers", 1, "its process ended: killed by signal 9", -9, ("last words",))
    )
    assert state.handle(gone) == []  # once is enough


def test_processes_without_actors_are_reported_as_processes() -> None:
    state = Supervision()
    state.handle(Owns(PROCESS, "procs", "procs", ["a", "b"], processes=True))
    [told] = state.handle(ProcessGone("a", "killed", failed=True))
    assert isinstance(told, Supervise) and (told.failure.mesh_name, told.failure.rank) == ("procs", 0)


def test_a_process_that_ends_as_told_is_no_failure() -> None:
    state = Supervision()
    state.handle(Owns(PROCESS, "m", "workers", ["a"]))
    assert state.handle(ProcessGone("a", "stopped", failed=False)) == []


def test_to_spawn_where_nothing_lives_is_a_failure_at_once() -> None:
    state = Supervision()
    state.handle(ProcessGone("a", "killed", failed=True))
    [told] = state.handle(Owns(PROCESS, "m", "workers", ["a", "b"]))
    assert isinstance(told, Supervise) and told.failure.rank == 0


def test_an_actor_whose_owners_process_is_gone_ends() -> None:
    state = Supervision()
    state.handle(Born("x", ("a", "boss"), "m", "x", 0))
    [stop] = state.handle(ProcessGone("a", "killed", failed=True))
    assert isinstance(stop, StopActor) and stop.actor == "x"
    [stop] = state.handle(Born("y", ("a", "boss"), "n", "y", 0))  # the message was slower than the news
    assert isinstance(stop, StopActor) and stop.actor == "y"
    state.handle(Ends("x", "stopped", failed=False))
    assert state.handle(Cleaned("x")) == [Bury("x", "stopped")]  # nobody is left to be told


def test_a_process_ends_with_its_owners() -> None:
    state = Supervision("a")
    assert state.handle(ProcessGone("b", "killed", failed=True)) == []
    assert state.handle(ProcessGone("a", "killed", failed=True)) == [Exit()]


def test_what_comes_to_a_process_that_ends_ends_too() -> None:
    state = child_and_parent()
    state.handle(EndProcess("leave"))
    assert state.handle(Born("late", ("a", "boss"), "m", "late", 0)) == [StopActor("late", "leave")]


def test_what_an_ending_actor_spawns_is_stopped() -> None:
    state = child_and_parent()
    state.handle(Ends("parent", "stopped", failed=False))
    [stop] = state.handle(Owns("parent", "m2", "late", ["here", "there"]))
    assert isinstance(stop, StopMesh) and stop.ranks == (0, 1)
    state.handle(Ends("child", "stopped", failed=False))
    state.handle(Cleaned("child"))
    state.handle(PlaceEnded("m1", 0))
    state.handle(PlaceEnded("m2", 1))
    assert state.handle(PlaceEnded("m2", 0)) == [Cleanup("parent", "")]
    [stop] = state.handle(Owns("parent", "m3", "too late", ["here"]))
    assert isinstance(stop, StopMesh)
