"""Compiled plans that are kept on disk, so that a process need not compile what another one has compiled.

    <cache>/plans/<key>.mplan

The key is a digest of all that a plan follows from: the traced graph's text with its constants, the options, the
settings that the passes read, the sharding rules that are lines, and the versions: of torch, of Python, and of the
compiler's own sources. A file is read as any plan's is, is the user's own, and names its key; one that is not so is
compiled anew and written over.

Programs whose plan follows from more are compiled in each process: those for GPUs, with ops that are not PyTorch's or
Monarch's, or in a process with sharding rules that are functions of the user's. So are those of which the compiler has
something to say: that an op runs whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError, PlanError
from monarch.compiler.execution.events import say, wanted
from monarch.compiler.graph import Graph
from monarch.compiler.kernels.cache import is_ours, private_folder
from monarch.compiler.loading import load
from monarch.compiler.ops.record import record, recorded
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.plan.file import load_plan, plan_bytes, put_file
from monarch.compiler.text import print_graph

Compiled = Callable[[Graph, CompileOptions], Plan]

_KEY = "key"
"""The name under which a plan's costs hold the key of its file."""


def compile_kept(graph: Graph, options: CompileOptions, compiled: Compiled | None = None, also: str = "") -> Plan:
    """The plan of a traced graph (see `pipeline.compile_graph`): the one that is kept, or a new one, which is kept.
    `compiled` makes it where another compiler does, and `also` is what else it then follows from."""
    compiled = compiled or _compiled
    if not _may_keep(graph, options):
        return compiled(graph, options)
    start = time.perf_counter()
    try:
        folder = private_folder("plans")
    except MonarchError as error:
        _say(str(error))
        return compiled(graph, options)
    key = key_of(graph, options, also)
    path = folder / f"{key}.mplan"
    plan = _read(path, key)
    if plan is not None:
        if wanted("passes"):
            say("passes", f"{graph.name}: its plan was kept on disk, {time.perf_counter() - start:.3f} s")
        if wanted("plan"):
            say("plan", f"{graph.name}: the plan\n{plan.graph}")
        return plan
    plan = compiled(graph, options)
    if "whole" not in plan.costs:
        _write(plan, path, key)
    return plan


def _compiled(graph: Graph, options: CompileOptions) -> Plan:
    return load("monarch.compiler.pipeline:compile_graph")(graph, options)


# -- keys --------------------------------------------------------------------------------------------------------------


def _may_keep(graph: Graph, options: CompileOptions) -> bool:
    """Whether a plan follows from its key alone, and nobody wants to see the passes at work."""
    watched = settings.verify or settings.dump is not None
    return settings.plan_cache > 0 and not watched and options.target == "cpu" and _is_known(graph) and _rules() != ""


def _is_known(graph: Graph) -> bool:
    """Whether all ops are PyTorch's or Monarch's own: what others do does not follow from their names."""
    targets = {node.target for node in graph.calls}
    known = all(not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prims") for op in targets)
    return known and all(map(_is_known, graph.regions.values()))


def key_of(graph: Graph, options: CompileOptions, also: str = "") -> str:
    """What a graph's plan follows from, as the name of its file: a SHA-256 in hex."""
    digest = hashlib.sha256()
    own = settings.kernels, str(torch.get_default_dtype()), also
    for part in (print_graph(graph, paths=True, modules=True), repr(options), repr(own), _rules(), _versions()):
        digest.update(hashlib.sha256(part.encode()).digest())
    for label, tensor in _constants(graph):
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{label}: {values.dtype}{list(values.shape)}".encode())
        row = values.as_strided((values.numel(),), (1,))  # whatever the strides of a single element are
        digest.update(hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).digest())
    return digest.hexdigest()


def _constants(graph: Graph) -> Iterator[tuple[str, torch.Tensor]]:
    yield from sorted(graph.constants.items())
    for name, region in sorted(graph.regions.items()):
        yield from ((f"{name}/{label}", tensor) for label, tensor in _constants(region))


def _rules() -> str:
    """All sharding rules that are lines; "" where one is a function of the user's, which may do anything."""
    lines = []
    for op in recorded("rule"):
        rule = record(op).rule
        if not callable(rule):
            lines.append(f"{op}: {rule}")
        elif not str(rule.__module__).startswith("monarch."):
            return ""
    return "\n".join(lines)


@cache
def _versions() -> str:
    """Those of Python and torch, and a digest of the compiler's sources."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{sys.version} {torch.__version__} {digest.hexdigest()}"


# -- files -------------------------------------------------------------------------------------------------------------


def _read(path: Path, key: str) -> Plan | None:
    """A plan that is kept; None where none is, or what is there is not it."""
    try:
        if not is_ours(path):
            return None
        plan = load_plan(path, report=False)
        if plan.costs.pop(_KEY, None) != key:
            raise PlanError(f"{path.name} holds the plan of another program")
        os.utime(path)
    except FileNotFoundError:  # another process has just deleted it
        return None
    except PlanError as error:
        _say(f"a kept plan cannot be read, so its program is compiled again.\n{error}")
        return None
    return plan


def _write(plan: Plan, path: Path, key: str) -> None:
    """Keep a plan, and delete those that were used longest ago where all take more than the setting says. It need not
    reach the disk at once: its digests tell a file that is cut short."""
    try:
        data = plan_bytes(replace(plan, costs={**plan.costs, _KEY: key}))
        if len(data) > settings.plan_cache:
            return
        put_file(path, data, ".writing-", sync=False)
        _forget(path.parent)
    except PlanError as error:  # it holds what no file can
        if wanted("passes"):
            say("passes", f"{plan.name}: its plan is not kept on disk.\n{error}")
    except OSError as error:
        _say(f"plans cannot be kept in {path.parent}: {error.strerror or error}")


def _forget(folder: Path) -> None:
    files: list[tuple[float, int, Path]] = []
    for path in (*folder.glob("*.mplan"), *folder.glob(".writing-*")):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            about = path.lstat()
            files.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= settings.plan_cache:
            return
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        total -= size


@cache
def _say(text: str) -> None:
    say("plans", text)
