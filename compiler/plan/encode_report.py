"""Reports as JSON values; `decode_report` has the way back.

    {"strings": […], "types": […], "alternatives": [[[text, extra], …], …], "decisions": [[…], …], "values": [[…], …],
     "lines": […]}

The ops of a model's layers are alike, so what they share stands there once: strings, types, lists of alternatives and
decisions are named by their numbers. Rows are in the order of the fields of Decision and Value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from monarch.compiler.plan.encode import encode_type
from monarch.compiler.plan.report import PHASES, Decision, Report


class _Table:
    """Entries by number, each once."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._encode = encode

    def number(self, entry: Any) -> int:
        found = self._numbers.get(entry)
        if found is None:
            row = self._encode(entry)
            found = self._numbers[entry] = len(self.rows)
            self.rows.append(row)
        return found


def encode_report(report: Report) -> dict[str, Any]:
    """A report as a JSON value, the same for the same report."""
    strings = _Table(lambda text: text)
    types = _Table(encode_type)
    alternatives = _Table(lambda several: [[strings.number(each.text), each.extra] for each in several])

    def decision(each: Decision) -> list[Any]:
        words = [strings.number(text) for text in (each.mesh_dim, each.rule, each.factor, each.why)]
        return [*words, list(each.causes), alternatives.number(each.alternatives), each.exact]

    decisions = _Table(decision)
    values = [
        [
            strings.number(value.name),
            strings.number(value.op),
            strings.number(value.call),
            list(value.reads),
            [None if each is None else types.number(each) for each in value.types],
            value.instruction,
            value.source,
            strings.number(value.module),
            PHASES.index(value.phase),
            strings.number(value.traced),
            strings.number(value.why),
            [decisions.number(each) for each in value.decisions],
            [strings.number(each) for each in value.mesh_dims],
            value.sent,
            value.flops,
            value.moved,
            value.allocates,
            value.frees,
            value.seconds,
            value.kernel,
            [
                [
                    strings.number(each.op),
                    [strings.number(name) for name in each.mesh_dims],
                    each.count,
                    each.tensors,
                    each.sent,
                    each.seconds,
                ]
                for each in value.within
            ],
            value.stage,
        ]
        for value in report.values
    ]
    return {
        "strings": strings.rows,
        "types": types.rows,
        "alternatives": alternatives.rows,
        "decisions": decisions.rows,
        "values": values,
        "lines": list(report.lines),
    }
