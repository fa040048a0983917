"""What tests of programs share."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that are traced."""
    found: list[str] = []
    module = sys.modules["monarch.language.programs.program"]
    real = module.trace

    def trace(call: Any, *rest: Any) -> Any:
        found.append(call.name)
        return real(call, *rest)

    monkeypatch.setattr(module, "trace", trace)
    return found
