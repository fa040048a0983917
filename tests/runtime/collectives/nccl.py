"""A stand-in for NCCL: Gloo, on CPUs that stand in for GPUs. Its works are asynchronous as NCCL's are, in threads in
place of a stream: what is tested with it is what workers do about such works, not what NCCL does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from monarch.compiler.plan import Instruction, Plan, Slot
from monarch.compiler.plan.options import CompileOptions
from monarch.runtime.collectives import gloo, listening, nccl
from monarch.runtime.collectives.rendezvous import Rendezvous
from monarch.runtime.processes import parent as processes
from monarch.runtime.processes import workers
from monarch.runtime.worker.device import gpu

MOVING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")


def over_nccl(plan: Plan) -> Plan:
    """A plan written by hand, for NCCL: each wait stands right behind its collective."""
    instructions: list[Instruction] = []
    slots = plan.slots
    for each in plan.instructions:
        if each.op not in MOVING:
            instructions.append(each)
            continue
        instructions.append(replace(each, out=slots, free=()))
        instructions.append(
            Instruction("wait", (Slot(slots), each.args[0]), {}, each.out, (slots, *each.free), each.source)
        )
        slots += 1
    options = CompileOptions(target="cuda:90", collectives="nccl")
    return replace(plan, instructions=tuple(instructions), slots=slots, options=options, hash="")


class GlooForNccl:
    """`nccl.Library`, with Gloo behind it. All workers have GPUs of their own, unless `one_gpu` is said."""

    name = "NCCL"
    one_gpu = False

    def __init__(self) -> None:
        self._sockets: dict[int, list[Any]] = {}

    def listen_on(self, address: str) -> None:
        assert address == listening.LOOPBACK

    def gpu(self, device: torch.device) -> str:
        return "GPU-1" if self.one_gpu else ""

    def rendezvous(self, me: int) -> Rendezvous:
        return Rendezvous()

    def connect(self, store: Rendezvous, me: int, size: int, device: torch.device) -> Any:
        made, listener = gloo.listen(listening.LOOPBACK)
        listener.close()  # Gloo has its own
        before = listening.sockets()
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [made], 1, timedelta(days=365)
        backend = ProcessGroupGloo(store, me, size, options)
        now = listening.sockets()
        self._sockets[id(backend)] = [now.pop(inode) for inode in now.keys() - before.keys()]
        for each in (*before.values(), *now.values()):
            each.close()
        return backend

    def failed(self, work: Any) -> Exception | None:
        return None  # a wait has raised it

    def abort(self, backend: Any) -> None:
        for each in self._sockets.pop(id(backend)):
            listening.cut(each)


@contextmanager
def standing_in(library: type[GlooForNccl] = GlooForNccl) -> Iterator[None]:
    """Workers that are forked meanwhile take Gloo for NCCL, and the CPU for a GPU."""
    assert processes.can_fork(), "an earlier test has loaded CUDA's driver or Ray: workers would be fresh processes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "Nccl", library)
        patch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
        warm = processes.WarmParent()
        patch.setattr(workers, "warm_parent", lambda: warm)
        try:
            yield
        finally:
            warm.close()
