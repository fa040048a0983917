"""The differences of two plans, whatever the names of their values: `monarchc diff` prints them and the page shows
them.

Values are matched by their meaning to the user: the module, the phase, the op and the text of the user's line; among
those that agree in that, first the ones of equal types, then in the order of the schedule. A line that was edited is
matched by the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch.compiler.inspect.labels import input_names
from monarch.compiler.inspect.values import (
    collectives_of,
    computed,
    kernel_name,
    kernel_of,
    local_bytes,
    ops_of,
    report_of,
    types_text,
    where,
)
from monarch.compiler.plan import Plan, ReportedValue
from monarch.compiler.plan.report import peak

Key = tuple[str, ...]


@dataclass(frozen=True)
class Changed:
    """Values of one op, line and module that have other layouts now: their types `before` and `after`, the bytes that a
    worker sends for them in each plan, and their names in the second. `over` has a collective's mesh dims: "data"."""

    op: str
    over: str
    where: str
    module: str
    before: str
    after: str
    sent: tuple[int, int]
    values: tuple[str, ...]


@dataclass(frozen=True)
class OpChange:
    """Ops that only one of the plans has: `sign` is "-" for the first and "+" for the second, whose names `values` are.
    `over` has a collective's mesh dims, `bytes` what a worker sends."""

    sign: str
    op: str
    over: str
    where: str
    module: str
    why: str
    bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """`totals` name -> (before, after); `values` label -> (type before, type after) of inputs, state and results, ""
    where a plan has none; `collectives` "all_reduce over data" -> ((count, bytes) before, after); `kernels` name ->
    (calls before, after). All but `totals` hold what differs only."""

    totals: dict[str, tuple[float, float]]
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    collectives: dict[str, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)
    layouts: tuple[Changed, ...] = ()
    ops: tuple[OpChange, ...] = ()

    @property
    def any(self) -> bool:
        same = all(before == after for before, after in self.totals.values())
        return not same or any((self.settings, self.values, self.collectives, self.kernels, self.layouts, self.ops))


def differences(a: Plan, b: Plan) -> Differences:
    """The changes from plan `a` to plan `b`. Raises MonarchError where one has no report."""
    pairs_, only_a, only_b = match(a, b)
    return Differences(
        totals={name: (of(a), of(b)) for name, of in _TOTALS.items()},
        settings={name: (of(a), of(b)) for name, of in _SETTINGS.items() if of(a) != of(b)},
        values=_changed(_interface(a), _interface(b), ""),
        collectives=_changed(_collectives(a), _collectives(b), (0, 0)),
        kernels=_changed(_kernels(a), _kernels(b), 0),
        layouts=_layouts(b, pairs_),
        ops=(*_moved("-", a, only_a), *_moved("+", b, only_b)),
    )


def match(
    a: Plan, b: Plan
) -> tuple[list[tuple[ReportedValue, ReportedValue]], list[ReportedValue], list[ReportedValue]]:
    """The ops of two plans in pairs, and those that only one of them has."""
    rest_a, rest_b = ops_of(a), ops_of(b)
    found: list[tuple[ReportedValue, ReportedValue]] = []
    keys: list[Callable[[Plan, ReportedValue], Key]] = [
        lambda plan, value: (*_place(plan, value), _code(plan, value), types_text(value)),
        lambda plan, value: (*_place(plan, value), _code(plan, value)),
        lambda plan, value: (*_place(plan, value), types_text(value)),
        lambda plan, value: _place(plan, value),
    ]
    for key in keys:
        waiting: dict[Key, list[ReportedValue]] = defaultdict(list)
        for value in reversed(rest_b):
            waiting[key(b, value)].append(value)
        left = []
        for value in rest_a:
            if others := waiting[key(a, value)]:
                found.append((value, others.pop()))
            else:
                left.append(value)
        rest_a = left
        unmatched = {id(value) for others in waiting.values() for value in others}
        rest_b = [value for value in rest_b if id(value) in unmatched]
    return found, rest_a, rest_b


def _place(plan: Plan, value: ReportedValue) -> Key:
    return value.module, value.phase, _op(plan, value), _over(value)


def _op(plan: Plan, value: ReportedValue) -> str:
    text = kernel_of(plan, value)
    return f"kernel {kernel_name(text)}" if text else value.op


def _code(plan: Plan, value: ReportedValue) -> str:
    return report_of(plan).lines[value.source].strip() if value.source >= 0 else ""


def _over(value: ReportedValue) -> str:
    return ",".join(value.mesh_dims)


def _lie_alike(before: ReportedValue, after: ReportedValue) -> bool:
    """Whether results are of the same types. Of a kernel's values only its results are known."""
    few, many = sorted((before, after), key=lambda value: len(value.types))
    if (before.kernel < 0) != (after.kernel < 0) and len(few.types) < len(many.types):
        return set(few.types) <= set(many.types)
    return types_text(before) == types_text(after)


def _layouts(plan: Plan, pairs: Iterable[tuple[ReportedValue, ReportedValue]]) -> tuple[Changed, ...]:
    found: dict[tuple[str, str, str, str, str, str], list[tuple[ReportedValue, ReportedValue]]] = {}
    for before, after in pairs:
        if not _lie_alike(before, after):
            types = types_text(before), types_text(after)
            key = (_op(plan, after), _over(after), where(plan, after), after.module, *types)
            found.setdefault(key, []).append((before, after))
    return tuple(
        Changed(
            *key,
            sent=(sum(before.sent for before, _ in group), sum(after.sent for _, after in group)),
            values=tuple(after.name for _, after in group),
        )
        for key, group in found.items()
    )


def _moved(sign: str, plan: Plan, values: Iterable[ReportedValue]) -> list[OpChange]:
    found: dict[tuple[str, str, str, str], list[ReportedValue]] = {}
    for value in values:
        found.setdefault((_op(plan, value), _over(value), where(plan, value), value.module), []).append(value)
    made = [
        OpChange(sign, *key, group[0].why, sum(value.sent for value in group), tuple(value.name for value in group))
        for key, group in found.items()
    ]
    return sorted(made, key=lambda entry: -entry.bytes)


def _interface(plan: Plan) -> dict[str, str]:
    found = {}
    for name, spec in zip(input_names(plan), plan.inputs, strict=True):
        if spec.kind in ("input", "state"):
            found[f"{spec.kind} {name}"] = str(spec.type)
    for spec in plan.outputs:
        found.setdefault(f"{spec.kind} {spec.label}", str(spec.type))
    return found


def _collectives(plan: Plan) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for each in collectives_of(plan):
        name = f"{each.op} over {','.join(each.mesh_dims)}"
        number, sent = found.get(name, (0, 0))
        found[name] = (number + each.count, sent + each.sent)
    return found


def _kernels(plan: Plan) -> dict[str, int]:
    instructions = [i for i in plan.instructions if i.op not in ("getitem", "commit")]
    return dict(Counter(kernel_name(str(i.args[1])) if i.op == "kernel" else i.op for i in instructions))


def _changed(before: dict[str, Any], after: dict[str, Any], none: Any) -> dict[str, tuple[Any, Any]]:
    names = [*before, *(name for name in after if name not in before)]
    found = {name: (before.get(name, none), after.get(name, none)) for name in names}
    return {name: (was, now) for name, (was, now) in found.items() if was != now}


def _held(plan: Plan) -> float:
    return float(sum(local_bytes(s.type, plan.mesh) for s in plan.inputs if s.kind in ("input", "state")))


_TOTALS: dict[str, Callable[[Plan], float]] = {
    "ops": lambda plan: len(ops_of(plan)),
    "collectives": lambda plan: sum(each.count for each in collectives_of(plan)),
    "bytes sent": lambda plan: sum(each.sent for each in collectives_of(plan)),
    "inputs and state": _held,
    "peak memory": lambda plan: peak(plan)[0],
    "flops": lambda plan: sum(value.flops for value in computed(plan)),
    "estimated seconds": lambda plan: sum(value.seconds for value in computed(plan)),
}
UNITS = {
    "bytes sent": "bytes",
    "inputs and state": "bytes",
    "peak memory": "bytes",
    "flops": "flops",
    "estimated seconds": "seconds",
}
"""The names of the totals that are no plain counts."""
_SETTINGS: dict[str, Callable[[Plan], str]] = {
    "name": lambda plan: plan.name,
    "mesh": lambda plan: str(plan.mesh),
    "target": lambda plan: plan.target,
    "backend": lambda plan: plan.collectives,
    "default dtype": lambda plan: plan.options.dtype,
    "CUDA graphs": lambda plan: "yes" if plan.cuda_graphs else "no",
}
