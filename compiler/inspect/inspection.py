"""`Program.inspect(…)`: a compiled program to look at, in a notebook, in a terminal, or as a page."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.html import frame_html, size_text
from monarch.compiler.inspect.labels import schedule_text
from monarch.compiler.inspect.page import page
from monarch.compiler.inspect.places import PlaceExplanation, explain_any
from monarch.compiler.inspect.values import collectives_of, ops_of
from monarch.compiler.inspect.why import Explanation
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.report import Report, peak


class Inspection:
    """A program's plan for some arguments, to look at: `plan` has all of it.

    In a notebook it shows the inspector's page, in a terminal a summary. `save("page.html")` writes the page, which
    needs nothing else to be opened.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.report is None and not (plan.parts and all(part.plan.report for part in plan.parts)):
            raise MonarchError(
                f"plan '{plan.name}' has no report", hint="compile it with program.compile() or monarchc compile."
            )
        self.plan = plan

    @property
    def report(self) -> Report:
        """The compiler's report on the plan: each value with its cause and its cost. Raises MonarchError for a program
        of several meshes, each of whose parts has its own."""
        if self.plan.report is None:
            raise MonarchError(
                f"'{self.plan.name}' is of several meshes, and has a report for each",
                hint="they are in plan.parts: plan.parts[0].plan.report.",
            )
        return self.plan.report

    def html(self) -> str:
        """The inspector's page, whole."""
        return page(self.plan)

    def save(self, path: str | Path) -> None:
        """Write the page to a file. Raises MonarchError where it cannot be written."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise MonarchError(f"cannot write {path}: {error.strerror}") from error

    def explain(self, name: str) -> Explanation | PlaceExplanation:
        """Why a value has its layout, or why there is a collective: the chain of causes. `name` is a value's or a
        state's; or a line, "train.py:58", or a module, "layers.0.mlp", for all of its collectives. Raises MonarchError,
        with near names, where there is none. In a program of several meshes the first that has it answers."""
        *others, last = [part.plan for part in self.plan.parts] or [self.plan]
        for plan in others:
            with suppress(MonarchError):
                return explain_any(plan, name)
        return explain_any(last, name)

    def _repr_html_(self) -> str:
        return frame_html(self.html(), f"{self.plan.name} on {self.plan.mesh}")

    def __repr__(self) -> str:
        if self.plan.parts:
            each = [repr(Inspection(part.plan)).rsplit("\n", 1)[0] for part in self.plan.parts]
            schedule = schedule_text(self.plan.costs.get("schedule"))
            return "\n".join([str(self.plan), *([f"  {schedule}"] if schedule else []), *each])
        plan = self.plan
        workers = "1 worker" if plan.mesh.workers == 1 else f"{plan.mesh.workers:,} workers"
        collectives = collectives_of(plan)
        over: Counter[str] = Counter()
        for one in collectives:
            over[" and ".join(one.mesh_dims)] += one.count
        total = sum(over.values())
        counted = ", ".join(f"{many:,} over {dims}" for dims, many in over.most_common())
        lines = [
            f"{plan.name} on {plan.mesh}: {workers}, for {plan.made_for}",
            f"  {len(ops_of(plan)):,} ops, {total:,} collective{'s' * (total != 1)}"
            + (f" ({counted})" if counted else ""),
            f"  a worker sends {size_text(sum(each.sent for each in collectives))} a step, "
            f"and holds {size_text(peak(plan)[0])} at most",
            '  .save("page.html") writes the inspector\'s page; .explain("name") says why a value has its layout',
        ]
        return "\n".join(lines)
