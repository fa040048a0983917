"""Branches and loops on values: `cond` and `while_loop`. (`scan.py` has the loop over a tensor's elements.)

In a program the workers decide by themselves, each on the same bits. Outside of programs these are Python's own `if`
and `while`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.tape import Value
from monarch.language.errors import OperatorError
from monarch.language.recorder.differentiable import (
    Differentiable,
    carried_differ,
    shown,
    tensor_of,
    values_of,
    zeros_of,
)
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.regions import (
    RegionOp,
    RegionRecording,
    TracedRegion,
    own_values,
    recording_to,
    restored,
    snapshot,
    trace_region,
)
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: tuple[Any, ...] | list[Any] = ()
) -> Any:
    """`true_fn(*operands)` where `pred` is true, else `false_fn(*operands)`.

    `pred` is a tensor of one element, or a bool. Both functions give tensors (or lists, tuples and dicts of these) of
    the same shapes and dtypes; a number that they give is a tensor without dims, a float one of float64. They may read
    other values of the program, and write to state: the step keeps what the branch that runs has written.
    Differentiable; the backward pass runs the branch again. Raises ProgramError where the branches differ in what they
    give, and OperatorError for a predicate of several elements.
    """
    recording = current_program()
    if not isinstance(pred, torch.Tensor) or recording is None:
        return (true_fn if pred else false_fn)(*operands)
    predicate = _predicate(recording, pred)
    branches = [
        trace_region(recording, f"{name} of cond", _giving_tensors(function), lambda region: ([], operands))
        for name, function in (("true_fn", true_fn), ("false_fn", false_fn))
    ]
    first, second = branches
    if (first.spec, first.tensors, first.types) != (second.spec, second.tensors, second.types):
        raise _branches_differ(first, second)
    return restored(first, _Cond(recording, branches, predicate).run())


def _giving_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with tensors for the numbers that it gives."""

    def given(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        return leaf

    return lambda *operands: pytree.tree_map(given, function(*operands))


def _predicate(recording: Recording, pred: torch.Tensor) -> Value:
    truth = _truth(pred, "the predicate of cond")
    return snapshot(recording, values_of(recording, [truth])[0])


def _branches_differ(first: TracedRegion, second: TracedRegion) -> ProgramError:
    return ProgramError(
        "true_fn and false_fn of cond give different results",
        hint="\n".join(f"{each.region.inside} gives {shown(each.types)}" for each in (first, second))
        + "\nShapes, dtypes and structure have to be the same: cast or expand one of them.",
        source=user_source(),
    )


def _truth(value: torch.Tensor, what: str) -> torch.Tensor:
    if value.numel() != 1:
        raise OperatorError(
            f"{what} has {value.numel()} elements, and has to have one",
            hint="ask for .any() or .all() of it.",
            source=user_source(),
        )
    value = value.detach().reshape(())
    return value if value.dtype is torch.bool else value != 0


class _Cond(Differentiable):
    """The backward pass runs the branch again, on the values that it read, and then backward."""

    def __init__(self, outer: Recording, traced: Sequence[TracedRegion], predicate: Value) -> None:
        super().__init__(outer, traced)
        self.predicate = predicate

    def forward(self) -> list[DistributedTensor]:
        call = RegionOp.of(self.outer, self.traced)
        read = {**call.reads, **call.written}
        self.hold(read)
        regions = tuple(
            call.region(role, each, [read], (*each.values, *own_values(each, call.written)), index=False)
            for role, each in zip(_BRANCHES, self.traced, strict=True)
        )
        types = self.traced[0].types
        return call.append(ops.cond, (self.predicate, self.values(read), regions), types, len(types))

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        given: list[list[DistributedTensor]] = []
        returns: list[list[Value]] = []
        for branch in self.traced:
            region = branch.region
            with recording_to(region):
                own = [region.given(each) for each in gradients]
                stand_ins = [region.stand_ins[key][1] if key in region.stand_ins else None for key in self.read]
                found = iter(self.gradients(branch, own, stand_ins))
                made = [
                    zeros_of(source) if stand_in is None else next(found)
                    for source, stand_in in zip(self.sources, stand_ins, strict=True)
                ]
            given.append(own)
            returns.append(values_of(region, made))
        call = RegionOp.of(self.outer, self.traced)
        read = {**call.reads, **call.written}
        call.written = {}
        regions = tuple(
            call.region(role, branch, [*values_of(branch.region, own), read], results, index=False)
            for role, branch, own, results in zip(_BRANCHES, self.traced, given, returns, strict=True)
        )
        operands = (*values_of(self.outer, gradients), *self.values(read))
        types = self.outer.types_of(self.sources)
        return [*call.append(ops.cond, (self.predicate, operands, regions), types, len(types))]


_BRANCHES = ("then", "else")


def while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: tuple[Any, ...] | list[Any]
) -> tuple[Any, ...]:
    """`carried = body_fn(*carried)` as long as `cond_fn(*carried)` is true; gives the carried values of the end.

    `carried_inputs` holds tensors (or lists, tuples and dicts of these); `body_fn` gives as many, of the same shapes
    and dtypes, and `cond_fn` a tensor of one element. The functions may read other values of the program, and `body_fn`
    may write to state. Raises ProgramError where autograd would have to go through the loop: how often it runs is not
    known, so what its rounds made is not kept.
    """
    recording = current_program()
    if recording is None:
        numbers = (bool, int, float)
        carried = pytree.tree_map(lambda x: torch.tensor(x) if isinstance(x, numbers) else x, tuple(carried_inputs))
        while cond_fn(*carried):
            carried = _tuple(body_fn(*carried))
        return carried
    leaves, spec = pytree.tree_flatten(tuple(carried_inputs))
    init = [tensor_of(recording, leaf, "what while_loop carries") for leaf in leaves]
    if torch.is_grad_enabled() and any(each.requires_grad for each in init):
        raise _no_gradient()

    def given(region: RegionRecording) -> tuple[list[DistributedTensor], Any]:
        made = [region.given(each) for each in init]
        return made, pytree.tree_unflatten(made, spec)

    def condition(*carried: Any) -> torch.Tensor:
        answer = cond_fn(*carried)
        if not isinstance(answer, torch.Tensor):
            answer = torch.full((), bool(answer))
        return _truth(answer, "the result of cond_fn of while_loop")

    def body(*carried: Any) -> Any:
        return _tuple(body_fn(*carried))

    test = trace_region(recording, "cond_fn of while_loop", condition, given)
    rounds = trace_region(recording, "body_fn of while_loop", body, given)
    if RegionOp.of(recording, [test]).written:
        raise ProgramError("cond_fn of while_loop changes a tensor in place", hint="do that in body_fn.")
    types = recording.types_of(init)
    if (rounds.spec, rounds.types) != (spec, types):
        raise carried_differ("body_fn of while_loop", spec, types, rounds)
    if torch.is_grad_enabled() and any(each.requires_grad for each in rounds.results):
        raise _no_gradient()
    call = RegionOp.of(recording, [test, rounds])
    regions = tuple(
        call.region(
            role, each, [*values_of(each.region, each.given[:-1]), call.written, call.reads], returns, index=True
        )
        for role, each, returns in (
            ("condition", test, test.values),
            ("body", rounds, (*rounds.values, *own_values(rounds, call.written))),
        )
    )
    carries = (*values_of(recording, init), *call.values(call.written))
    results = call.append(ops.while_loop, (carries, call.values(call.reads), regions), types, len(init))
    made: tuple[Any, ...] = pytree.tree_unflatten(results, spec)
    return made


def _no_gradient() -> ProgramError:
    return ProgramError(
        "while_loop has no gradient: the number of its rounds is unknown, so their values are not kept",
        hint="with torch.no_grad(): ...                # right, where no gradient is needed; or x.detach()\n"
        "monarch.scan(combine_fn, init, xs)      # right: as many rounds as xs has elements, and differentiable",
        source=user_source(),
    )


def _tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)
