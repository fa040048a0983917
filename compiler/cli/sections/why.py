"""`--why VALUE`: why a value lies as it does, or a collective is there, back to what the user said."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import line, plain
from monarch.compiler.inspect.why import explain
from monarch.compiler.plan import Plan


def data(plan: Plan, name: str) -> dict[str, Any]:
    """The explanation, its chains as nested objects. Raises MonarchError where the plan has no such value."""
    return asdict(explain(plan, name))


def show(out: Console, plan: Plan, name: str) -> None:
    first, *rest = str(explain(plan, name)).splitlines()
    line(out, plain(first, "bold"))
    for text in rest:
        line(out, text)
