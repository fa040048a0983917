"""Actors that stop at a breakpoint, and consoles that attach to them."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path

import pytest

import monarch.actor
from monarch.actor import Actor, ActorError, MeshFailure, endpoint, this_host
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.debugging import console
from monarch.runtime.actors.debugging.console import Console
from monarch.runtime.actors.debugging.debugger import desk
from tests import python
from tests.runtime.actors.conftest import WAIT

Faults = queue.SimpleQueue[MeshFailure]


class Trainer(Actor):
    @endpoint
    def step(self, batch: int) -> int:
        loss = batch * 2
        breakpoint()
        loss += 1
        return loss

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Async(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        breakpoint()
        return batch + 1


def shown(at: Console, line: str) -> str:
    answer = at.run(line)
    assert answer is not None
    return answer


def test_one_attaches_looks_changes_and_goes_on() -> None:
    trainers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("trainer", Trainer)
    replies = trainers.step.call(21)
    at = desk().get(WAIT)
    at.wait.call_one(2).get(WAIT)
    user = Console(at)
    assert user.prompt == "monarch> "
    first, second = shown(user, "list").splitlines()
    assert first.startswith("trainer 0  gpus=0  test_debugger.py:") and first.endswith(" in step  loss += 1")
    assert second.startswith("trainer 1  gpus=1  ")
    assert shown(user, "attach trainer") == "which of them: 0, 1?\n"
    assert "-> loss += 1" in shown(user, "attach trainer 1")
    assert user.prompt == "trainer 1> "
    assert shown(user, "p loss") == "42\n"
    assert shown(user, "loss = 100") == ""
    assert "-> return loss" in shown(user, "next")
    assert "return loss" in shown(user, "detach") + shown(user, "list").splitlines()[1]
    assert shown(user, "cast trainer p loss") == "trainer 0: 42\ntrainer 1: 101\n"
    assert shown(user, "cast trainer 0 p loss") == "trainer 0: 42\n"
    assert shown(user, "continue") == "2 went on\n"
    assert list(replies.get(WAIT).values()) == [43, 101]
    assert shown(user, "list") == "no actor waits at a breakpoint\n"


def test_an_attached_actor_goes_on_and_the_console_is_free_again() -> None:
    trainer = this_host().spawn_procs().spawn("trainer", Trainer)
    user = Console(desk().get(WAIT))
    for batch in (1, 2):
        reply = trainer.step.call_one(batch)
        desk().get(WAIT).wait.call_one(1).get(WAIT)
        shown(user, "attach trainer")
        assert shown(user, "continue") == "trainer 0 continued\n"
        assert user.prompt == "monarch> " and reply.get(WAIT) == 2 * batch + 1


def test_breakpoints_that_are_set_in_the_debugger_stop_it_again() -> None:
    trainer = this_host().spawn_procs().spawn("trainer", Trainer)
    reply = trainer.step.call_one(1)
    at = desk().get(WAIT)
    at.wait.call_one(1).get(WAIT)
    user = Console(at)
    shown(user, "attach trainer")
    line = next(number for number, text in enumerate(open(__file__), start=1) if text.strip() == "return loss")
    assert "Breakpoint 1" in shown(user, f"break {__file__}:{line}")
    shown(user, "continue")
    at.wait.call_one(1).get(WAIT)
    assert "-> return loss" in shown(user, "attach trainer")
    shown(user, "continue")
    assert reply.get(WAIT) == 3


def test_async_endpoints_stop_too() -> None:
    actor = this_host().spawn_procs().spawn("actor", Async)
    reply = actor.step.call_one(1)
    desk().get(WAIT).wait.call_one(1).get(WAIT)
    user = Console(desk().get(WAIT))
    shown(user, "attach actor")
    assert shown(user, "p batch") == "1\n"
    shown(user, "continue")
    assert reply.get(WAIT) == 2


def test_quitting_the_debugger_is_an_error_of_the_call() -> None:
    trainer = this_host().spawn_procs().spawn("trainer", Trainer)
    reply = trainer.step.call_one(1)
    desk().get(WAIT).wait.call_one(1).get(WAIT)
    shown(Console(desk().get(WAIT)), "cast trainer quit")
    with pytest.raises(ActorError, match="BdbQuit"):
        reply.get(WAIT)


def test_an_actor_that_is_killed_waits_no_more(faults: Faults) -> None:
    trainer = this_host().spawn_procs().spawn("trainer", Trainer)
    pid = trainer.pid.call_one().get(WAIT)
    trainer.step.call_one(1)
    at = desk().get(WAIT)
    at.wait.call_one(1).get(WAIT)
    user = Console(at)
    shown(user, "attach trainer")
    os.kill(pid, signal.SIGKILL)
    faults.get(timeout=WAIT)
    assert shown(user, "p batch") == "\"no actor 'trainer' of rank 0 waits at a breakpoint\"\n"
    assert shown(user, "list") == "no actor waits at a breakpoint\n"


def test_what_is_no_command() -> None:
    user = Console(desk().get(WAIT))
    assert shown(user, "") == ""
    assert shown(user, "fly away").startswith("'fly away' is no command\nlist ")
    assert shown(user, "help") == console.HELP
    assert shown(user, "attach nobody").startswith("no such actor 'nobody'")
    assert user.run("quit") is None


def test_a_notebooks_console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["list", "help", "quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monarch.actor.debug()
    assert capsys.readouterr().out == f"no actor waits at a breakpoint\n{console.HELP}"


def test_from_another_terminal(tmp_path: Path) -> None:
    trainer = this_host().spawn_procs().spawn("trainer", Trainer)
    reply = trainer.step.call_one(3)
    desk().get(WAIT).wait.call_one(1).get(WAIT)
    assert os.getpid() in console.programs()
    command = ["-c", "from monarch.compiler.cli.hosts import main; main()", "debug", os.getpid()]
    typed = "list\nattach trainer\np loss\nloss = 50\ncontinue\n"
    done = python.run(*command, input=typed, capture_output=True, text=True, timeout=60, check=True)
    assert "trainer 0" in done.stdout and "trainer 0> 6\n" in done.stdout and "trainer 0 continued\n" in done.stdout
    assert reply.get(WAIT) == 51


def test_there_is_nothing_to_attach_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MonarchError, match="process 1 has no actors"):
        console.connect(1)
    monkeypatch.setattr(console, "programs", list)
    with pytest.raises(MonarchError, match="no program here"):
        console.connect()
    monkeypatch.setattr(console, "programs", lambda: [3, 4])
    with pytest.raises(MonarchError, match="several programs can be debugged: 3, 4"):
        console.connect()
