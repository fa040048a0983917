"""The model of a plan as its modules, where blocks that are alike and follow one another are one: `blocks` ×14."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from monarch.compiler.inspect.values import computed, further_results, kind_of, local_bytes, report_of
from monarch.compiler.plan import Plan
from monarch.compiler.plan.report import ReportedValue


@dataclass(frozen=True)
class Block:
    """A module, or several alike.

    `name`           "attention"; of several "blocks"
    `path`           the path of the (first) module: "blocks.0"; "" for what belongs to no module
    `times`          how many modules it stands for
    `ops` …          what a step of a worker costs in all of them together: ops, operations, estimated seconds of
                     computing and of collectives, bytes sent, and bytes of weights that a worker holds
    `parts`          the modules inside, each summed up over all of these blocks
    """

    name: str
    path: str
    times: int
    ops: int
    flops: float
    computing: float
    communicating: float
    sent: int
    weights: int
    parts: tuple[Block, ...]


_NOTHING: dict[str, Any] = {
    "ops": 0, "flops": 0.0, "computing": 0.0, "communicating": 0.0, "sent": 0, "weights": 0,
}  # fmt: skip
"""No costs, by the names of a `Block`'s fields."""
_OF_VALUES = ("flops", "computing", "communicating", "sent")
"""Those that each value of a report has."""


@dataclass
class _Module:
    name: str
    path: str
    times: int = 1
    first: int = -1
    costs: Counter[str] = field(default_factory=lambda: Counter(_NOTHING))
    inner: dict[str, _Module] = field(default_factory=dict)
    own: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The parameters and the forward's ops that are the module's own, by which modules are known to be alike."""


def blocks_of(plan: Plan) -> tuple[Block, ...]:
    """The outermost modules in the order in which they compute. Raises MonarchError for a plan without a report."""
    root = _Module("", "")
    values = computed(plan)
    again = further_results(plan, values)
    for number, value in enumerate(values):
        way = _way(root, value.module)
        for module in way:
            module.costs.update({name: getattr(value, name) for name in _OF_VALUES}, ops=number not in again)
            if module.first < 0:
                module.first = number
        if value.phase == "forward" and value.flops:
            way[-1].own[value.op, ""] += 1
    for value in report_of(plan).values:
        if value.op == "state" and (type_ := value.types[0]) is not None and _is_weight(value):
            way = _way(root, value.module)
            for module in way:
                module.costs["weights"] += local_bytes(type_, plan.mesh)
            way[-1].own["state", str(type_)] += 1
    found = [_block(each) for each in _merged(root)]
    rest = replace(root, name="(no module)", inner={})
    for each in root.inner.values():
        rest.costs.subtract(each.costs)
    return (*found, _block(rest)) if rest.costs["ops"] > 0 else tuple(found)


def _is_weight(value: ReportedValue) -> bool:
    return kind_of(value.call.partition(" ")[2].strip('"')) == "weights"


def _way(root: _Module, path: str) -> list[_Module]:
    """The modules from the root to the one of this path, which are made where there are none yet."""
    way = [root]
    parts = path.split(".") if path else []
    for at, part in enumerate(parts):
        below = way[-1].inner
        way.append(below.setdefault(part, _Module(part, ".".join(parts[: at + 1]))))
    return way


def _merged(module: _Module) -> list[_Module]:
    """The modules inside in order, those alike that follow one another as one."""
    found: list[_Module] = []
    for each in sorted(module.inner.values(), key=lambda each: each.first if each.first >= 0 else 1 << 62):
        if found and each.name.isdigit() and _alike(found[-1]) == _alike(each):
            found[-1] = _together(found[-1], each)
        else:
            found.append(each)
    return found


def _alike(module: _Module) -> object:
    """The key of modules that are alike: their parameters, and the ops of their forward."""
    inner = tuple((name, _alike(each)) for name, each in sorted(module.inner.items()))
    return tuple(sorted((key, number // module.times) for key, number in module.own.items())), inner


def _together(one: _Module, other: _Module) -> _Module:
    inner = {name: _together(each, other.inner[name]) for name, each in one.inner.items()}
    costs: dict[str, Any] = {name: cost + other.costs[name] for name, cost in one.costs.items()}
    return replace(one, times=one.times + other.times, costs=Counter(costs), inner=inner, own=one.own + other.own)


def _block(module: _Module, outer: int = 1) -> Block:
    """`outer` is for how many modules the one around it stands."""
    inner = _merged(module)
    if len(inner) == 1 and inner[0].times > module.times and inner[0].costs["ops"] == module.costs["ops"]:
        return _block(replace(inner[0], name=module.name), outer)  # `blocks` holds nothing but its blocks
    parts = tuple(_block(each, module.times) for each in inner)
    return Block(module.name, module.path, module.times // outer, parts=parts, **module.costs)
