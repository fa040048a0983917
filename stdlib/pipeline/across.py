"""A model run across its stages, for one microbatch or for all of them in step.

Where an op needs the rows of the whole batch, such as batch normalisation, all microbatches are traced as far as that,
and it is called once on all rows. A microbatch that stops there is run again later from the model's first line: what it
called before gives what it gave then, so nothing is traced twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.passes.following import RowsOnTape
from monarch.compiler.passes.rows import RowNumbers, Way, row_numbers
from monarch.compiler.tape import Barrier, Task, Value
from monarch.language import Mesh
from monarch.language.errors import OperatorError
from monarch.language.recorder.recording import Recording, current
from monarch.language.recorder.refusals import asking, refuse
from monarch.language.recorder.tasks import belonging_to, set_task
from monarch.language.recorder.transfer import transfer
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor
from monarch.stdlib.pipeline.counting import (
    CallComparison,
    CallDifference,
    NotComparable,
    compare_calls,
    counts_rows,
    other_way,
    warn_not_comparable,
)
from monarch.stdlib.pipeline.dry_run import READS, examples
from monarch.stdlib.pipeline.inner import (
    check_inner,
    gradients_of_all,
    in_transform,
    one_by_one,
    several,
    transform,
    within,
)
from monarch.stdlib.pipeline.kept import Kept, takes_statistics, writes
from monarch.stdlib.pipeline.losses import OF_CLASSES, Counted

if TYPE_CHECKING:
    from monarch.stdlib.pipeline.running import Pipeline

Shared = dict[tuple[int, int], tuple[DistributedTensor, DistributedTensor]]
"""Tensors that a stage reads and another has, with their stand-ins there: by both their ids."""


class Waiting(BaseException):
    """A microbatch has come to a call on the whole batch. No model catches it by `except Exception`."""

    def __init__(self, number: int, func: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.number, self.func, self.args_, self.kwargs = number, func, args, kwargs


class Together:
    """The state that the microbatches of a step share.

    `barriers`  the calls on the whole batch, in order
    `shapes`    of the results of a call on the whole batch, by its number, for the first microbatch's rows; None where
                all microbatches have the same results, which are what the model keeps
    `waiting`   the calls at which the other microbatches wait
    `kept`      the model's parameters and buffers
    """

    def __init__(self, rows: Sequence[int], kept: Kept) -> None:
        self.rows = rows
        self.kept = kept
        self.barriers: list[Barrier] = []
        self.shapes: dict[int, list[tuple[int, ...]] | None] = {}
        self.waiting: list[Waiting] = []
        self.runs: list[Across] = []


class Across(TorchFunctionMode):
    """Brings operands to the stage that works on them, and says of each op to which stage and microbatch it belongs.

    A module's inputs come to its stage. Elsewhere an op runs where its operands are; those that are on several stages
    come to the one whose module was run last, or to the tensor that it writes in place.
    """

    def __init__(
        self,
        pipe: Pipeline,
        recording: Recording,
        microbatch: int,
        shared: Shared,
        counted: Counted | None,
        together: Together | None = None,
    ) -> None:
        """Without `counted` it is a whole batch, without microbatches; `together` is None where each microbatch counts
        as a batch."""
        super().__init__()
        self.pipe = pipe
        self.recording = recording
        self.microbatch = microbatch
        self.shared = shared
        self.counted = counted
        self.together = together
        self.stage, self.mesh = 0, pipe.meshes[0]
        self.moved: Shared = {}
        self.rows: RowsOnTape | None = None
        """Of the first microbatch: where its rows are."""
        self._calls: list[tuple[Any, Any]] = []
        """The model's calls, with their results."""
        self._dims: dict[int, list[int | None]] = {}
        """The dims with rows of the results of a microbatch's own calls, by their number."""
        self._next = -1
        """The number of the model's next call; -1 outside of it."""
        self._checked = 0
        """So many ops of the tape are known not to write the model's state."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run a part of the step for this microbatch."""
        for mesh in self.pipe.meshes:
            self.recording.join(mesh)
        task = None if self.counted is None else Task(self.stage, self.microbatch)
        with belonging_to(task), register_module_forward_pre_hook(self.enter), self:
            yield

    def run(self, args: Any, kwargs: Any) -> Any:
        """The model's output. Raises Waiting where it comes to a call on the whole batch, and others have not."""
        with self.working():
            self.at(0, by_rows=self.rows is not None)
            self._next = 0
            if self.together is not None and not self.pipe.mixes_rows:
                self.together.kept.begin()
            self._checked = len(self.recording.tape.ops)
            try:
                output = self.pipe.model(*args, **kwargs)
                self._check_writes()
            finally:
                self._next = -1
        if self.together is not None and self.rows is not None:
            self.together.kept.note(self.has_rows)
        return output

    def again(self) -> Across:
        """Brings operands to stages while gradients are computed: activation checkpoints run modules then."""
        return Across(self.pipe, self.recording, 0, self.shared, None)

    def at(self, stage: int, *, by_rows: bool | None = None) -> None:
        """Work on another stage from here on, and with `by_rows` on each row of the batch by itself, or not."""
        self.by_rows = self.by_rows if by_rows is None else by_rows
        self.stage, self.mesh = stage, self.pipe.meshes[stage % len(self.pipe.meshes)]
        if self.counted is not None:
            set_task(Task(stage, self.microbatch, self.by_rows))

    by_rows = False

    def enter(self, module: nn.Module, args: Any) -> Any:
        """Before a module's forward pass."""
        stage = self.pipe.stages.enters.get(module)
        if stage is None:
            return None
        self.at(stage)
        number, self._next = self._next, -1
        try:
            return pytree.tree_map_only(DistributedTensor, lambda each: self.to(each, self.mesh), args)
        finally:
            self._next = number

    def sums_up(self, given: Any, loss: Callable[[], torch.Tensor]) -> tuple[bool, torch.Tensor]:
        """The first microbatch's loss, and whether by the rules those of all add up to that of the batch. `given` are
        the values that it is computed from. One row does not show it."""
        if self.together is None or self.together.rows[0] == 1:
            return True, loss()
        assert self.counted is not None
        followed = self.rows is not None
        tape = self.rows or RowsOnTape(self.recording.tape, self.recording.mesh.spec, gradients=False)
        rows: dict[Value, int | None] = {}
        for each in _tensors(given):
            value = self.recording.value_of(each._ref)
            whole = each.ndim and each.shape[0] == self.together.rows[0]
            rows[value] = tape.dim_of(value) if followed else 0 if whole else None
        way, made = self._way_of(tape, rows, loss)
        return way is Way.SUM or (way is not Way.OTHER and self.counted.reduction == "mean"), made

    def of_all(self, merged: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A loss of the outputs of all microbatches. Raises ProgramError where it reads rows of one besides."""
        if self.rows is None:
            return loss()
        rows: dict[Value, int | None] = {self.recording.value_of(each._ref): None for each in _tensors(merged)}
        way, made = self._way_of(self.rows, rows, loss)
        if way is not None:
            raise ProgramError(
                "loss_fn reads a value that the model has computed of a microbatch's rows, and that is not its output",
                hint="it is called once, on the outputs of all microbatches: return the value from the model's\n"
                "forward, and take it from the output in loss_fn.",
                source=user_source(),
            )
        return made

    def _way_of(
        self, tape: RowsOnTape, rows: dict[Value, int | None], loss: Callable[[], torch.Tensor]
    ) -> tuple[Way | None, torch.Tensor]:
        made: list[Any] = []

        def written() -> Value:
            made.append(loss())
            return self.recording.value_of(made[0]._ref)

        return tape.way_of(rows, tape is self.rows, written), made[0]

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
        no_call = name == "__get__" or name in READS or func is torch._C._set_grad_enabled
        if self.together is None or self._next < 0 or no_call:
            return self._call(func, args, kwargs)
        if transform() is not None:  # its tensors end with it, so its calls are made again, not given again
            return self._within_transform(func, args, kwargs)
        if current.recording is None:  # it computes what Python asks for, of values that no row has gone into
            return func(*args, **kwargs)
        if current.recording is not self.recording:
            if self.rows is not None:
                raise refuse(_in_region(current.recording.inside))
            return self._call(func, args, kwargs)
        if func is torch.autograd.grad and kwargs.get("is_grads_batched") and not self.pipe.mixes_rows:
            return one_by_one(lambda f, *args, **kwargs: self.__torch_function__(f, types, args, kwargs), args, kwargs)
        number, self._next = self._next, self._next + 1
        if number < len(self._calls):
            known, result = self._calls[number]
            if known is not func:
                raise _other_way(name)
            return result
        self._check_writes()
        if (stale := self.together.kept.check_read(_tensors((args, kwargs)))) is not None:
            raise refuse(stale)
        if takes_statistics(func, args, kwargs):
            self.together.shapes.setdefault(number, [tuple(args[0].shape)])
        elif self.together.kept.is_written(func, args, kwargs):
            self.together.shapes.setdefault(number, None)
        elif func is torch.autograd.grad and self.rows is not None:
            if (wrong := check_inner(args[1])) is not None:
                raise refuse(wrong)
            if not self.together.barriers and all(map(self.has_rows, several(args[1]))):
                result = func(*args, **kwargs)
                self._note_gradients(args[1], result)
                self._calls.append((func, result))
                return result
            self.together.shapes[number] = []
        elif number not in self.together.shapes:
            try:
                result = self._call(func, args, kwargs)
            except OperatorError as failed:
                failed.hint = f"{failed.hint}\n{self._rows_here()}".lstrip()
                raise
            if (error := self._mixed_by(result)) is None:
                self._calls.append((func, result))
                if self.rows is not None:
                    self._dims[number] = [self.rows.dim_of(self.recording.value_of(e._ref)) for e in _tensors(result)]
                return result
            if writes(func, kwargs) or name in _RECURRENT or isinstance(error, RowNumbers):
                raise refuse(error)
            self.together.shapes[number] = [tuple(each.shape) for each in _tensors(result)]
        if self.microbatch or len(self.together.waiting) < len(self.together.rows) - 1:
            raise Waiting(number, func, args, kwargs)
        return self._joined(Waiting(number, func, args, kwargs))

    def _rows_here(self) -> str:
        """The possible cause of a failure of PyTorch's call for a microbatch."""
        assert self.together is not None
        own, whole = self.together.rows[self.microbatch], sum(self.together.rows)
        return (
            f"The model is called for the {own} rows of a microbatch, of {whole} of the batch; what mixes rows has had "
            f"all {whole}.\nIf it is right for {whole} rows and not for {own}: take fewer microbatches, or compute it "
            "in loss_fn."
        )

    def _within_transform(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "a call")
        assert self.together is not None
        if takes_statistics(func, args, kwargs) or self.together.kept.is_written(func, args, kwargs):
            raise refuse(in_transform(name, user_source()))
        taken = 0 if self.rows is None else len(self.rows.by_number)
        result = self._call(func, args, kwargs)
        error = self._mixed_by(result)
        if self.rows is not None and len(self.rows.by_number) > taken:
            error = self.rows.by_number[taken]  # its sizes are not compared with those of the batch
        if error is not None:
            raise refuse(error if isinstance(error, RowNumbers) else in_transform(name, error.source))
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        operands = _tensors((args, kwargs))
        meshes = {id(mesh) for each in operands if (mesh := self.recording.where(each._ref)) is not None}
        if len(meshes) > 1 and func is not torch.autograd.grad:
            changed = args[0] if writes(func, kwargs) else None
            into = (self.recording.where(changed._ref) if isinstance(changed, DistributedTensor) else None) or self.mesh
            args, kwargs = pytree.tree_map_only(DistributedTensor, lambda each: self.to(each, into), (args, kwargs))
        if self.counted is not None and func in OF_CLASSES:
            if (mean := self.counted.mean(func, args, kwargs)) is not None:
                return mean
        return func(*args, **kwargs)

    def check_counts(self, given: Any, undone: Callable[[], AbstractContextManager[None]]) -> None:
        """Raise ProgramError where the model, on these arguments, has computed with the number of the first
        microbatch's rows; warn where that is not known."""
        assert self.together is not None
        numbered, unknown = False, None
        try:
            numbered = self._numbers_rows(compare_calls(self.pipe.model, given, self.together.rows, undone, self._dims))
        except NotComparable as error:
            unknown = error.why, error.source  # and not the error, which has the model's frames
        if not numbered and self.rows is not None and self.rows.by_number:
            raise self.rows.by_number[0]
        if unknown is not None:
            warn_not_comparable(*unknown)

    def _numbers_rows(self, found: CallComparison) -> bool:
        """Whether the dry run made the model's call too, and its rows have the batch's numbers. Raises ProgramError as
        `check_counts` does."""
        assert self.together is not None
        own, whole = self.together.rows[0], sum(self.together.rows)
        numbered = True
        for number, (func, given) in enumerate(self._calls):
            if found.diverges is not None and found.diverges[0] == number:
                raise other_way(found.diverges[1], own, whole, found.diverges[2])
            dry = found.of(number)
            if dry is None or dry[0].func is not func:
                name = getattr(func, "__name__", "a function")
                warn_not_comparable(f"the program calls {name}, where it calls something else", None)
                return False
            call, results = dry
            difference, joint = found.differences.get(number), number in self.together.shapes
            if difference is not None and (joint or not difference.size):
                raise counts_rows(call.name, difference, own, whole)
            first = joint and number in found.sized and func is not torch.autograd.grad  # it has the first one's
            if number in found.numbered or first:
                raise row_numbers(call.name, found.numbered.get(number, found.sized.get(number)))
            line = found.sources.get(number)
            of_each = zip(self._dims.get(number, ()), _tensors(given), call.results, results, strict=False)
            for dim, made, of_own, of_whole in of_each:
                if dim is not None and dim not in _differing(of_own, of_whole):
                    raise _no_rows(call.name, of_own, of_whole, line)
                if dim is not None and _differing(examples(made.shape), of_whole) not in ([], [dim]):
                    several = CallDifference(False, list(made.shape), list(of_whole), line, gives=True)
                    raise counts_rows(call.name, several, own, whole)
            if call.name == "arange" and (sizes := results[0][0]) != call.results[0][0]:
                numbered = numbered and sizes * own == call.results[0][0] * whole
        return numbered

    # -- calls on the whole batch --------------------------------------------------------------------------------

    def _check_writes(self) -> None:
        """Raise ProgramError where the ops since the last call change the model's state."""
        if self.together is None:
            return
        if (error := self.together.kept.check(self.recording, self._checked)) is not None:
            raise refuse(error)
        self._checked = len(self.recording.tape.ops)

    def _joined(self, own: Waiting) -> Any:
        """Make a call for all microbatches, and give its part of the first one; the others find theirs when they are
        run again."""
        together = self.together
        assert together is not None
        calls = [own, *together.waiting]
        if any((each.number, each.func) != (own.number, own.func) for each in calls):
            raise _other_way(getattr(own.func, "__name__", "a call"))
        together.waiting = []
        if own.func is torch.autograd.grad:
            with belonging_to(None):
                of_each = gradients_of_all([(each.args_, each.kwargs) for each in calls], self.has_rows)
            self._note_gradients(own.args_[1], of_each[0])
            together.barriers.append(Barrier(self.stage, "torch.autograd.grad"))
            for run, given in zip(together.runs, of_each, strict=True):
                run._calls.append((own.func, given))
            return self._calls[-1][1]
        leaves = [pytree.tree_flatten((each.args_, each.kwargs)) for each in calls]
        with belonging_to(None):
            columns = list(zip(*(each for each, _ in leaves), strict=True))
            merged = [self.merged(column) for column in columns]
            for (first, *_), whole in zip(columns, merged, strict=True):
                if first is whole and isinstance(first, DistributedTensor) and self._counts(first):
                    raise refuse(row_numbers(getattr(own.func, "__name__", "a call"), user_source()))
            try:
                result = self._call(own.func, *pytree.tree_unflatten(merged, leaves[0][1]))
            except OperatorError as error:
                raise _not_joint(getattr(own.func, "__name__", "a call"), error) from error
        if any(
            isinstance(each, DistributedTensor) and each is not column[0]
            for each, column in zip(merged, columns, strict=True)
        ):
            together.barriers.append(Barrier(self.stage, getattr(own.func, "__name__", str(own.func))))
        found, spec = pytree.tree_flatten(result)
        shapes, name = together.shapes[own.number], getattr(own.func, "__name__", "a call")
        if shapes is not None and len(shapes) != len(_tensors(result)):
            raise refuse(_no_rows(name, len(shapes), len(_tensors(result))))
        own_shapes = iter(shapes or ())
        parts = [
            self._parts(each, next(own_shapes))
            if shapes is not None and isinstance(each, DistributedTensor)
            else [each] * len(calls)
            for each in found
        ]
        self._checked = len(self.recording.tape.ops)
        for run, part in zip(together.runs, zip(*parts, strict=True), strict=True):
            run._calls.append((own.func, pytree.tree_unflatten(list(part), spec)))
        return self._calls[-1][1]

    def merged(self, values: Sequence[Any]) -> Any:
        """The microbatches' values at one place, as one value of the whole batch."""
        first = values[0]
        if not isinstance(first, DistributedTensor) or all(each is first for each in values):
            return first
        dim: int | None = 0
        if self.rows is not None:
            dim = self.rows.dim_of(self.recording.value_of(first._ref))
        if dim is None:  # each has made the same
            return first
        within = self._within_row(first.shape[dim])
        rows = [each.movedim(dim, 0) for each in values]
        if within > 1:  # rows that were flattened with the dims behind
            rows = [each.unflatten(0, (-1, within)) for each in rows]
        if len({each.shape[0] for each in rows}) == 1:
            whole = torch.stack(rows, 1).flatten(0, 1)
        else:
            order = sorted(range(sum(each.shape[0] for each in rows)), key=lambda row: (row % len(rows), row))
            place = torch.empty(len(order), dtype=torch.int64)
            place[torch.tensor(order)] = torch.arange(len(order))
            whole = torch.cat(rows).index_select(0, place)
        return (whole.flatten(0, 1) if within > 1 else whole).movedim(0, dim)

    def _within_row(self, size: int) -> int:
        """How many entries each row has along the dim with rows, of a size that the first microbatch has; 1 where they
        are not those of its rows, but of half of them, say."""
        assert self.together is not None
        rows = self.together.rows[0]
        return 1 if size % rows else size // rows

    def _counts(self, tensor: DistributedTensor) -> bool:
        """Whether a value numbers the first microbatch's rows, as far as its shape says."""
        assert self.together is not None
        rows = self.together.rows[0]
        return self.rows is not None and rows > 1 and self.rows.counts(self.recording.value_of(tensor._ref), rows)

    def _parts(self, whole: DistributedTensor, shape: tuple[int, ...]) -> list[Any]:
        """The rows of each microbatch, of which the first has this shape; the value itself where it has none."""
        assert self.together is not None
        runs = self.together.runs
        dim = next((at for at, (own, all_) in enumerate(zip(shape, whole.shape, strict=True)) if own != all_), None)
        if dim is None:
            return [whole] * len(runs)
        within = self._within_row(shape[dim])
        found: list[Any] = []
        for microbatch in range(len(runs)):
            with belonging_to(Task(self.stage, microbatch)):
                rows = whole.movedim(dim, 0)
                rows = rows if within == 1 else rows.unflatten(0, (-1, within))
                rows = rows_of(rows, microbatch, len(runs)).clone()  # the model may write there
                set_task(Task(self.stage, microbatch, self.by_rows))
                found.append((rows if within == 1 else rows.flatten(0, 1)).movedim(0, dim))
        return found

    def has_rows(self, tensor: Any) -> bool:
        """Whether a tensor of the first microbatch has its rows."""
        assert self.rows is not None
        return self.rows.dim_of(self.recording.value_of(within(tensor)._ref)) is not None

    def _note_gradients(self, inputs: Any, gradients: Any) -> None:
        """Note which of the first microbatch's gradients have its rows."""
        assert self.rows is not None
        pairs = [(g, of) for g, of in zip(gradients, several(inputs), strict=True) if g is not None]
        value_of = self.recording.value_of
        values = [(value_of(within(g)._ref), value_of(within(of)._ref)) for g, of in pairs]
        with asking():
            self.rows.note_gradients(dict(values))

    def _mixed_by(self, result: Any) -> ProgramError | None:
        """The error of a call with this result, if it mixes the rows of the first microbatch."""
        if self.rows is None:
            return None
        values = [self.recording.value_of(each._ref) for each in _tensors(result)]
        with asking():
            return self.rows.mixed_by(values)


def rows_of(leaf: Any, microbatch: int, count: int) -> Any:
    """Every `count`-th row of a tensor, which each worker has of its own shard."""
    if not isinstance(leaf, torch.Tensor) or count == 1:
        return leaf
    if leaf.shape[0] % count:
        return leaf[microbatch::count]
    return leaf.unflatten(0, (leaf.shape[0] // count, count)).select(1, microbatch)


def run_in_step(
    runs: Sequence[Across],
    given: Sequence[tuple[Any, Any, Any]],
    took: Callable[[int, Any], None] = lambda k, output: None,
) -> list[Any]:
    """The model's outputs for all microbatches, which `took` gets one after the other. Each is run as far as it comes
    without the others, in turns."""
    outputs: list[Any] = [None] * len(runs)
    left = list(range(len(runs)))
    while left:
        for k in tuple(left):
            try:
                outputs[k] = runs[k].run(*given[k][:2])
                left.remove(k)
                took(k, outputs[k])
            except Waiting as waiting:
                together = runs[k].together
                assert together is not None
                together.waiting += [waiting] * (k > 0)
        if 0 < len(left) < len(runs):
            raise _other_way("a function")
    return outputs


def _tensors(tree: Any) -> list[DistributedTensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, DistributedTensor)]


_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Loops over a sequence: their first state has each microbatch's rows and is made of zeros, so it cannot be merged."""


def _not_joint(name: str, error: OperatorError) -> ProgramError:
    return ProgramError(
        f"{name} fails on the rows of all microbatches, for which it is called as no rule says that it mixes none",
        hint=f"{error.message}\nWhere it takes each row from itself alone, as by torch.arange(x.shape[0]) or in layers "
        "of\nexpert_parallel, say pipeline(…, mixes_rows=True).",
        source=error.source,
    )


def _differing(first: Sequence[int], second: Sequence[int]) -> list[int]:
    if len(first) != len(second):
        return []
    return [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def _in_region(inside: str) -> ProgramError:
    return ProgramError(
        f"whether {inside} mixes the rows of the batch is unknown, in a pipeline's model",
        hint="say pipeline(…, mixes_rows=True): each microbatch has branches and loops of its own then, and is right "
        "where\nthe model computes each row from itself alone; or write it without, as a loop of Python's.",
        source=user_source(),
    )


def _no_rows(name: str, first: Any, whole: Any, source: Source | None = None) -> ProgramError:
    def shown(given: Any) -> str:
        return f"{given} tensors" if isinstance(given, int) else str(list(given))

    return ProgramError(
        f"{name} gives {shown(whole)} for the rows of the batch, and {shown(first)} for those of the first microbatch, "
        "which are none of them",
        hint="a call that mixes rows, or that no rule knows, is made on the whole batch, and each microbatch goes on "
        "with its rows.\nKeep the batch as a dim of its own, or in front of those that it is flattened with:\n"
        "for row in h: …                               # wrong; torch.vmap(f)(h) is right, where f takes one row\n"
        "torch.cat([a, b])                             # wrong; torch.stack([a, b], 1).flatten(0, 1) is right\n"
        "Or say pipeline(…, mixes_rows=True), where each microbatch is mixed by itself.",
        source=source or user_source(),
    )


def _other_way(name: str) -> ProgramError:
    return ProgramError(
        f"the model calls {name} where it called something else for another microbatch",
        hint="where a call needs all microbatches, these are traced in step, each as far as that, and then on:\n"
        "what the model calls may depend on the shapes of its inputs alone.",
        source=user_source(),
    )
