"""Folders for keys are closed to others, and go with who made them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.runtime.hosts.launch.folder import private_folder, remove_abandoned

MAKE = """
import os, signal
from monarch.runtime.hosts.launch.folder import private_folder
with private_folder() as folder:
    (folder / "key.pem").write_text("secret")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def abandoned() -> Path:
    """A folder whose maker was killed."""
    made = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=60)
    assert made.returncode == -signal.SIGKILL, made.stderr
    folder = Path(made.stdout.strip())
    assert (folder / "key.pem").exists()
    return folder


def test_a_folder_is_this_users_and_goes_in_the_end() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "key.pem").write_text("secret")
    assert not folder.exists()


def test_what_a_killed_process_left_goes_when_the_next_folder_is_made() -> None:
    folder = abandoned()
    with private_folder():
        assert not folder.exists()


def test_what_is_in_use_stays() -> None:
    with private_folder() as one, private_folder() as two:
        remove_abandoned()
        assert one.exists() and two.exists()


def test_nothing_is_removed_through_a_link_and_nothing_that_was_never_locked(tmp_path: Path) -> None:
    folder = abandoned()
    moved = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(moved)
    (new := tmp_path / f"{folder.name}-new").mkdir()
    remove_abandoned()
    assert (moved / "key.pem").exists() and new.exists()
