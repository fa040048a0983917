"""Errors that users read: where, what, the numbers, and what to do."""

from __future__ import annotations

import builtins
import difflib
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self


@dataclass(frozen=True)
class Source:
    """A place in the user's program.

    Lines count from 1 and columns from 1, as editors do; column 0 means that only the line is known. For a line of an
    installed library `caller` is the line of the user's own files that called into it; it has no caller itself.
    """

    file: str
    line: int
    column: int = 0
    end_column: int = 0
    caller: Source | None = None

    @property
    def own(self) -> Source:
        """The line of the user's own files: this one, or the one that called into the library."""
        return self.caller or self

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return f"{name}:{self.line}:{self.column}" if self.column else f"{name}:{self.line}"

    @property
    def text(self) -> str:
        """The expression, where it is known and on one line; otherwise ""."""
        line = linecache.getline(self.file, self.line)
        return line[self.column - 1 : self.end_column - 1] if 0 < self.column < self.end_column else ""

    def excerpt(self) -> str:
        """The source line with a caret under the expression, or "" where the file cannot be read."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        if not text.strip():
            return ""
        lead = len(text) - len(text.lstrip())
        lines = ["      " + text.strip()]
        if self.column > lead:
            width = max(1, min(self.end_column, len(text) + 1) - self.column) if self.end_column else 1
            lines.append("      " + " " * (self.column - 1 - lead) + "^" * width)
        return "\n".join(lines)


_notice: Callable[[MonarchError], None] | None = None


def notice_with(notice: Callable[[MonarchError], None]) -> None:
    """Register a function that is called with each error that is made, before it is raised."""
    global _notice
    _notice = notice


def did_you_mean(name: str, known: Iterable[str], then: str = " ") -> str:
    """ "did you mean data?", with `then` behind it, where one of the known names is near, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?{then}" if close else ""


def beside(*rows: tuple[str, str]) -> str:
    """Lines of code, each with its comment in a column of its own."""
    width = max(len(code) for code, _ in rows) + 2
    return "\n".join(f"{code:<{width}}# {comment}" if comment else code for code, comment in rows)


def known_dims(dim: object, mesh: object, dims: Sequence[str]) -> str:
    """The hint beside "unknown mesh dim": the dim that is near, the mesh, and its dims."""
    return f"{did_you_mean(str(dim), dims)}the mesh is {mesh}: its dims are {', '.join(dims) or 'none'}."


class MonarchError(Exception):
    """An error in a user's program, input or machine.

    `message` is what is wrong, with the numbers; `hint` the way out; `source` is the user's line. Survives pickling,
    for errors cross processes.
    """

    def __init__(self, message: str, *, hint: str = "", source: Source | None = None) -> None:
        super().__init__(message, hint, source)
        self.message = message
        self.hint = hint
        self.source = source
        if _notice is not None:
            _notice(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.source)

    def __str__(self) -> str:
        where = f"{self.source}: error: " if self.source else ""
        parts = [where + self.message]
        if self.source and (excerpt := self.source.excerpt()):
            parts.append(excerpt)
        if self.source and self.source.caller:
            parts.append(f"  called from {self.source.caller}:")
            parts += filter(None, [self.source.caller.excerpt()])
        if self.hint:
            parts.append("\n".join("  " + line for line in self.hint.splitlines()))
        return "\n".join(parts)


def _rebuild(cls: type[MonarchError], message: str, hint: str, source: Source | None) -> MonarchError:
    return cls(message, hint=hint, source=source)


class LayoutError(MonarchError):
    """A layout that cannot be: an unknown mesh dim, a size that does not divide, a tensor dim out of range."""


class RuleError(MonarchError):
    """A sharding rule that does not parse, an op that workers cannot run alike, or, in a strict program, an op that
    would run whole."""


class PerformanceWarning(UserWarning):
    """A program that is right, and slower than it could be: an op that every worker computes whole."""


class ProgramError(MonarchError):
    """A Python construct that a `@monarch.program` cannot contain, or a baked-in value that changed."""


class ArgumentWritten(ProgramError):
    """A program changes a tensor in place that is among its arguments, and was traced as one that does not."""


class GraphError(MonarchError):
    """A graph, or a graph's text, that is not well formed."""


class PlanError(MonarchError):
    """A plan file that cannot be loaded: truncated, edited, of another version."""


class CheckpointError(MonarchError, RuntimeError):
    """A checkpoint that cannot be written or read: a full disk, corrupt bytes, names or shapes that differ. Also a
    RuntimeError, as what PyTorch's `load_state_dict` raises."""


class DeviceMeshError(MonarchError, RuntimeError):
    """A worker or a step failed: which, where and why. Every handle that depends on it raises this.

    Beside the fields of every error (`source` is the user's line) it has the known facts of the failure:

    `worker`, `coordinates`  the worker's number, and where it is on the mesh: {"data": 1}
    `host`                   the host that it is on
    `exit_status`, `signal`  of a worker that has ended: what it exited with (negative: of a signal), and "SIGKILL"
    `log`                    the last lines that it printed (20 at most, 4 KiB at most)
    `step`, `program`        the number among the mesh's commands of the first step that is not applied, and the
                             program's name
    `op`                     the op that failed: "aten.index_select.default"
    `mesh_lost`              the mesh takes no steps any more, until `monarch.heal_mesh` has replaced the worker

    Also a RuntimeError, as what PyTorch raises for a failing op.
    """

    worker: int | None = None
    coordinates: Mapping[str, int] = MappingProxyType({})
    host: str = ""
    exit_status: int | None = None
    signal: str = ""
    log: str = ""
    step: int | None = None
    program: str = ""
    op: str = ""
    mesh_lost: bool = False

    def knowing(self, **facts: Any) -> Self:
        """This error, with the known facts of the failure, by attribute."""
        self.__dict__.update(facts)
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """The known facts of the failure, by attribute."""
        names = {name for kind in type(self).__mro__ for name in kind.__dict__.get("__annotations__", ())}
        return {name: value for name, value in self.__dict__.items() if name in names}

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__(), self.facts)


class AnomalyError(DeviceMeshError):
    """In a block of `Mesh.detect_anomaly` a value has a NaN, or an infinity: the first one in the program's order.

    `op`, `worker` and `coordinates` say which op made it where, and `source` is the user's line; for an argument or
    state of the program, `op` is its kind ("input", "state", "constant"), and there is no line. The step is not
    applied.
    """


class ReplicaError(DeviceMeshError):
    """Workers that are to hold the same bits hold different ones: memory, a processor or a link has changed a value
    without an error. `Mesh.check_replicas` raises it.

    `workers`  those that differ from most others, where three or more hold the same block; or else all that hold it
    `decided`  whether `workers` are those that differ: then they count as lost (`mesh_lost`), and `monarch.heal_mesh`
               restores what they held from the others
    `tensors`  the names of the values

    `worker`, `coordinates` and `host` are those of the first of `workers`.
    """

    workers: tuple[int, ...] = ()
    decided: bool = False
    tensors: tuple[str, ...] = ()


class LostError(MonarchError):
    """Values were on workers that have ended, and no other worker holds the same blocks: which, and of what layout.

    No DeviceMeshError: the steps that made them are done, and must not be called again.
    """


class DeviceIndexError(DeviceMeshError, IndexError):
    """A worker met an index that is out of range. Also an IndexError, as what PyTorch raises for most of such ops."""


class DeviceCheckError(DeviceMeshError, ValueError, AssertionError):
    """A worker met values that a check of the program's does not allow: `assert x.isfinite().all()`, the arguments of a
    distribution. Also a ValueError and an AssertionError, as what such checks raise, and of the class that the check's
    `raise` names."""


_CHECKS: dict[str, type[Exception]] = {}
"""The classes that checks of this process's programs raise, by name."""


def check_words(kind: type[BaseException] | None, words: str) -> str:
    """The message of a check that raises a class, from which `check_kind` knows it."""
    if kind is None or not issubclass(kind, Exception) or issubclass(DeviceCheckError, kind):
        return words
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    _CHECKS[name] = kind
    return f"{name}: {words}"


def check_kind(words: str) -> type[DeviceCheckError]:
    """The class of a failed check, by its message."""
    name = words.partition(": ")[0]
    kind = _CHECKS.get(name, getattr(builtins, name, None))
    return _check_class(kind) if isinstance(kind, type) and issubclass(kind, Exception) else DeviceCheckError


_classes: dict[type[Exception], type[DeviceCheckError]] = {}


def _check_class(kind: type[Exception]) -> type[DeviceCheckError]:
    def reduce(self: DeviceCheckError) -> tuple[object, ...]:
        return _rebuild_check, (kind, self.message, self.hint, self.source), self.facts

    if kind not in _classes:
        parts = {"__reduce__": reduce, "__module__": __name__}
        try:
            _classes[kind] = type("DeviceCheckError", (DeviceCheckError, kind), parts)
        except TypeError:  # a class that cannot be a base beside it
            _classes[kind] = DeviceCheckError
    return _classes[kind]


def _rebuild_check(kind: type[Exception], message: str, hint: str, source: Source | None) -> MonarchError:
    return _rebuild(_check_class(kind), message, hint, source)
