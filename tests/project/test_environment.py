"""Tests pass whatever the environment of whoever runs them asks for (tests/conftest.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import python

ROOT = Path(__file__).parents[2]
ASKED = {
    "COLUMNS": "50",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "MONARCH_LOG": "plan",
    "SHELL": "/bin/nosuch",
    "http_proxy": "http://127.0.0.1:9",
}


def test_tests_have_none_of_what_their_caller_asks_of_programs() -> None:
    program = "import json, os, tests.conftest; print(json.dumps(dict(os.environ)))"
    path = os.pathsep.join([str(ROOT / ".src"), str(ROOT)])
    given = {**os.environ, **ASKED, "PYTHONPATH": path}
    done = python.run("-c", program, env=given, capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout)
    assert not ASKED.keys() & found.keys() and found["PATH"] == os.environ["PATH"]
