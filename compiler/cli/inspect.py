"""`monarchc inspect`: a program's plan, looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from monarch.compiler.cli.look import is_program, no_program, seen_plan
from monarch.compiler.cli.options import LANGUAGES
from monarch.compiler.cli.screen import console, line, plain, print_json, size
from monarch.compiler.cli.sections import by as by_group
from monarch.compiler.cli.sections import comms, kernels, memory, overview
from monarch.compiler.cli.sections import why as of_value
from monarch.compiler.cli.sections import worker as of_worker
from monarch.compiler.cli.sections.dot import text as dot_text
from monarch.compiler.cli.sections.printing import Sections, Show, print_sections
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.survival import Survival
from monarch.compiler.loading import load
from monarch.compiler.plan.plan import Plan

SECTIONS = {
    "overview": overview,
    "kernels": kernels,
    "comms": comms,
    "memory": memory,
}


def inspect(
    plan: str,
    by: list[str] | None,
    sort: str | None,
    kernels: bool,
    comms: bool,
    memory: bool,
    survives: bool,
    hosts: int | None,
    part: str | None,
    worker: str | None,
    why: str | None,
    html: Path | None,
    trace: Path | None,
    against: Path | None,
    dot: bool,
    text: bool,
    after: str | None,
    emit: str | None,
    kernel: str | None,
    mesh: str | None,
    target: str | None,
    arg: list[str] | None,
    first_call: bool,
    memory_limit: str | None,
    as_json: bool,
) -> None:
    """Print the sections, texts and pages that are asked for; an overview where nothing is."""
    if html is None and (trace is not None or against is not None):
        raise MonarchError("--trace and --against are for the page", hint="say where to write it: --html page.html.")
    if emit is not None and emit not in LANGUAGES:
        raise MonarchError(f"--emit {emit!r}: it is one of {', '.join(LANGUAGES)}")
    if emit is None and kernel is not None:
        raise MonarchError("--kernel selects kernels for --emit", hint="name the language: --emit triton.")
    if hosts is not None and not survives:
        raise MonarchError("--hosts is the number of hosts for --survives", hint="ask for the losses: --survives.")
    if sort is not None and not by:
        raise MonarchError("--sort is for tables of costs", hint="say of what: --by line.")
    of_kernels = html is not None or emit is not None or after is not None  # which only torch reads
    read = _read(plan, mesh, target, arg, first_call, memory_limit, of_kernels)
    if part is not None:
        read = _part(read, part, after)
    elif read.parts:
        asked = {
            "--trace": trace,
            "--against": against,
            "--worker": worker,
            "--survives": survives or None,
            "--emit": emit,
            "--dot": dot or None,
        }
        for option in (name for name, given in asked.items() if given is not None):
            names = ", ".join(each.name for each in read.parts)
            raise MonarchError(
                f"{option} shows what one mesh runs, and '{read.name}' is of {names}",
                hint=f"say of which: --part {read.parts[0].name}.",
            )
    wanted = {"kernels": kernels, "comms": comms, "memory": memory}
    if html is not None:
        _write_page(read, html, trace, against)
    texts = dict(_texts(read, dot, text, after))
    if emit is not None:
        texts[emit] = load("monarch.compiler.cli.emitted:text")(read, emit, kernel)
    sections: Sections = {}
    for of, each in _each_part(read, why):
        own = dict(_tables(each, by or [], sort or "time"))
        own |= _sections(each, [name for name, on in wanted.items() if on], worker, why)
        sections |= {f"{of} {name}".strip(): (data, _headed(of, show)) for name, (data, show) in own.items()}
    if survives:
        outlook = Survival(read, 1 if hosts is None else hosts)
        sections["survives"] = outlook.data, lambda out: line(out, str(outlook))
    if not (html or texts or sections):
        sections = dict(_sections(read, ["overview"], None, None))
    if as_json:
        overview = sections.pop("overview", None)
        found = overview[0]() if overview else {"name": read.name, "hash": read.hash}
        found |= {name: data() for name, (data, _) in sections.items()} | texts
        print_json(found | ({"page": str(html)} if html else {}))
        return
    print_sections(sections, texts)


def _part(plan: Plan, name: str, after: str | None) -> Plan:
    """The part of a plan for one of its meshes, as a plan."""
    found = next((part.plan for part in plan.parts if part.name == name), None)
    if found is None:
        names = ", ".join(part.name for part in plan.parts)
        is_of = f"its parts are {names}." if plan.parts else "it is of one mesh: leave out --part."
        raise MonarchError(f"'{plan.name}' has no part '{name}'", hint=is_of)
    if after is not None:
        raise MonarchError("--after shows the graphs of all parts", hint="leave out --part.")
    return found


def _each_part(plan: Plan, why: str | None) -> Iterator[tuple[str, Plan]]:
    """The parts of a plan for its meshes, by name (a plan of one mesh under ""): where a value is asked for by its
    name, the parts that have it."""
    if not plan.parts:
        yield "", plan
        return
    failed: MonarchError | None = None
    shown = 0
    for part in plan.parts:
        try:
            if why is not None:
                of_value.data(part.plan, why)
        except MonarchError as error:
            failed = error
            continue
        shown += 1
        yield part.name, part.plan
    if not shown and failed is not None:
        raise failed


def _headed(name: str, show: Show) -> Show:
    """Prints a section below the name of its part."""
    if not name:
        return show

    def headed(out: Console) -> None:
        line(out, plain(name, "bold"))
        show(out)

    return headed


def _read(
    plan: str,
    mesh: str | None,
    target: str | None,
    arg: list[str] | None,
    first_call: bool,
    memory_limit: str | None,
    whole: bool,
) -> Plan:
    """The plan; `whole` with all that a worker needs."""
    if is_program(plan):
        made: Plan
        _, made = load("monarch.compiler.cli.compile:compiled")(plan, mesh, target, arg, first_call, memory_limit)
        file = plan.partition(":")[0]
        told = f"{file} was imported, and '{made.name}' traced without workers: nothing has run on a mesh"
        console(stderr=True).print(told, soft_wrap=True)
        return made
    if mesh is not None or arg or first_call or memory_limit is not None or target is not None:
        raise MonarchError(
            f"--mesh, --target, --arg, --first-call and --memory-limit are for programs, and {plan} is a plan",
            hint="a plan is compiled already; name the program instead: train.py:train_step.",
        )
    return _whole(no_program(Path(plan))) if whole else seen_plan(Path(plan))


def _whole(path: str | Path) -> Plan:
    return load("monarch.compiler.plan.file:load_plan")(path)


def _tables(plan: Plan, by: list[str], sort: str) -> Iterator[tuple[str, tuple[Callable[[], Any], Show]]]:
    """The tables of costs asked for, in the form of `_sections`."""
    for group in by:
        show = partial(by_group.show, plan=plan, by=group, sort=sort)
        yield f"by {group}", (partial(costs_by, plan, group, sort), show)


def _sections(
    plan: Plan, names: list[str], worker: str | None, why: str | None
) -> Iterator[tuple[str, tuple[Callable[[], Any], Show]]]:
    """The sections asked for: the JSON value of each, and the function that prints it."""
    for name in names:
        section = SECTIONS[name]
        yield name, (partial(section.data, plan), partial(section.show, plan=plan))
    if worker is not None:
        at = of_worker.read_worker(worker, plan.mesh)
        yield "worker", (lambda: of_worker.data(plan, at), lambda out: of_worker.show(out, plan, at))
    if why is not None:
        yield "why", (partial(of_value.data, plan, why), partial(of_value.show, plan=plan, name=why))


def _texts(plan: Plan, dot: bool, text: bool, after: str | None) -> Iterator[tuple[str, str]]:
    if text or after is not None:
        yield "text", plan.graph if after is None else graph_after(plan, after)
    if dot:
        yield "dot", dot_text(plan)


def graph_after(plan: Plan, name: str) -> str:
    """The graph's text after the pass `name`, from the traced graph that the plan holds; "trace" for that itself."""
    traced = load("monarch.compiler.report:traced_graph")(plan)
    if name == "trace":
        return plan.traced
    return str(load("monarch.compiler.pipeline:graph_after")(traced, name, plan.options))


def _write_page(plan: Plan, path: Path, trace: Path | None, against: Path | None) -> None:
    content = load("monarch.compiler.inspect.page:page")(
        plan,
        trace=load("monarch.compiler.inspect.trace:load_trace")(trace) if trace is not None else None,
        against=_whole(against) if against is not None else None,
    )
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise MonarchError(f"cannot write {path}: {error.strerror}", hint="give a path that can be written.") from None
    console(stderr=True).print(f"wrote {path}, {size(path.stat().st_size)}: open it in a browser", soft_wrap=True)
