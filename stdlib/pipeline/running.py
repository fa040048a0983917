"""`pipeline(model, mesh)`: a model in stages, and its training step in microbatches.

The step is traced microbatch by microbatch, each through all stages and back, as if there were one mesh: an op whose
operands are on several stages takes them to its own. The compiler then brings the ops into the schedule's order
(`monarch.compiler.passes.timetable`). So results have the same bits with every schedule, random numbers too, and stages
may read whatever they like: skip connections and shared weights are values that another stage reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.compiler.errors import LayoutError, ProgramError
from monarch.compiler.tape import Task, Timetable
from monarch.language import Mesh
from monarch.language.placing.distribute import module_to_mesh
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.tasks import belonging_to, set_task, take_timetable
from monarch.language.recorder.transfer import transfer
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor
from monarch.stdlib.pipeline.cutting import Stages, balanced
from monarch.stdlib.pipeline.losses import OF_CLASSES, Counted, check_loss
from monarch.stdlib.pipeline.schedules import order

Shared = dict[tuple[int, int], tuple[DistributedTensor, DistributedTensor]]
"""Tensors that a stage reads and another has, with what stands for them there: by both their ids."""


def pipeline(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    mesh_dim: str = "pipe",
    *,
    microbatches: int,
    schedule: str = "1f1b",
    split_at: Sequence[str] | None = None,
    virtual: int | None = None,
    layouts: Mapping[str, Any] | str | None = None,
    mixes_rows: bool = False,
) -> Pipeline:
    """Place a model's stages along a mesh dim, one after the other, and give what trains it in microbatches.

        pipe = pipeline(model, Mesh(pipe=4, data=2), microbatches=8, split_at=["blocks.3", "blocks.6", "blocks.9"])
        optimizer = torch.optim.AdamW(pipe.parameters())

        @monarch.program
        def step(x: "i64[64@data, 128]", y: "i64[64@data, 128]"):
            optimizer.zero_grad()
            loss = pipe.step(x, target=y, loss_fn=loss_fn)
            optimizer.step()
            return loss

    `model` is a list of stages, each of which takes what the one before it gives, or one module. That is cut where
    `split_at` says: each module named there, and what is behind it in `model.named_modules()`, is the next stage;
    without, between modules, so that stages have about as many parameters. `schedule` is "gpipe", "1f1b", "interleaved"
    (with `virtual` stages for each group of workers, 2 by default), or "zero-bubble" (`monarch.stdlib.pipeline.order`).
    `layouts` are those of `module_to_mesh`, on the mesh of a stage: `mesh.slice(pipe=0)`. Parameters that are on a mesh
    already stay there. `mixes_rows` says that the model mixes the rows of a batch, and is to mix those of each
    microbatch: then nothing is refused for that. In microbatches of one row it cannot be seen, and has to be said.

    Raises LayoutError for an unknown mesh dim, ProgramError for a model that cannot be cut so, and ValueError for a
    schedule that does not fit.
    """
    if mesh_dim not in mesh.spec.sizes:
        raise LayoutError(f"unknown mesh dim '{mesh_dim}'", hint=f"the mesh is {mesh.spec}.", source=user_source())
    groups = mesh.spec.sizes[mesh_dim]
    if virtual is None:
        virtual = 2 if schedule == "interleaved" else 1
    timetable = order(schedule, groups, microbatches, virtual)
    if isinstance(model, nn.Module):
        cuts = list(split_at) if split_at is not None else balanced(model, timetable.stages)
    else:
        model = nn.Sequential(*model)
        cuts = [str(at) for at in range(1, len(model))]
    stages = Stages(model, cuts)
    if stages.count != timetable.stages:
        raise ProgramError(
            f"{stages.count} stages for {timetable.stages} places: {mesh_dim}={groups}, {virtual} stages for each",
            hint=f"cut the model at {timetable.stages - 1} modules.",
            source=user_source(),
        )
    meshes = [mesh.slice(**{mesh_dim: at}) for at in range(groups)]
    homes = {name: meshes[stage % groups] for name, stage in stages.of.items()}
    module_to_mesh(model, meshes[0], layouts, meshes=homes)
    return Pipeline(model, stages, meshes, timetable, mixes_rows)


class Pipeline(nn.Module):
    """A model whose stages are on meshes of their own. Made by `pipeline`.

    `meshes`     those of the groups of workers
    `timetable`  what they do, and when: `print(pipe.timetable)`, `pipe.timetable.bubble`
    """

    def __init__(
        self, model: nn.Module, stages: Stages, meshes: list[Mesh], timetable: Timetable, mixes_rows: bool
    ) -> None:
        super().__init__()
        self.mixes_rows = mixes_rows
        self.model = model
        self.stages = stages
        self.meshes = meshes
        self.timetable = timetable

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model on a whole batch, one stage after the other: for evaluation."""
        recording = current_program()
        if recording is None:
            raise ProgramError(
                "a pipeline's model outside of a program",
                hint="@monarch.program\ndef evaluate(x):\n    return pipe(x)",
                source=user_source(),
            )
        with self._across(recording, 0, {}, None):
            return self.model(*args, **kwargs)

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., torch.Tensor],
        reduction: str = "mean",
        **kwargs: Any,
    ) -> torch.Tensor:
        """The loss of a batch, with its gradients added to those of the parameters.

        `args` and `kwargs` are the model's; `loss_fn(output, target)`, or `loss_fn(output)` without a target, gives a
        loss. All tensors have the batch in their first dim; microbatch k has its rows k, k + m, k + 2m, …,
        which are on each worker's own shard. Everything else goes to each microbatch as it is.

        The loss is that of the whole batch: `loss_fn` takes a mean over its rows, or with `reduction="sum"` their sum;
        `cross_entropy` and `nll_loss` take their means over the targets that count, of the whole batch. Microbatches of
        a batch that they do not divide differ by one row, and count so. Raises ProgramError where that would be other
        numbers: for a loss that is neither, and for batch statistics and other ops of the model that mix rows. One
        microbatch is exact for all of these.
        """
        recording = take_timetable(self.timetable)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: it must be 'mean' or 'sum'")
        count = self.timetable.microbatches
        leaves, spec = pytree.tree_flatten((args, kwargs, target))
        rows = _rows(leaves, count)
        if rows == count > 1 and not self.mixes_rows:
            raise _one_row(rows)
        own = [len(range(k, rows, count)) for k in range(count)]
        last = self.timetable.stages - 1
        shared: Shared = {}

        def microbatch(k: int) -> tuple[Any, Any, Any]:
            found: tuple[Any, Any, Any] = pytree.tree_unflatten([_rows_of(leaf, k, count) for leaf in leaves], spec)
            return found

        def loss_of(output: Any, wanted: Any) -> torch.Tensor:
            return loss_fn(output) if wanted is None else loss_fn(output, wanted)

        counted = Counted(own, reduction)
        total: torch.Tensor | None = None
        for k in range(count):
            with self._across(recording, k, shared, counted) as run:
                own_args, own_kwargs, wanted = microbatch(k)
                run.at(0, by_rows=count > 1 and not self.mixes_rows)
                output = self.model(*own_args, **own_kwargs)
                run.at(last, by_rows=False)
                if k == 0:
                    check_loss(loss_of, counted, output, wanted)
                    with belonging_to(None):
                        targets = [wanted, *(microbatch(other)[2] for other in range(1, count))]
                        counted.count(loss_of, output, targets)
                with counted.weighing(k):
                    loss = loss_of(output, wanted)
                _check_scalar(loss)
                if reduction == "mean":
                    loss = loss * (own[k] / rows)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        _add_gradients(shared)
        assert total is not None
        return total

    @contextmanager
    def _across(
        self,
        recording: Recording,
        microbatch: int,
        shared: Shared,
        counted: Counted | None,
    ) -> Iterator[_Across]:
        """Run the model across its stages."""
        for mesh in self.meshes:
            recording.join(mesh)
        run = _Across(self, recording, microbatch, shared, counted)
        task = None if counted is None else Task(0, microbatch)
        with belonging_to(task), register_module_forward_pre_hook(run.enter), run:
            yield run


class _Across(TorchFunctionMode):
    """Brings operands to the stage that works on them, and says of each op to which stage and microbatch it belongs.

    A module's inputs come to its stage. Elsewhere an op runs where its operands are; those that are on several stages
    come to the one whose module was run last, or to what it writes in place.
    """

    def __init__(self, pipe: Pipeline, recording: Recording, microbatch: int, shared: Shared, counted: Counted | None):
        super().__init__()
        self.pipe = pipe
        self.recording = recording
        self.microbatch = microbatch
        self.shared = shared
        self.counted = counted
        """None for a whole batch, without microbatches."""
        self.splits = counted is not None and pipe.timetable.microbatches > 1  # a batch is not seen as a whole
        self.mesh = pipe.meshes[0]
        self.by_rows = False
        self.moved: Shared = {}
        self.buffers = {id(buffer) for buffer in pipe.model.buffers()}

    def at(self, stage: int, *, by_rows: bool | None = None) -> None:
        """Work on another stage from here on, and with `by_rows` on each row of the batch by itself, or not."""
        self.by_rows = self.by_rows if by_rows is None else by_rows
        self.mesh = self.pipe.meshes[stage % len(self.pipe.meshes)]
        if self.counted is not None:
            set_task(Task(stage, self.microbatch, self.by_rows))

    def enter(self, module: nn.Module, args: Any) -> Any:
        """Before a module's forward pass."""
        if self.splits and isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training or module.running_mean is None:
                raise _statistics(type(module).__name__)
        stage = self.pipe.stages.enters.get(id(module))
        if stage is None:
            return None
        self.at(stage)
        return pytree.tree_map_only(DistributedTensor, lambda each: self.to(each, self.mesh), args)

    def to(self, tensor: DistributedTensor, mesh: Mesh) -> torch.Tensor:
        """A tensor on a mesh: brought there once in a microbatch, and a parameter once in a step."""
        if self.recording.where(tensor._ref) in (None, mesh):
            return tensor
        parameter = tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()
        known, key = self.shared if parameter else self.moved, (id(tensor), id(mesh))
        if key not in known:
            if parameter:
                alone: Any = tensor.detach()
                with belonging_to(None):
                    there: Any = transfer(alone, mesh).requires_grad_()
                known[key] = tensor, there
            else:
                known[key] = tensor, transfer(tensor, mesh)
        return known[key][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        writes |= bool(kwargs.get("inplace"))
        if self.splits:
            if func is F.batch_norm and (len(args) > 5 and args[5] or kwargs.get("training")):
                raise _statistics("batch_norm")
            if writes and args and id(args[0]) in self.buffers:
                raise ProgramError(
                    f"{name} on a buffer of the model, once for each microbatch",
                    hint="without microbatches it would be written once for the batch: write it outside of the "
                    "pipeline's step.",
                    source=user_source(),
                )
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        operands = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DistributedTensor)]
        meshes = {id(mesh) for each in operands if (mesh := self.recording.where(each._ref)) is not None}
        if len(meshes) > 1:
            mesh = self.recording.where(args[0]._ref) if writes and isinstance(args[0], DistributedTensor) else None
            into = mesh or self.mesh
            args, kwargs = pytree.tree_map_only(DistributedTensor, lambda each: self.to(each, into), (args, kwargs))
        if self.counted is not None and func in OF_CLASSES:
            if (mean := self.counted.mean(func, args, kwargs)) is not None:
                return mean
        return func(*args, **kwargs)


def _statistics(name: str) -> ProgramError:
    return ProgramError(
        f"{name} takes statistics of the whole batch, of which a microbatch has a part",
        hint="it would give other numbers than without microbatches, and waiting for all of them would undo the "
        "pipeline.\nnn.GroupNorm and nn.LayerNorm normalise each row by itself; pipe.model.eval() uses the running "
        "statistics;\nwith microbatches=1 it is exact.",
        source=user_source(),
    )


def _one_row(rows: int) -> ProgramError:
    return ProgramError(
        f"{rows} microbatches of one row: whether the model mixes the rows of a batch cannot be seen there",
        hint=f"take at most {rows // 2} microbatches; or, where it computes each row from itself alone, say "
        "pipeline(…, mixes_rows=True),\nwith which nothing is looked for.",
        source=user_source(),
    )


def _add_gradients(shared: Shared) -> None:
    """Bring the gradients of parameters that other stages have read to their own."""
    with torch.no_grad():
        for parameter, there in shared.values():
            found: Any = there.grad
            if found is None:
                continue
            gradient = transfer(found, parameter.mesh)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


def _rows(leaves: Sequence[Any], microbatches: int) -> int:
    """The rows of the batch. Raises ProgramError for tensors with different ones, and fewer than microbatches."""
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(sizes) != 1 or 0 in sizes:
        raise ProgramError(
            f"the tensors of a step have {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            hint="each has the batch in its first dim: the model and loss_fn may close over others.",
            source=user_source(),
        )
    rows = int(sizes.pop())
    if rows < microbatches:
        raise ProgramError(
            f"a batch of {rows} rows in {microbatches} microbatches",
            hint="each has at least one row.",
            source=user_source(),
        )
    return rows


def _rows_of(leaf: Any, microbatch: int, count: int) -> Any:
    """Every `count`-th row of a tensor, which each worker has of its own shard."""
    if not isinstance(leaf, torch.Tensor) or count == 1:
        return leaf
    if leaf.shape[0] % count:
        return leaf[microbatch::count]
    return leaf.unflatten(0, (leaf.shape[0] // count, count)).select(1, microbatch)


def _check_scalar(loss: torch.Tensor) -> None:
    if loss.ndim:
        raise ProgramError(
            f"loss_fn gives a tensor of shape {tuple(loss.shape)}",
            hint="a loss is one number: reduce it, as by .mean().",
            source=user_source(),
        )
