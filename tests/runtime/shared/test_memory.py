"""Anonymous files."""

from __future__ import annotations

import os

import pytest

from monarch.runtime.shared.memory import new_file


def test_a_file_that_cannot_have_its_size_stays_not_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        new_file("test", -1)
    assert os.listdir("/proc/self/fd") == before
