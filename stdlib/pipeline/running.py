"""`pipeline(model, mesh)`: a model in stages, and its training step in microbatches.

The step is traced microbatch by microbatch, each through all stages and back, as if there were one mesh: an op whose
operands are on several stages takes them to its own. The compiler then brings the ops into the schedule's order
(`monarch.compiler.passes.timetable`). So results have the same bits with every schedule, random numbers too, and stages
may read whatever they like: skip connections and shared weights are values that another stage reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monarch.compiler.errors import LayoutError, ProgramError, known_dims
from monarch.compiler.passes.following import RowsOnTape
from monarch.compiler.tape import Barrier, Timetable
from monarch.language import Mesh
from monarch.language.placing.distribute import module_to_mesh
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.repeating import Repeats
from monarch.language.recorder.tasks import belonging_to, take_timetable
from monarch.language.recorder.transfer import transfer
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor
from monarch.stdlib.pipeline.across import Across, Shared, Together, Waiting, rows_of, run_in_step
from monarch.stdlib.pipeline.costs import run_on
from monarch.stdlib.pipeline.counting import NotComparable, compare_calls
from monarch.stdlib.pipeline.cutting import Stages, balanced
from monarch.stdlib.pipeline.dry_run import examples
from monarch.stdlib.pipeline.hooks import once_a_step
from monarch.stdlib.pipeline.kept import Kept
from monarch.stdlib.pipeline.losses import Counted, adds_up
from monarch.stdlib.pipeline.schedules import order


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
    example: Any = None,
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

    `model` is a list of stages, each of which takes the output of the one before it, or one module. That is cut where
    `split_at` says: each module named there, and what is behind it in `model.named_modules()`, is the next stage;
    without, between modules, so that stages have about as many parameters, or with an `example`, so that they take
    about as long: a batch as the model takes it (a tensor, a tuple of arguments or a dict of those with names), on
    which the model is run without data, and the time of its ops is estimated. `pipe.costs` has it by stage. `schedule`
    is "gpipe", "1f1b", "interleaved" (with `virtual` stages for each group of workers, 2 by default), or "zero-bubble"
    (`monarch.stdlib.pipeline.order`). `layouts` are those of `module_to_mesh`, on the mesh of a stage:
    `mesh.slice(pipe=0)`. Parameters that are on a mesh already stay there. `mixes_rows` says that the model mixes the
    rows of a batch, and is to mix those of each microbatch: then nothing is refused for that. In microbatches of one
    row it cannot be seen, and has to be said.

    Raises LayoutError for an unknown mesh dim, ProgramError for a model that cannot be cut so, and ValueError for a
    schedule that does not fit.
    """
    if isinstance(split_at, str):
        raise ProgramError(
            f"split_at={split_at!r}", hint=f"name modules in a list: [{split_at!r}].", source=user_source()
        )
    if mesh_dim not in mesh.spec.sizes:
        raise LayoutError(
            f"unknown mesh dim '{mesh_dim}'",
            hint=known_dims(mesh_dim, mesh.spec, mesh.mesh_dim_names) + "\nName the stages' dim by mesh_dim=.",
            source=user_source(),
        )
    groups = mesh.spec.sizes[mesh_dim]
    if virtual is None:
        virtual = 2 if schedule == "interleaved" else 1
    timetable = order(schedule, groups, microbatches, virtual)
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    ran = None if example is None else run_on(whole, example, microbatches)
    if not isinstance(model, nn.Module):
        cuts = [str(at) for at in range(1, len(model))]
    elif split_at is not None:
        cuts = list(split_at)
    else:
        cuts = balanced(whole, timetable.stages, None if ran is None else ran.of_each)
    stages = Stages(whole, cuts)
    if stages.count != timetable.stages:
        raise ProgramError(
            f"{stages.count} stages for {timetable.stages} places: {mesh_dim}={groups}, {virtual} stages for each",
            hint=f"split the model at {timetable.stages - 1} modules.",
            source=user_source(),
        )
    costs = None
    if ran is not None:
        found = ran.seconds({id(module): stage for module, stage in stages.enters.items()})
        costs = tuple([found.get(stage, 0.0) for stage in range(stages.count)])
    meshes = [mesh.slice(**{mesh_dim: at}) for at in range(groups)]
    homes = {name: meshes[stage % groups] for name, stage in stages.of.items()}
    module_to_mesh(whole, meshes[0], layouts, meshes=homes)
    return Pipeline(whole, stages, meshes, timetable, mixes_rows, costs)


class Pipeline(nn.Module):
    """A model whose stages are on meshes of their own. Made by `pipeline`.

    `meshes`     those of the groups of workers
    `timetable`  what they do, and when: `print(pipe.timetable)`, `pipe.timetable.bubble`
    `costs`      estimated seconds that each stage takes for a microbatch, forward and backward; None without an example
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        meshes: list[Mesh],
        timetable: Timetable,
        mixes_rows: bool,
        costs: tuple[float, ...] | None,
    ) -> None:
        super().__init__()
        self.costs = costs
        self.mixes_rows = mixes_rows
        self.model = model
        self.stages = stages
        self.meshes = meshes
        self.timetable = timetable
        self._with_rows: set[tuple[str, str]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model on a whole batch, one stage after the other: for evaluation. ProgramError outside of a program."""
        recording = current_program()
        if recording is None:
            raise ProgramError(
                "a pipeline's model outside of a program",
                hint="@monarch.program\ndef evaluate(x):\n    return pipe(x)",
                source=user_source(),
            )
        return Across(self, recording, 0, {}, None).run(args, kwargs)

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
        a batch that they do not divide differ by one row, and count so. A call of the model that mixes rows, as batch
        normalisation does, is made once for the whole batch, where all microbatches have come to it; and so is a loss
        that is neither a mean nor a sum over rows. `monarchc inspect` shows the cost of the waiting.

        Raises ProgramError outside of a program, and for tensors that do not have the batch's rows; ValueError for
        another `reduction`.
        """
        recording = take_timetable(self.timetable)
        if not torch.is_grad_enabled():
            raise ProgramError(
                "a pipeline's step where no gradients are computed, as in torch.no_grad()",
                hint="pipe(x) in a program runs the model on a whole batch, for evaluation.",
                source=user_source(),
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: it must be 'mean' or 'sum'")
        count = self.timetable.microbatches
        leaves, spec = pytree.tree_flatten((args, kwargs, target))
        _check_open(leaves)
        rows = _rows(leaves, count)
        if rows == count > 1 and not self.mixes_rows:
            raise _one_row(rows)
        own = _of_each(rows, count)
        shared: Shared = {}
        counted = Counted(own, reduction)
        together = None if count == 1 else Together(own, Kept(self.model, self._with_rows))
        runs = [Across(self, recording, k, shared, counted, together) for k in range(count)]
        if together is not None:
            together.runs = runs
            if not self.mixes_rows:
                runs[0].rows = RowsOnTape(recording.tape, recording.mesh.spec)
        given: list[tuple[Any, Any, Any]] = []
        for k, run in enumerate(runs):
            with run.working():
                own_rows = [rows_of(leaf, k, count) for leaf in leaves]
                own_rows = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in own_rows]
                given.append(pytree.tree_unflatten(own_rows, spec))

        def loss_of(output: Any, wanted: Any) -> torch.Tensor:
            return loss_fn(output) if wanted is None else loss_fn(output, wanted)

        def loss_at(k: int, output: Any) -> torch.Tensor:
            with self._at_end(runs[k]), counted.weighing(k):
                loss = loss_of(output, given[k][2])
                _check_scalar(loss)
                return loss * (own[k] / rows) if reduction == "mean" else loss

        losses: list[torch.Tensor] = []  # of the microbatches, where they add up

        def took(k: int, output: Any) -> None:
            """A microbatch's loss, while the model's attributes have this one's values."""
            if k:
                losses.extend([loss_at(k, output)] if losses else [])
                return
            with self._at_end(runs[0]):
                if adds_up(loss_of, counted, output, given[0][2]) is False:
                    return
                if together is not None and self._goes_other_ways(recording, loss_of, counted, (output, given[0][2])):
                    return
            try:
                with self._at_end(runs[0]), belonging_to(None):
                    counted.count(loss_of, output, [wanted for _, _, wanted in given])
                alike, first = runs[0].sums_up((output, given[0][2]), lambda: loss_at(0, output))
            except (RuntimeError, ValueError, IndexError):
                if together is None:
                    raise
                return  # it may take the rows of the batch alone
            losses.extend([first] if alike else [])

        with once_a_step(self.model.parameters()):
            try:
                outputs = [runs[0].run(*given[0][:2])]
            except Waiting:
                outputs = run_in_step(runs, given, took)
            else:
                took(0, outputs[0])
            if losses and len(outputs) < count:  # no microbatch needs another: each goes there and back before the next
                total = self._backward(runs[0], losses)
                repeats = Repeats(recording, (self.model, loss_fn))
                for k in range(1, count):
                    rows_of_k = [leaf for leaf in pytree.tree_leaves(given[k]) if isinstance(leaf, DistributedTensor)]

                    def traced(k: int = k) -> torch.Tensor:
                        return self._backward(runs[k], [loss_at(k, runs[k].run(*given[k][:2]))])

                    total = total + repeats.loss_of(k, own[k], rows_of_k, traced)
            elif losses:
                total = self._backward(runs[0], losses)
            else:
                assert together is not None
                outputs = outputs if len(outputs) == count else run_in_step(runs, given)
                runs[0].run(*given[0][:2])  # again: the model's state is the one that was followed
                with self._at_end(runs[0]), belonging_to(None), counted.of_all():
                    columns = [pytree.tree_flatten(output) for output in outputs]
                    merged = [runs[0].merged(column) for column in zip(*(each for each, _ in columns), strict=True)]
                    output = pytree.tree_unflatten(merged, columns[0][1])
                    loss = runs[0].of_all(merged, lambda: loss_of(output, target))
                _check_scalar(loss)
                together.barriers.append(Barrier(self.timetable.stages - 1, "loss_fn"))
                total = self._backward(runs[0], [loss])
            _add_gradients(shared)
        if together is not None and not self.mixes_rows:
            together.kept.end()
        if together is not None and not self.mixes_rows and recording.repeatable is not None:
            runs[0].check_counts((args, kwargs), recording.repeatable.undone)
        if together is not None and together.barriers:
            recording.tape.timetable = replace(self.timetable, barriers=tuple(together.barriers))
        return total

    def _goes_other_ways(
        self, recording: Recording, loss: Callable[..., torch.Tensor], counted: Counted, given: tuple[Any, Any]
    ) -> bool:
        """Whether a loss calls other functions for the rows of the batch than for those of the first microbatch, or
        computes with other numbers so that those of microbatches do not add up: `.sum() / len(y)` does."""
        if self.mixes_rows or recording.repeatable is None:
            return False
        try:
            with counted.trying():
                found = compare_calls(loss, (given, {}), counted.rows, recording.repeatable.undone)
        except NotComparable:
            return False
        if found.diverges is not None:
            return True
        return found.has_other_numbers and not adds_up(loss, counted, *given, rows=counted.rows)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm, over all of them as one vector, is at most `max_norm`:
        as `torch.nn.utils.clip_grad_norm_` does on one mesh. Gives the norm before, on the last stage's mesh."""
        found: dict[Mesh, list[tuple[int, Any]]] = {}
        for at, parameter in enumerate(self.parameters()):
            if parameter.grad is not None:
                mesh: Mesh = parameter.mesh  # type: ignore[attr-defined]
                found.setdefault(mesh, []).append((at, parameter.grad))
        if not found:
            return torch.zeros(())
        norms: list[tuple[int, Any]] = []
        for grads in found.values():
            own: Any = torch.stack([torch.linalg.vector_norm(each, norm_type) for _, each in grads])
            norms += zip([at for at, _ in grads], own.to(self.meshes[-1]), strict=True)
        in_order = [norm for _, norm in sorted(norms, key=lambda entry: entry[0])]  # as with every other schedule
        total = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
        scale: Any = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for mesh, grads in found.items():
            there = scale.to(mesh)
            for _, each in grads:
                each.mul_(there)
        return total

    def _backward(self, run: Across, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the losses, whose gradients are added to those of the parameters."""
        with run.again().working():
            torch.autograd.backward(losses)
        total = losses[0].detach()
        for loss in losses[1:]:
            total = total + loss.detach()
        return total

    @contextmanager
    def _at_end(self, run: Across) -> Iterator[None]:
        """Behind the model, on its last stage."""
        with run.working():
            run.at(self.timetable.stages - 1, by_rows=False)
            yield


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


def _check_open(leaves: Sequence[Any]) -> None:
    """Raise ProgramError for an argument of a class of its own whose tensors microbatches would not have rows of."""
    for leaf in leaves:
        if isinstance(leaf, (torch.Tensor, nn.Module, type)) or callable(leaf):
            continue
        within = pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
        if any(isinstance(each, torch.Tensor) for each in within):
            name = type(leaf).__name__
            raise ProgramError(
                f"an argument of a step is a {name}, whose tensors would not be split into microbatches",
                hint=f"torch.export.register_dataclass({name})      # right, once, where it is a dataclass\n"
                "or give its tensors by themselves, or in a dict, list or tuple.",
                source=user_source(),
            )


def _rows(leaves: Sequence[Any], microbatches: int) -> int:
    """The rows of the batch. Raises ProgramError for tensors with different ones, and fewer than microbatches."""
    sizes: list[int] = []  # named ones have no hash
    for size in [leaf.shape[0] if leaf.ndim else 0 for leaf in leaves if isinstance(leaf, torch.Tensor)]:
        if size not in sizes:
            sizes.append(size)
    if len(sizes) != 1 or 0 in sizes:
        raise ProgramError(
            f"the tensors of a step have {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            hint="each has the batch in its first dim: the model and loss_fn may close over others.",
            source=user_source(),
        )
    rows = sizes.pop()
    if rows < microbatches:
        raise ProgramError(
            f"a batch of {rows} rows in {microbatches} microbatches",
            hint="each has at least one row.",
            source=user_source(),
        )
    return rows


def _of_each(rows: int, count: int) -> list[int]:
    """The rows of each microbatch. Where these differ, they are no named sizes."""
    if isinstance(rows, torch.SymInt):
        if rows % count:
            raise ProgramError(
                f"{count} microbatches do not divide the {examples([rows])[0]} rows of its batch", source=user_source()
            )
        return [rows // count] * count
    return [len(range(k, rows, count)) for k in range(count)]


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise ProgramError(
            f"loss_fn gives {type(loss).__name__}, and no tensor",
            hint="it returns the loss that it computes: lambda output, target: F.mse_loss(output, target)",
            source=user_source(),
        )
    if loss.ndim:
        raise ProgramError(
            f"loss_fn gives a tensor of shape {tuple(loss.shape)}",
            hint="a loss is one number: reduce it, as by .mean().",
            source=user_source(),
        )
