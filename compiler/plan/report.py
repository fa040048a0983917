"""What the compiler knows of a plan beyond what a worker runs: the inspector's source.

A report has one ReportedValue for every input and every op of the partitioned graph, in the order in which a worker
meets them, so that a value's number is its place in the schedule. Bytes and seconds are those of one worker (all
workers run the same program on blocks of the same size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.compiler.errors import MonarchError

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.types import TensorType

PHASES = ("forward", "backward", "update")

LAYOUT_LINE = "layout() at "
"""How a decision's reason names a line of the user's: the line's place follows."""
FOUND_LINE = "the layouts found "
"""How it names layouts that a search has found: what they say follows."""


@dataclass(frozen=True)
class Alternative:
    """One way to run an op on one mesh dim.

    `text`   where operands and results lie on the mesh dim: `[@data, -], [-, -] -> [@data, -]`, and ` then [-, -]`
             where the result is resharded at once for all of its users
    `extra`  how much more the best whole program costs in which the op runs so, in bytes sent by a worker (compute and
             memory are counted in the same unit, see `partition/cost.py`); 0 for the one that was chosen
    """

    text: str
    extra: float


@dataclass(frozen=True)
class Decision:
    """How a value came to lie on one mesh dim.

    `rule`          the op's sharding rule, `m k, k n -> m n`; "" where the user said it (inputs, state, layout())
    `factor`        the factor of the rule that was sharded; "" for none
    `why`           one sentence: what decided
    `causes`        the values that led to it, by number: the operands that lay so already; () where the user said it
    `alternatives`  the chosen one first, then the others, cheapest first
    `exact`         whether the choice is known to be the cheapest for the whole graph
    """

    mesh_dim: str
    rule: str
    factor: str
    why: str
    causes: tuple[int, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    exact: bool = True


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind that a value runs in a step: `count` of them, of so many `tensors`; together, the bytes
    that a worker puts in (for all_gather: gets out) and the estimated seconds."""

    op: str
    mesh_dims: tuple[str, ...]
    count: int
    tensors: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class ReportedValue:
    """An input or an op.

    `name`         as the graph's text has it, without the percent sign
    `op`           "input", "state", "constant", "scalar" or "seed"; for ops as the graph's text has it: "aten.mm"
    `call`         the right side of its line in the graph's text: `aten.mm(%x, %w)`, `state "fc.weight"`
    `reads`        the values that it reads, by number, in order, each once
    `types`        the global type of each result (None for an output that the call does not make)
    `instruction`  its place among the plan's instructions; -1 for inputs
    `source`       the user's line, an index into `Plan.sources`; -1 for none
    `module`       the path of the module whose forward (or its backward) computed it: "blocks.0.attn"; for a state
                   that of the module that holds it, and for an optimizer's ops that of the state that they make; "" for
                   none
    `phase`        one of PHASES
    `stage`        of a pipeline, by number; -1 for none
    `traced`       the value of the traced graph that it stems from; "" where the compiler made it
    `why`          for a collective, and what else the compiler added: why it is there
    `decisions`    one for each mesh dim, in nesting order; () for what the compiler added
    `mesh_dims`    for a collective, the mesh dims that it runs over
    `sent`         the bytes that a worker puts into collectives (for all_gather: gets out)
    `flops`        floating-point operations of a worker
    `moved`        bytes that a worker reads and writes in its own memory
    `allocates`    bytes of memory that a worker takes for the results; 0 for views and in-place updates
    `frees`        bytes of memory that a worker gives back behind it
    `seconds`      the estimate for the plan's target
    `kernel`       the value whose generated kernel computes this one, by number; -1 where none does
    `within`       of a cond, while_loop or scan, the collectives that its branch or its rounds run

    Operations, bytes and seconds of a cond are those of its dearer branch, of a scan those of all its rounds, and of a
    while_loop those of one round, for their number is unknown.

    What a kernel keeps to itself stands right before it, with the kernel's instruction. What it gives to others stands
    behind it: `op` is the op that it was, and `call` takes it out of the kernel's results. Operations, bytes and
    seconds are with these, the memory is with the kernel.
    """

    name: str
    op: str
    call: str
    reads: tuple[int, ...]
    types: tuple[TensorType | None, ...]
    instruction: int = -1
    source: int = -1
    module: str = ""
    phase: str = "forward"
    traced: str = ""
    why: str = ""
    decisions: tuple[Decision, ...] = ()
    mesh_dims: tuple[str, ...] = ()
    sent: int = 0
    flops: float = 0.0
    moved: int = 0
    allocates: int = 0
    frees: int = 0
    seconds: float = 0.0
    kernel: int = -1
    within: tuple[Collectives, ...] = ()
    stage: int = -1

    @property
    def collectives(self) -> tuple[Collectives, ...]:
        """What it runs of collectives: itself, where it is one, or what is within it."""
        if not self.mesh_dims:
            return self.within
        return (Collectives(self.op, self.mesh_dims, 1, len(self.types), self.sent, self.seconds),)

    @property
    def communicating(self) -> float:
        """Its estimated seconds of collectives."""
        return self.seconds if self.mesh_dims else sum(each.seconds for each in self.within)

    @property
    def computing(self) -> float:
        """Its estimated seconds without those of collectives."""
        return max(0.0, self.seconds - self.communicating)


@dataclass(frozen=True)
class Report:
    """`values` in the order of the schedule; `lines` the text of the user's lines, as `Plan.sources` numbers them (""
    for one that could not be read when the plan was made)."""

    values: tuple[ReportedValue, ...]
    lines: tuple[str, ...]


def held(plan: Plan) -> list[int]:
    """The bytes that a worker holds after each value of the plan's report. Raises MonarchError where it has none."""
    total = 0
    found = []
    for value in _values(plan):
        total += value.allocates - value.frees
        found.append(total)
    return found


def peak(plan: Plan) -> tuple[int, int]:
    """The most bytes that a worker holds at once, and the number of the (first) value at which it does; (0, -1) for a
    plan without values. Raises MonarchError where the plan has no report."""
    total, most, at = 0, 0, -1
    for number, value in enumerate(_values(plan)):
        total += value.allocates
        if at < 0 or total > most:
            most, at = total, number
        total -= value.frees
    return most, at


def _values(plan: Plan) -> Sequence[ReportedValue]:
    if plan.report is None:
        raise MonarchError(
            f"plan '{plan.name}' has no report", hint="compile it with program.compile() or monarchc compile."
        )
    return plan.report.values
