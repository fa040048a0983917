"""`--why NAME`: why a value has its layout, or why there is a collective, back to the user's layouts; the collectives
of a line or of a module."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from monarch.compiler.cli.screen import line, plain
from monarch.compiler.inspect.places import explain_any

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan


def data(plan: Plan, name: str) -> dict[str, Any]:
    """The explanation, its chains as nested objects. Raises MonarchError where the plan has no such value."""
    return asdict(explain_any(plan, name))


def show(out: Console, plan: Plan, name: str) -> None:
    first, *rest = str(explain_any(plan, name)).splitlines()
    line(out, plain(first, "bold"))
    for text in rest:
        line(out, text)
