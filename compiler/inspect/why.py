"""Why a value has its layout, and why there is a collective: a plan's report, followed back to the user's layouts."""

from __future__ import annotations

import difflib
import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.values import call_of, kernel_of
from monarch.compiler.plan.report import LAYOUT_LINE, Decision, Report, ReportedValue

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan

ROOTS = 3
"""How many things that the user said a chain leads back to at most: the nearest ones."""
SHOWN = 8
"""Values of a chain that the text shows on one way, before it leaves out those in the middle."""


@dataclass(frozen=True)
class Cause:
    """One step of a chain. `decision` is why the value has its placement on the chain's mesh dim; `causes` are the
    values that led to it, and () where the user's layout did (or the chain goes no further)."""

    value: int
    name: str
    type: str
    decision: Decision
    source: Source | None
    line: str
    causes: tuple[Cause, ...] = ()

    @property
    def said(self) -> bool:
        """Whether the user said it: an input's or a state's layout, or a layout() line, also where the value lay so
        before."""
        return (not self.decision.rule and not self.decision.causes) or LAYOUT_LINE in self.decision.why


@dataclass(frozen=True)
class Moved:
    """One tensor that a collective moves: `value` is the one whose it is, `takers` are those that read the result;
    chains say why each has its layout on the collective's mesh dims."""

    value: int
    before: str
    after: str
    why: str
    value_chains: tuple[Cause, ...]
    takers: tuple[int, ...]
    taker_chains: tuple[Cause, ...]


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    `value`   the number of the value in the plan's report, `name` its name, `call` and `type` as in the graph's text
    `source`  the user's line, and `line` its text ("" where it is not known)
    `chains`  for a value: one for each mesh dim
    `moved`   for a collective (and what else the compiler added): the tensors that it moves
    `kernel`  for a generated kernel, its text
    `why`     for what is recomputed to save memory, what that saves
    `others`  further values that the name stands for: a traced value may have become several
    """

    value: int
    name: str
    call: str
    type: str
    module: str
    source: Source | None
    line: str
    chains: tuple[Cause, ...]
    moved: tuple[Moved, ...] = ()
    mesh_dims: tuple[str, ...] = ()
    sent: int = 0
    seconds: float = 0.0
    others: tuple[str, ...] = ()
    kernel: str = ""
    why: str = ""

    def __str__(self) -> str:
        return "\n".join(_text(self))


def explain(plan: Plan, name: str) -> Explanation:
    """Why the value `name` has its layout, or exists.

    `name` is a value's as in the graph's text (with or without %), a state's label, or a value's of the traced graph.
    Raises MonarchError, with near names, where the plan has no such value, and where it has no report.
    """
    if plan.report is None:
        raise MonarchError(
            f"plan '{plan.name}' has no report: it does not know why",
            hint="compile it with program.compile() or monarchc compile.",
        )
    return _Explainer(plan, plan.report).explain(name)


def named(report: Report, name: str) -> list[int]:
    """The values that a name stands for, by number: those of that name, else an input's or state's label, else those
    that a value of the traced graph has become; [] for none."""
    values = report.values
    own = [number for number, value in enumerate(values) if value.name == name]
    if own:
        return own
    for kind in ("state", "input", "constant", "scalar"):
        found = [number for number, value in enumerate(values) if value.op == kind and label_of(value) == name]
        if found:
            return found
    return [number for number, value in enumerate(values) if name and value.traced == name]


def near(report: Report, wanted: str, others: Iterable[str] = ()) -> str:
    """A hint: which names of values, of states, or of `others`, are near."""
    states = (label_of(value) for value in report.values if value.op == "state")
    known = dict.fromkeys([*(value.name for value in report.values), *states, *others])
    close = difflib.get_close_matches(wanted, known, n=3) or [name for name in known if wanted and wanted in name][:3]
    return f"did you mean {' or '.join(close)}?" if close else "the plan's graph names its values: --text."


class _Explainer:
    def __init__(self, plan: Plan, report: Report) -> None:
        self.plan = plan
        self.report = report
        self.values = report.values
        self.readers: list[list[int]] = [[] for _ in self.values]
        for number, value in enumerate(self.values):
            for read in value.reads:
                self.readers[read].append(number)
        for number, value in enumerate(self.values):
            if value.op == "wait" and value.reads:
                self.readers[value.reads[0]] += self.readers[number]

    def explain(self, name: str) -> Explanation:
        first, *others = self.find(name.strip().removeprefix("%"))
        value = self.values[first]
        source, line = self.source(value)
        dims = [decision.mesh_dim for decision in value.decisions]
        chains = tuple(chain for dim in dims if (chain := self.chain(first, dim)) is not None)
        moved: tuple[Moved, ...] = ()
        collective, at = self.collective(first)
        mover = self.values[collective]
        kernel = kernel_of(self.plan, value)
        if is_added(value) and not kernel:
            which = range(len(mover.types)) if at is None else (at,)
            moved = tuple(each for index in which if (each := self.moved(collective, index)) is not None)
        return Explanation(
            value=first,
            name=value.name,
            call=call_of(self.plan, value),
            type=_type(value),
            module=value.module,
            source=source,
            line=line,
            chains=chains,
            moved=moved,
            mesh_dims=mover.mesh_dims,
            sent=mover.sent,
            seconds=mover.seconds,
            others=tuple(self.values[other].name for other in others),
            kernel=kernel,
            why="" if moved else value.why,
        )

    def find(self, wanted: str) -> list[int]:
        if found := named(self.report, wanted):
            return found
        raise MonarchError(f"plan '{self.plan.name}' has no value {wanted[:80]!r}", hint=near(self.report, wanted))

    # -- chains ----------------------------------------------------------------------------------------------------

    def chain(self, number: int, mesh_dim: str) -> Cause | None:
        """A value's decision on a mesh dim and the shortest ways from it to the user's layouts."""
        if self.decision(number, mesh_dim) is None:
            return None
        came: dict[int, int] = {number: number}
        queue = deque([number])
        roots: list[int] = []
        while queue and len(roots) < ROOTS:
            at = queue.popleft()
            decision = self.decision(at, mesh_dim)
            causes = decision.causes if decision is not None else ()
            if not causes and at != number and decision is not None:
                roots.append(at)
            for cause in causes:
                if cause not in came:
                    came[cause] = at
                    queue.append(cause)
        children: dict[int, list[int]] = {}
        placed: set[int] = {number}
        for root in roots:
            at = root
            while at not in placed:
                placed.add(at)
                children.setdefault(came[at], []).append(at)
                at = came[at]
        return self.tree(number, mesh_dim, children)

    def tree(self, number: int, mesh_dim: str, children: dict[int, list[int]]) -> Cause:
        # From the leaves up, for a chain may be longer than Python nests calls.
        order = [number]
        for at in order:
            order += children.get(at, ())
        made: dict[int, Cause] = {}
        for at in reversed(order):
            value = self.values[at]
            source, line = self.source(value)
            decision = self.decision(at, mesh_dim) or Decision(mesh_dim, "", "", "the compiler added it")
            below = tuple(made[child] for child in children.get(at, ()))
            made[at] = Cause(at, value.name, _type(value), decision, source, line, below)
        return made[number]

    def decision(self, number: int, mesh_dim: str) -> Decision | None:
        return next((each for each in self.values[number].decisions if each.mesh_dim == mesh_dim), None)

    def source(self, value: ReportedValue) -> tuple[Source | None, str]:
        if value.source < 0:
            return None, ""
        return self.plan.sources[value.source], self.report.lines[value.source].strip()

    # -- collectives -----------------------------------------------------------------------------------------------

    def collective(self, number: int) -> tuple[int, int | None]:
        """The collective that a value is, or is one result of, and which; for another value, itself."""
        value = self.values[number]
        if (index := _element(value)) is not None and len(value.reads) == 1:
            at = self.producer(value)
            if self.values[at].mesh_dims and index < len(self.values[at].types):
                return at, index
        return number, None if value.mesh_dims else 0

    def producer(self, value: ReportedValue) -> int:
        """The calls that make the values of which `value` is one: a collective also where its result is waited for."""
        made = self.values[value.reads[0]]
        return made.reads[0] if made.op == "wait" and made.reads else value.reads[0]

    def moved(self, collective: int, index: int) -> Moved | None:
        mover = self.values[collective]
        if mover.mesh_dims:
            results = [at for at in self.readers[collective] if _element(self.values[at]) == index]
            operand = mover.reads[index] if len(mover.reads) == len(mover.types) else None
        else:
            results, operand = [collective], mover.reads[0] if mover.reads else None
        if operand is None:
            return None
        source = self.origin(operand)
        takers = tuple(dict.fromkeys(taker for result in results for taker in self.takers(result)))
        why = next((self.values[result].why for result in results if self.values[result].why), mover.why)
        dims = mover.mesh_dims or tuple(d.mesh_dim for d in self.values[source].decisions)
        after = mover.types[index] if index < len(mover.types) else None
        return Moved(
            value=source,
            before=_type(self.values[operand]),
            after="none" if after is None else str(after),
            why=why,
            value_chains=self.chains([source], dims),
            takers=takers,
            taker_chains=self.chains(takers[:1], dims),
        )

    def chains(self, numbers: Iterable[int], dims: Iterable[str]) -> tuple[Cause, ...]:
        found = (self.chain(number, dim) for number in numbers for dim in dims)
        return tuple(chain for chain in found if chain is not None)

    def origin(self, number: int) -> int:
        """The program's own value behind one that the compiler made of it."""
        while is_added(self.values[number]) and self.values[number].reads:
            value = self.values[number]
            producer = self.values[self.producer(value)]
            index = _element(value)
            if index is not None and producer.mesh_dims and index < len(producer.reads) == len(producer.types):
                number = producer.reads[index]
            else:
                number = value.reads[0]
        return number

    def takers(self, number: int) -> list[int]:
        """The program's own values that read a value of the compiler's."""
        found: list[int] = []
        waiting, seen = deque(self.readers[number]), set(self.readers[number])
        while waiting:
            at = waiting.popleft()
            if not is_added(self.values[at]):
                found.append(at)
                continue
            more = [each for each in self.readers[at] if each not in seen]
            seen.update(more)
            waiting.extend(more)
        return sorted(found)


def is_added(value: ReportedValue) -> bool:
    """Whether the compiler added a value: it is neither an input nor in the traced graph."""
    return value.instruction >= 0 and not value.traced


_ELEMENT = re.compile(r"getitem\(%\w+, (\d{1,9})\)", re.ASCII)


def _element(value: ReportedValue) -> int | None:
    match = _ELEMENT.fullmatch(value.call) if value.op == "getitem" else None
    return int(match[1]) if match else None


def label_of(value: ReportedValue) -> str:
    """A placeholder's label: `fc.weight` of `state "fc.weight"`."""
    text = value.call.removeprefix(value.op).strip()
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _type(value: ReportedValue) -> str:
    types = ["none" if each is None else str(each) for each in value.types]
    return types[0] if len(types) == 1 and not value.mesh_dims else f"({', '.join(types)})"


# -- as text -----------------------------------------------------------------------------------------------------------


def _text(found: Explanation) -> list[str]:
    lines = [f"%{found.name} = {found.call} : {found.type}"]
    lines += _where(found.source, found.line, "  ")
    if found.module:
        lines.append(f"  in {found.module}")
    if found.why:
        lines.append(f"  {found.why}")
    if found.others:
        lines.append(f"  the traced value became others too: {', '.join(f'%{other}' for other in found.others[:8])}")
    if found.kernel:
        lines += ["", *(f"  {line}" for line in found.kernel.splitlines())]
    if found.mesh_dims:
        lines.append(f"  a worker sends {found.sent:,} bytes over {', '.join(map(repr, found.mesh_dims))}")
    for moved in found.moved:
        lines.append("")
        lines.append(f"  {moved.why or 'the compiler added it'}")
        lines.append(f"    from {moved.before} to {moved.after}")
        if len(found.moved) > 2:
            continue
        for chain in moved.value_chains:
            lines += _chain(chain, "    ", f"%{chain.name} on '{chain.decision.mesh_dim}'")
        for chain in moved.taker_chains:
            title = f"%{chain.name}, which reads it, on '{chain.decision.mesh_dim}'"
            lines += _chain(chain, "    ", title, apart_from=moved.value)
        if len(moved.takers) > 1:
            lines.append(f"    and {len(moved.takers) - 1} more read it")
    if len(found.moved) > 2:
        lines += ["", f"  {len(found.moved)} tensors travel together: name one result for its full explanation"]
    for chain in found.chains:
        lines.append("")
        lines += _chain(chain, "  ", f"on '{chain.decision.mesh_dim}'")
    return lines


def _chain(chain: Cause, lead: str, title: str, apart_from: int = -1) -> list[str]:
    decision = chain.decision
    lines = [f"{lead}{title}: {decision.why}"]
    if decision.rule:
        lines.append(f"{lead}  rule {decision.rule}" + (f", factor {decision.factor}" if decision.factor else ""))
    if len(decision.alternatives) > 1 or (decision.alternatives and decision.rule):
        exact = "" if decision.exact else " (not known to be the best)"
        for number, alternative in enumerate(decision.alternatives):
            cost = f"chosen{exact}" if not number else f"{alternative.extra:+,.0f} bytes"
            lines.append(f"{lead}  {'*' if not number else ' '} {alternative.text}  {cost}")
    for cause in chain.causes:
        if cause.value != apart_from:
            lines += _because(cause, lead + "  ")
    return lines


def _because(cause: Cause, lead: str) -> list[str]:
    """A way back, one value a line, "and that" one from the one above it; forks are indented."""
    way = [cause]
    while len(way[-1].causes) == 1:
        way.append(way[-1].causes[0])
    lines = []
    for number, step in enumerate(way):
        if len(way) > SHOWN and SHOWN // 2 <= number < len(way) - SHOWN // 2:
            if number == SHOWN // 2:
                lines.append(f"{lead}  ... and so on, through {len(way) - 2 * (SHOWN // 2)} values more ...")
            continue
        where = f"  # {step.source}" if step.source else ""
        lines.append(f"{lead}{'and that ' if number else ''}because %{step.name} : {step.type}{where}")
        if step.said or number == len(way) - 1:
            lines.append(f"{lead}  {step.decision.why}")
    for branch in way[-1].causes:
        lines += _because(branch, lead + "  ")
    return lines


def _where(source: Source | None, line: str, lead: str) -> list[str]:
    if source is None:
        return []
    return [f"{lead}{source}" + (f": {line}" if line else "")]
