"""The part of a program's state that outlives the loss of workers and hosts: `program.survives()`, `inspect
--survives`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import or_
from typing import Any

from monarch.compiler.errors import MonarchError
from monarch.compiler.plan import Plan, TensorType
from monarch.compiler.sizes import format_bytes
from monarch.compiler.survival import (
    COPY_EVERY,
    Cluster,
    Copies,
    Fatal,
    copies_for,
    value_line,
    worker_bytes,
)

_SHOWN = 16


class Survival:
    """Which losses of workers and hosts a program's state survives in the copies that its layouts have, and which
    tensors do not. Prints as a table.

    `states`  every tensor of state with its type
    `copies`  with `redundancy=1` what other workers keep besides, so that no single loss is fatal
    `fatal`   for each kind of loss ("1 worker", "2 workers", "1 host", ...), which of them take all copies of a block
    """

    def __init__(self, plan: Plan, hosts: int | Sequence[int] = 1) -> None:
        """`hosts` are as for `Cluster`. Raises MonarchError where the plan's workers cannot be on so many hosts."""
        self.name = plan.name
        try:
            self.cluster = Cluster(plan.mesh, hosts)
        except ValueError as error:
            raise MonarchError(str(error), hint="give the number of hosts that have the workers.") from None
        self.states: Mapping[str, TensorType] = plan.states
        self.copies = copies_for(self.states, self.cluster) if plan.options.redundancy else None
        none = {loss: Fatal(total) for loss, total in self.cluster.losses.items()}
        found = [none, *map(self.cluster.fatal, self.states.values())]
        self.fatal: Mapping[str, Fatal] = {loss: reduce(or_, (each[loss] for each in found)) for loss in none}

    def lost(self, loss: str) -> list[str]:
        """The tensors that some loss of this kind takes a block of."""
        return [name for name, type_ in self.states.items() if self.cluster.fatal(type_)[loss].count]

    def data(self) -> dict[str, Any]:
        """The table as JSON values."""
        mesh = self.cluster.mesh
        return {
            "workers": mesh.workers,
            "hosts": self.cluster.hosts,
            "losses": {
                loss: {"of": fatal.total, "fatal": fatal.count, "tensors": self.lost(loss)}
                for loss, fatal in self.fatal.items()
            },
            "copies": None if self.copies is None else asdict(self.copies) | {"every": COPY_EVERY},
            "states": {
                name: {"type": str(type_), "bytes": worker_bytes(type_, mesh)} for name, type_ in self.states.items()
            },
        }

    def __str__(self) -> str:
        mesh, hosts = self.cluster.mesh, self.cluster.hosts
        where = f" on {hosts:,} hosts" if hosts > 1 else ""
        lines = [f"{self.name} on {mesh}: {mesh.workers:,} workers{where}; state: {self._count(self.states)}"]
        rows = [("loss", "fatal", "takes a block of")]
        for loss, fatal in self.fatal.items():
            lost = self.lost(loss)
            rows.append((loss, str(fatal), self._count(lost) if lost else ""))
        wide = [max(len(row[at]) for row in rows) for at in range(2)]
        lines += [f"  {loss:{wide[0]}}  {fatal:{wide[1]}}  {what}".rstrip() for loss, fatal, what in rows]
        for losses, names in self._groups().items():
            lines.append(f"lost with {losses}: {self._count(names)}")
            lines += [f"  {value_line(name, self.states[name], mesh)}" for name in names[:_SHOWN]]
            lines += [f"  and {len(names) - _SHOWN:,} more"] * (len(names) > _SHOWN)
        if self.copies is not None:
            lines += self._copies(self.copies)
        return "\n".join(lines)

    __repr__ = __str__

    def _copies(self, copies: Copies) -> list[str]:
        if not copies.tensors:
            return ["redundancy=1: no single loss is fatal without copies"]
        return [
            f"redundancy=1: another worker keeps {self._count(copies.tensors)}, so that no single loss is fatal",
            f"  a worker holds {format_bytes(copies.memory)} more at most, and sends {format_bytes(copies.sent)} every "
            f"{COPY_EVERY} steps",
        ]

    def _groups(self) -> dict[str, list[str]]:
        """The tensors that some loss takes, by all the losses that do."""
        found: dict[str, list[str]] = {}
        for name, type_ in self.states.items():
            fatal = {loss: each for loss, each in self.cluster.fatal(type_).items() if each.count}
            if fatal:
                losses = "; ".join(f"{loss} ({each})" for loss, each in fatal.items())
                found.setdefault(losses, []).append(name)
        return found

    def _count(self, names: Iterable[str]) -> str:
        names = list(names)
        size = sum(worker_bytes(self.states[name], self.cluster.mesh) for name in names)
        return f"{len(names):,} tensor{'s' * (len(names) != 1)}, {format_bytes(size)} a worker"
