"""`monarch.profile`: measure what runs within a block."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.compiler.execution.events import WorkersStatus, running, subscribe
from monarch.compiler.execution.executor import Executor, Undo
from monarch.compiler.execution.reports import want_no_reports, want_reports
from monarch.compiler.inspect.trace import save_trace
from monarch.compiler.plan.trace import Trace


class OnWorkers(Protocol):
    """A mesh with workers, which start when they are first asked for."""

    @property
    def executor(self) -> Executor: ...


class Profile:
    """The result of `monarch.profile`: it has `trace` when the block has ended.

    `traces` and `paths` hold one for each mesh that ran something in the block, in the order in which they began.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, mesh: OnWorkers | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.traces: tuple[Trace, ...] = ()
        self.paths: tuple[Path, ...] = ()
        self._mesh = mesh
        self._only: Executor | None = None
        self._unsubscribe: Undo = lambda: None
        # Held until the end, so that a mesh that is dropped within the block does not take its trace along.
        self._traced: list[Executor] = []

    @property
    def trace(self) -> Trace:
        """The trace of the one mesh that ran. Raises MonarchError where there is none, or several."""
        if len(self.traces) != 1:
            count = "no mesh has" if not self.traces else f"{len(self.traces)} meshes have"
            raise MonarchError(
                f"{count} been measured",
                hint="one trace is made for each mesh that runs something in the block, when it ends: see .traces.",
            )
        return self.traces[0]

    def __enter__(self) -> Profile:
        if self._traced or self.traces:
            raise MonarchError("this profile has been used", hint="make a new one: with monarch.profile(...).")
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise MonarchError(
                f"cannot write {self.path}: there is no folder {self.path.absolute().parent}",
                hint="make it first; the trace is written when the block ends.",
            )
        if self._mesh is not None:
            self._only = self._mesh.executor.whole
        # Also with a mesh of its own, for plans that are compiled while anything is watched have reports.
        try:
            want_reports(self)
            self._unsubscribe = subscribe(self._heard, WorkersStatus)
            for executor in running():
                self._start(executor)
        except BaseException:
            self._end()
            self._stop()
            raise
        return self

    def _heard(self, status: WorkersStatus) -> None:
        if status.is_running:
            self._start(status.executor)

    def _start(self, executor: Executor) -> None:
        if self._only not in (None, executor) or any(known is executor for known in self._traced):
            return
        with suppress(DeviceMeshError):  # it has lost workers, which nobody has noticed yet: it runs nothing any more
            executor.trace_start()
            self._traced.append(executor)

    def _end(self) -> None:
        want_no_reports(self)
        self._unsubscribe()

    def _stop(self) -> list[Trace]:
        traced, self._traced = self._traced, []
        return [executor.trace_stop() for executor in traced]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self.traces = tuple(trace for trace in self._stop() if trace.steps or trace.commands)
        if self.path is not None:
            paths = [self.path, *(_numbered(self.path, at) for at in range(2, len(self.traces) + 1))]
            for trace, path in zip(self.traces, paths, strict=False):
                save_trace(trace, path)
            self.paths = tuple(paths[: len(self.traces)])


def _numbered(path: Path, number: int) -> Path:
    """trace.json, trace-2.json; and the same before .json.gz."""
    stem, dot, rest = path.name.partition(".")
    return path.with_name(f"{stem}-{number}{dot}{rest}")


def profile(path: str | os.PathLike[str] | None = None, *, mesh: OnWorkers | None = None) -> Profile:
    """Measure every step on every worker within a block, and write a Chrome trace, which ui.perfetto.dev opens.

        with monarch.profile("trace.json") as profile:
            for tokens, targets in batches:
                loss = train_step(tokens, targets)
        profile.trace.steps

    Measures every mesh that runs in the block, or `mesh` alone; where that is a part of a mesh, all of it. A trace
    holds each instruction's start and end, the bytes that a worker holds then, how long collectives waited for peers,
    and the controller's commands. A second mesh's trace is written to "trace-2.json". A path that ends in ".gz" is
    compressed. Without a path nothing is written. The block ends when the workers have done what was asked of them in
    it.

    Times are CLOCK_MONOTONIC's, one clock for all processes of a host. Workers keep as many of the last steps as fit
    into their buffers (256 MiB for all workers of a mesh, at most 32 MiB each; an instruction takes 40 bytes), and
    `Trace.dropped` counts the others. Programs compiled in the block keep a report of their values, so that the trace
    can name modules; of those compiled before it knows names, ops, types and lines. Raises MonarchError where the mesh
    is being measured already, or the file cannot be written.
    """
    return Profile(path, mesh=mesh)
