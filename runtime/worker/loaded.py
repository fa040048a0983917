"""A plan as one worker runs it: its frame, and the callables of its instructions on this worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from monarch.compiler.loading import load
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.plan import DTYPES, MeshSpec, Plan
from monarch.compiler.plan.check_parts import MOVING
from monarch.compiler.plan.waits import STARTED
from monarch.runtime.shared import wire
from monarch.runtime.shared.results import small_results
from monarch.runtime.worker.arena import Arena
from monarch.runtime.worker.device.native import bind
from monarch.runtime.worker.frame import Frame, Graphs
from monarch.runtime.worker.freed import Ahead

if TYPE_CHECKING:
    from monarch.runtime.collectives.mirror import Mirror
    from monarch.runtime.collectives.sending import Sending
    from monarch.runtime.worker.device.gpu import OnGpu


class Rounds(Ahead, Protocol):
    """The part of `collectives.meeting.Meetings` that a worker's state needs."""

    def begin(self, step: int) -> None: ...

    def look(self, ranks: Iterable[int]) -> None: ...

    def is_stopped(self, step: int) -> bool: ...

    def halt(self) -> None: ...

    @property
    def mirror(self) -> Mirror | None: ...

    @property
    def sending(self) -> Sending: ...


class Steps(Protocol):
    """The part of `collectives.collectives.Collectives` that a worker's state and its plans need."""

    @property
    def at(self) -> Rounds: ...

    @property
    def me(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    def over(
        self,
        mesh: MeshSpec,
        ranks: Sequence[int],
        joint: Sequence[int] | None = None,
        committing: Sequence[int] | None = None,
    ) -> Steps: ...

    def transfers(self, plan: Plan, part: int, ranks: Sequence[Sequence[int]]) -> Any: ...

    def permute(
        self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]
    ) -> Callable[..., list[torch.Tensor]]: ...

    def commit(self) -> Callable[[], None]: ...

    def look(self) -> None: ...

    def by(self, backend: str) -> Any: ...

    def close(self) -> None: ...


class LoadedPlan:
    """A plan as this worker runs it: the frame, and how to read its arguments. `collectives` are those of the workers
    that it runs on. `failed` is whether its last step did."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        collectives: Steps,
        arena: Arena,
        kernels: Path | None,
        commit: Callable[[Callable[[], None], Callable[[], None]], Callable[..., None]],
        halt: Callable[[], None],
        whole: Plan | None = None,
        part: int = 0,
    ) -> None:
        """A plan that is one of several parts of `whole` is number `part` there. `kernels` is the object that its
        kernels were built into. `commit` gives the plan's commit, of what waits for what the step has started, and what
        waits until all workers have come; it is called with the results `small_early`. `halt` raises where the step is
        to be given up."""
        whole = whole or plan
        calls = _Calls(plan, rank, collectives, kernels, commit, halt, whole, part)
        self.waits = calls.waits
        """Each waits for something that a step has started."""
        self.ready = ready = calls.ready
        """The plan's objects on a GPU."""
        small = [each for each in small_results(plan) if collectives.me in each.workers]
        if ready is None:
            told = [plan.outputs[each.output].slot for each in small]
            self.frame = Frame(plan, calls.bind, arena, commits=any(whole.donated), told=told, halt=halt)
        else:
            graphs = _graphs(plan, ready, rank)
            self.frame = Frame(
                ready.plan, ready.binds(calls.bind), graphs=graphs, commits=any(whole.donated), halt=halt
            )
        self.failed = False
        self._dtype = DTYPES[plan.options.dtype]
        self.sends = None if part not in whole.senders else Sends(_receivers(whole), calls.last)
        """Of a part that only sends, beside the steps that follow."""
        self.shares = bool(whole.parts) and not any(whole.donated)
        """Whether it is one of several parts, which do not meet at a commit."""
        self.ranks = collectives.ranks
        self.device = torch.device("cpu") if ready is None else ready.device
        self.name = plan.name
        self.instructions = plan.instructions
        self.sources = plan.sources
        # A number arrives as one, and is to the plan a tensor without dims.
        self.dtypes = [spec.type.dtype if spec.kind in ("scalar", "seed") else None for spec in plan.inputs]
        self.struct = wire.inputs_struct(
            [spec.type.dtype if spec.kind in ("scalar", "seed") else None for spec in whole.inputs],
            [spec.part == part for spec in whole.inputs],
        )
        """Of the whole plan's inputs, those of the part."""
        self.gives = [at for at, spec in enumerate(whole.outputs) if spec.part == part]
        """Of the whole plan's outputs, the numbers of those that it makes."""
        self.donated = [at for at, donated in enumerate(plan.donated) if donated and self.dtypes[at] is None]
        early = self.frame.told_early
        self.small_early = [each for each in small if plan.outputs[each.output].slot in early]
        """The small results that the commit is called with, in this order."""
        self.small = [each for each in small if each not in self.small_early]
        """The others."""

    def run(self, arguments: list[Any]) -> Any:
        """The plan's results, under the default dtype that it was compiled for."""
        if (before := torch.get_default_dtype()) is self._dtype:
            return self.frame.run(arguments)
        torch.set_default_dtype(self._dtype)
        try:
            return self.frame.run(arguments)
        finally:
            torch.set_default_dtype(before)


class Sends(NamedTuple):
    """The sends of a part beside the steps that follow: to which workers, and the number behind its last piece."""

    readers: frozenset[int]
    last: int


class _Calls:
    """The callables of a plan's instructions on one worker. They do not know the frame that calls them: so a plan that
    is dropped ends there and then, with all its memory on a GPU."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        collectives: Steps,
        kernels: Path | None,
        commit: Callable[[Callable[[], None], Callable[[], None]], Callable[..., None]],
        halt: Callable[[], None],
        whole: Plan,
        part: int,
    ) -> None:
        self.ready = None if plan.target == "cpu" else _on_gpu(plan, rank)
        self._collectives = collectives
        self._commit = commit
        self._halt = halt
        self._receives = bool(whole.senders) and part not in whole.senders
        self._transfers = collectives.transfers(whole, part, _ranks_of(whole)) if whole.parts else None
        self.last = 0 if self._transfers is None else self._transfers.last
        self._kernels = kernels
        self._position = dict(zip(plan.mesh.names, plan.mesh.point(collectives.me), strict=True))
        self._sizes = dict(plan.mesh.sizes)
        self._moves: Any = collectives.by(plan.collectives)  # the object of the plan's collectives
        self._ahead = plan.collectives in STARTED
        """Whether its collectives are started, and waited for later."""
        self.waits: list[Callable[[], None]] = [self._moves.finish] if self._ahead else []
        if self.ready is not None:
            self.waits.append(self.ready.check)

    def check(self) -> None:
        """Wait for all that a step has started: before it commits, and at its end."""
        for wait in self.waits:
            wait()

    def _meeting(self) -> Callable[[], None]:
        """The wait at the commit."""
        meet, transfers = self._collectives.commit(), self._transfers
        if transfers is None or not self._receives:
            return meet

        def run() -> None:
            transfers.await_senders()
            meet()

        return run

    def _look(self) -> None:
        """The question that a loop asks now and then."""
        self._collectives.look()
        self._halt()

    def bind(self, name: str, *arguments: Any) -> Callable[..., Any]:
        if name == "commit":
            return self._commit(self.check, self._meeting())
        if name == "kernel":
            text, over = arguments
            return bind(self._kernels, text, over, torch.get_num_threads())
        if name in LOCAL_OPS:
            return partial(LOCAL_OPS[name], self._position, self._sizes)
        if name == "look":
            return self._look
        if name == "wait" and not self._ahead:
            return _done_already
        if name in MOVING:
            moving: Callable[..., Any] = getattr(self._transfers, name)(*arguments)
            return moving if self.ready is None else _moving_by_way_of_host(self.ready.device, moving)
        bound: Callable[..., Any] = getattr(self._moves, name)(*arguments)
        return bound if self.ready is None or self._ahead else partial(_by_way_of_host, self.ready.device, bound)


def _on_gpu(plan: Plan, rank: int) -> OnGpu:
    gpu = load("monarch.runtime.worker.device.gpu")
    ready: OnGpu = gpu.OnGpu(plan, gpu.device_for(plan, rank))
    if ready.device.type == "cuda":
        torch.cuda.set_device(ready.device)
    return ready


def _graphs(plan: Plan, ready: OnGpu, rank: int) -> Graphs | None:
    if not plan.cuda_graphs:
        return None
    graphs: Graphs = load("monarch.runtime.worker.graphs:Graphs")(plan, ready.device, f"worker {rank}")
    return graphs


def _done_already(results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The wait for a collective that its own instruction has finished."""
    return results


def _by_way_of_host(
    device: torch.device, collective: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], tensors: Any
) -> list[torch.Tensor]:
    """A collective of tensors on a GPU, through the host's memory."""
    return [made.to(device) for made in collective([tensor.cpu() for tensor in tensors])]


def _ranks_of(plan: Plan) -> list[tuple[int, ...]]:
    """The workers of each part of a plan, in order."""
    return [tuple(part.place.ndslice) for part in plan.parts]


def _receivers(plan: Plan) -> frozenset[int]:
    """The workers of a plan's parts that do more than send."""
    return frozenset(rank for at, ranks in enumerate(_ranks_of(plan)) for rank in ranks if at not in plan.senders)


def _moving_by_way_of_host(device: torch.device, moving: Callable[..., Any]) -> Callable[..., Any]:
    """A send or a receive of what is on a GPU, through the host's memory."""

    def run(*tensors: torch.Tensor) -> Any:
        made = moving(*(tensor.cpu() for tensor in tensors))
        return made.to(device) if isinstance(made, torch.Tensor) else made

    return run


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"
