"""`monarchc compile`: a program of a Python file to a plan's file, without workers and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from monarch.compiler.cli.fits import verdict
from monarch.compiler.cli.load import LoadedProgram, load_program
from monarch.compiler.cli.screen import console, count, duration, heading, line, pairs, plain, print_json, size, table
from monarch.compiler.cli.values import read_mesh, read_pairs
from monarch.compiler.cost.cluster import Cluster, load_cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.inspect.values import ops_of
from monarch.compiler.plan import Plan, check_target
from monarch.compiler.plan.file import save_plan
from monarch.compiler.sizes import parse_bytes

Progress = Callable[[str, float, Graph], None]


def compile_(
    program: str,
    output: Path | None,
    mesh: str | None,
    target: str | None,
    arg: list[str] | None,
    first_call: bool,
    memory_limit: str | None,
    machine: str | None,
    strict: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Write the plan of a program, and print a summary of it, and whether it fits a machine."""
    cluster = None if machine is None else load_cluster(machine)
    if cluster is not None and target not in (None, cluster.target):
        raise MonarchError(
            f"--target {target}, and {cluster.name} is for {cluster.target}", hint="leave one of the two out."
        )
    target = target if cluster is None else cluster.target
    loaded, plan = compiled(program, mesh, target, arg, first_call, memory_limit, strict, verbose, cluster)
    path = output or Path(f"{plan.name}.mplan")
    save_plan(plan, path)
    words = [] if cluster is None else list(verdict(loaded, plan, cluster))
    if as_json:
        print_json(summary(plan, path) | ({} if cluster is None else {"machine": cluster.name, "verdict": words}))
    else:
        _show(console(), plan, path, words)


def compiled(
    program: str,
    mesh: str | None,
    target: str | None,
    arg: list[str] | None,
    first_call: bool,
    memory_limit: str | None,
    strict: bool = False,
    verbose: bool = False,
    cluster: Cluster | None = None,
) -> tuple[LoadedProgram, Plan]:
    """A program in a file, and its plan with its report: `compile` writes it and `inspect` shows it."""
    sizes, given = read_mesh(mesh), read_pairs(arg, "--arg")
    limit = None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit")
    with passes_shown(verbose) as (say, progress):
        if target is not None:
            check_target(target)
        say(f"tracing {program}")
        loaded = load_program(program, sizes, given, first_call, limit)
        return loaded, loaded.compile(target, progress, strict=strict, cluster=cluster)


@contextmanager
def passes_shown(verbose: bool) -> Iterator[tuple[Callable[[str], None], Progress]]:
    """Reports progress on standard error, and the passes that are done: with `verbose` a line each, else, on a
    terminal, one line that changes."""
    out = console(stderr=True)

    def told(name: str, seconds: float, graph: Graph) -> None:
        out.print(f"{name:<24} {duration(seconds):>8}  {sum(1 for _ in graph.calls):>6,} ops", soft_wrap=True)

    if verbose:
        yield lambda text: None, told
    elif not out.is_terminal:
        yield lambda text: None, lambda name, seconds, graph: None
    else:
        with out.status("starting") as status:
            yield (
                lambda text: status.update(plain(f"{text} …")),
                lambda name, seconds, graph: status.update(plain(f"{name} done in {duration(seconds)} …")),
            )


def summary(plan: Plan, path: Path) -> dict[str, Any]:
    """Bytes, seconds, and numbers of ops and collectives, as a JSON value."""
    return {
        "name": plan.name,
        "hash": plan.hash,
        "mesh": dict(plan.mesh.dims),
        "workers": plan.mesh.workers,
        **({} if plan.sizes is None else {"sizes": dict(plan.sizes["names"])}),
        "target": plan.target,
        "backend": plan.collectives,
        "ops": sum(len(ops_of(part.plan)) for part in plan.parts) if plan.parts else len(ops_of(plan)),
        "instructions": len(plan.instructions) + sum(len(part.plan.instructions) for part in plan.parts),
        **({"transfers": plan.costs["transfers"]} if plan.parts else {}),
        "collectives": plan.costs["collectives"],
        "peak_bytes": plan.costs["peak_bytes"],
        **({} if plan.options.memory_limit is None else {"memory_limit": plan.options.memory_limit}),
        **({"recomputed": plan.costs["recomputed"]} if "recomputed" in plan.costs else {}),
        "seconds": plan.costs["seconds"],
        "file": str(path),
        "file_bytes": path.stat().st_size,
    }


def _machine_code(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.binaries:
        together = sum(len(launch.binary) for each in plan.binaries for launch in each.launches)
        kernels = len({each.kernel for each in plan.binaries})
        more = f" in {len(plan.binaries):,} variants" if len(plan.binaries) > kernels else ""
        yield "machine code", f"{size(together)}, of {count(kernels, 'kernel')}{more}"


def _show(out: Console, plan: Plan, path: Path, words: list[str]) -> None:
    made = summary(plan, path)
    line(out, plain(plan.name, "bold"), f"on {plan.mesh}: {count(plan.mesh.workers, 'worker')}, for {plan.made_for}")
    together = sum(c["count"] for by_op in made["collectives"].values() for c in by_op.values())
    collectives = [
        (dims, op, f"{c['count']:,}", f"{c['tensors']:,}", size(c["bytes"]))
        for dims, by_op in made["collectives"].items()
        for op, c in by_op.items()
    ]
    pairs(
        out,
        [
            *([("sizes", _named(made["sizes"]))] if "sizes" in made else []),
            ("ops", f"{made['ops']:,}, with {count(together, 'collective')}"),
            ("peak memory of a worker", size(made["peak_bytes"]) + _limited(made)),
            *_machine_code(plan),
        ],
    )
    if collectives:
        heading(out, "collectives in a step")
        table(out, ["mesh dim", "collective", ">count", ">tensors", ">bytes a worker"], collectives)
    if transfers := made.get("transfers"):
        heading(out, "transfers in a step")
        rows = [(ends, f"{each['count']:,}", size(each["bytes"])) for ends, each in transfers.items()]
        table(out, ["~", ">count", ">bytes"], rows)
    seconds = made["seconds"]
    heading(out, "compiled in", duration(sum(seconds.values())))
    table(out, ["", ">"], [(name, duration(took)) for name, took in seconds.items()])
    out.print()
    for text in words:
        line(out, text)
    line(out, f"wrote {path}, {size(made['file_bytes'])}; to see it: monarchc inspect {path}")


def _named(sizes: dict[str, int]) -> str:
    return f"all of {', '.join(sizes)}; below, for {', '.join(f'{name}={value}' for name, value in sizes.items())}"


def _limited(made: dict[str, Any]) -> str:
    """The limit that a plan was compiled under, and what that took; "" for none."""
    if "memory_limit" not in made:
        return ""
    done = made["recomputed"]
    text = f" of at most {size(made['memory_limit'])}"
    if not done["calls"]:
        return text
    return f"{text}; {size(done['without'])} without the {count(done['calls'], 'op')} that are computed again"
