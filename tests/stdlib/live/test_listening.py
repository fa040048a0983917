"""Programs are found and asked by processes of their own user, and by nobody else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError
from monarch.stdlib.live import listening


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sockets, for a test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("monarch.stdlib.live.listening.os.access", lambda *_: False)
    return tmp_path / f"monarch-{os.geteuid()}"


def test_a_program_that_listens_is_found_and_answers(folder: Path) -> None:
    path = listening.listen({"snapshot": lambda: {"steps": 3}, "stacks": lambda: {"program": "here"}})
    assert path.parent == folder and folder.stat().st_mode & 0o777 == 0o700
    assert listening.programs() == [os.getpid()]
    assert listening.choose(None) == listening.choose(os.getpid()) == os.getpid()
    assert listening.ask(os.getpid(), "snapshot") == {"steps": 3}
    assert listening.ask(os.getpid(), "stacks") == {"program": "here"}
    with pytest.raises(MonarchError, match="does not answer"):
        listening.ask(os.getpid(), "__class__")


def test_what_a_killed_program_left_is_removed(folder: Path) -> None:
    listening.folder()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "4711.sock"))
    assert listening.programs() == []
    assert list(folder.iterdir()) == []
    with pytest.raises(MonarchError, match="4711 does not answer"):
        listening.ask(4711, "snapshot")


def test_nobody_is_answered_but_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "is_ours", lambda connection: False)
    listening.listen({"snapshot": lambda: {"secret": 1}})
    with pytest.raises(MonarchError, match="does not answer"):
        listening.ask(os.getpid(), "snapshot")


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    with pytest.raises(MonarchError, match="others may enter"):
        listening.listen({})
    folder.rmdir()
    folder.symlink_to("/")
    with pytest.raises(MonarchError, match="others may enter"):
        listening.programs()


def test_which_program_is_meant_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MonarchError, match=r"(?s)no program of yours.*monarch\.dashboard\(\).*MONARCH_LIVE=1"):
        listening.choose(None)
    monkeypatch.setattr(listening, "programs", lambda: [3, 5])
    with pytest.raises(MonarchError, match="several programs can be seen: 3, 5"):
        listening.choose(None)
    with pytest.raises(MonarchError, match="process 4 cannot be seen; those that can: 3, 5"):
        listening.choose(4)
    assert listening.choose(5) == 5
