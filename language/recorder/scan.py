"""`scan`: a loop over the elements of tensors, differentiable, and what is made of it.

Outside of programs it is Python's own `for`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.tape import Value
from monarch.compiler.types import TensorType
from monarch.language.errors import OperatorError
from monarch.language.recorder.differentiable import (
    Differentiable,
    carried_differ,
    is_smooth,
    tensor_of,
    values_of,
    zeros_of,
)
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.regions import (
    Reads,
    RegionOp,
    RegionRecording,
    TracedRegion,
    first_value,
    own_values,
    recording_to,
    restored,
    snapshot,
    trace_region,
)
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


def scan(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """`carry, y = combine_fn(carry, x)` for each element x of `xs` along `dim`, from `init` on; with `reverse` from the
    last to the first. Gives what is carried in the end, and the y of all elements, stacked along `dim`: in a program,
    where there are no elements, `init` and stacks of none; outside of one that is an OperatorError.

    `init`, `xs` and what `combine_fn` gives are tensors, or lists, tuples and dicts of these. Differentiable: what is
    carried is kept for each round, and the backward pass runs each round again. Raises ProgramError where `combine_fn`
    gives another carry than it takes, and OperatorError where the tensors of `xs` have not equally many elements.
    """
    recording = current_program()
    elements, xs_spec = pytree.tree_flatten(xs)
    if not elements or not all(isinstance(each, torch.Tensor) for each in elements):
        raise OperatorError(
            "scan goes along tensors, and xs has none, or something else",
            hint="monarch.while_loop(cond_fn, body_fn, carried) goes round without elements.",
            source=user_source(),
        )
    length, *others = [each.shape[dim] for each in elements]
    if any(other != length for other in others):
        raise OperatorError(
            f"scan goes along dim {dim} of tensors that have {', '.join(map(str, (length, *others)))} elements there",
            hint="give it equally many of each.",
            source=user_source(),
        )
    elements = [each.movedim(dim, 0) for each in elements]
    if recording is None:
        carry, ys = _scanned(combine_fn, init, elements, xs_spec, length, reverse)
    else:
        carry, ys = _scan(recording, combine_fn, init, elements, xs_spec, length, reverse)
    return carry, pytree.tree_map(lambda y: None if y is None else y.movedim(0, dim), ys)


def _scanned(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    elements: list[Any],
    spec: Any,
    length: int,
    back: bool,
) -> tuple[Any, Any]:
    """`scan` outside of programs."""
    if not length:
        raise OperatorError(
            "scan goes along a dim without elements, and its result there is known in a program alone",
            hint="monarch.program(lambda: monarch.scan(combine_fn, init, xs))()   # right: the init, and no rows",
            source=user_source(),
        )
    ys: list[Any] = [None] * length
    for at in reversed(range(length)) if back else range(length):
        carry, ys[at] = combine_fn(carry, pytree.tree_unflatten([each[at] for each in elements], spec))
    return carry, pytree.tree_map(lambda *each: None if each[0] is None else torch.stack(each), *ys)


def _scan(
    recording: Recording,
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    elements: list[torch.Tensor],
    xs_spec: Any,
    length: int,
    reverse: bool,
) -> tuple[Any, Any]:
    leaves, spec = pytree.tree_flatten(init)
    carried = [tensor_of(recording, leaf, "what scan carries") for leaf in leaves]
    xs = [tensor_of(recording, each, "xs of scan") for each in elements]

    def given(region: RegionRecording) -> tuple[list[DistributedTensor], Any]:
        # Whatever is carried may come to depend on what requires a gradient.
        made = [region.given(each, torch.is_grad_enabled() and is_smooth(each)) for each in carried]
        made += [region.given(_element(x), torch.is_grad_enabled() and x.requires_grad) for x in xs]
        own = iter(made)
        carry = pytree.tree_unflatten([next(own) for _ in carried], spec)
        return made, (carry, pytree.tree_unflatten([*own], xs_spec))

    def combine(carry: Any, x: Any) -> Any:
        made = combine_fn(carry, x)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ProgramError(
                "combine_fn of scan gives one value, and has to return two: the carried value, and the kept one",
                hint="def combine_fn(carry, x): ...; return carry, y      # y may be None",
                source=user_source(),
            )
        return tuple(made)

    traced = trace_region(recording, "combine_fn of scan", combine, given)
    carry_spec = traced.spec.child(0)
    count = carry_spec.num_leaves
    types = recording.types_of(carried)
    if carry_spec != spec or traced.types[:count] != types or not all(traced.tensors[:count]):
        raise carried_differ("combine_fn of scan", spec, types, traced, count)
    results = _Scan(recording, traced, carried, xs, recording.size(length), reverse).run()
    made: tuple[Any, Any] = restored(traced, results)
    return made


def _element(x: torch.Tensor) -> torch.Tensor:
    """One round's element of it, as an example: there may be no rounds."""
    return x[0] if x.shape[0] else x.sum(0, dtype=x.dtype)


class _Scan(Differentiable):
    """The backward pass goes the other way: it carries the gradient of the carried values, and the sums of the
    gradients of values that the rounds read from outside."""

    def __init__(
        self,
        outer: Recording,
        traced: TracedRegion,
        carried: list[DistributedTensor],
        xs: list[DistributedTensor],
        length: int,
        reverse: bool,
    ) -> None:
        super().__init__(outer, [traced])
        self.carried, self.xs, self.length, self.reverse = carried, xs, length, reverse
        self.body = traced
        self.saved: list[DistributedTensor] = []
        """The values carried into each round, then those of the storages that the rounds write."""
        self.written: Reads = {}
        self.elements: list[Value] = []

    @property
    def sources(self) -> list[torch.Tensor]:
        return [*self.carried, *self.xs, *super().sources]

    def forward(self) -> list[DistributedTensor]:
        body, region = self.body, self.body.region
        call = RegionOp.of(self.outer, self.traced)
        self.hold(call.reads)
        self.written = dict(call.written)
        count = len(self.carried)
        own = values_of(region, body.given[:-1])
        kept = [*own[:count], *own_values(body, self.written)]
        # A round's inputs, not the values that it leaves there: copies, taken before its first op.
        before = [first_value(region, value) for value in kept]
        returns = (*body.values[:count], *own_values(body, self.written), *body.values[count:], *before)
        inputs = [*own[:count], call.written, *own[count:], call.reads]
        self.elements = [snapshot(self.outer, value) for value in values_of(self.outer, self.xs)]
        carries = (*values_of(self.outer, self.carried), *call.values(call.written))
        types = [
            *body.types[:count],
            *(self.stacked(type_) for type_ in body.types[count:]),
            *(self.stacked(value.type) for value in before),
        ]
        args = (
            carries,
            tuple(self.elements),
            self.values(call.reads),
            (call.region("body", body, inputs, returns, index=True),),
            self.length,
            self.reverse,
        )
        made = call.append(ops.scan, args, types, count)
        self.saved = made[len(body.results) :]
        return made[: len(body.results)]

    def stacked(self, type_: TensorType) -> TensorType:
        return TensorType(type_.dtype, (self.length, *type_.shape))

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        body, region = self.body, self.body.region
        count = len(self.carried)
        smooth = [is_smooth(each) for each in self.carried]
        outside = super().sources
        with recording_to(region):
            of_carry = [region.given(each) for each, able in zip(gradients[:count], smooth, strict=False) if able]
            sums = [region.given(each) for each in outside]
            of_ys = [region.given(_element(each)) for each in gradients[count:]]
            carry_of = iter(of_carry)
            given = [*(next(carry_of) if able else None for able in smooth), *of_ys]
            takes: list[torch.Tensor | None] = [
                *(own if able else None for own, able in zip(body.given, smooth, strict=False)),
                *(own if own.requires_grad else None for own in body.given[count:-1]),
                *(region.stand_ins[key][1] for key in self.read),
            ]
            found = self.gradients(body, given, takes)
            first, last = len(of_carry), len(found) - len(outside)
            added = [total + each for total, each in zip(sums, found[last:], strict=True)]
            returns = values_of(region, [*found[:first], *added, *found[first:last]])
        call = RegionOp.of(self.outer, self.traced)
        call.reads = {cell: ref for cell, ref in call.reads.items() if cell not in self.written}
        call.written = {}
        own = values_of(region, body.given[:-1])
        inputs = [
            *values_of(region, [*of_carry, *sums]),
            *own[:count],
            self.written,
            *own[count:],
            *values_of(region, of_ys),
            call.reads,
        ]
        start = [each for each, able in zip(gradients[:count], smooth, strict=False) if able]
        zeros = [zeros_of(each) for each in outside]
        args = (
            tuple(values_of(self.outer, [*start, *zeros])),
            (*values_of(self.outer, self.saved), *self.elements, *values_of(self.outer, gradients[count:])),
            self.values(call.reads),
            (call.region("backward", body, inputs, returns, index=True),),
            self.length,
            not self.reverse,
        )
        differentiated = [x for x in self.xs if x.requires_grad]
        made = iter(call.append(ops.scan, args, self.outer.types_of([*start, *outside, *differentiated]), 0))
        of_init = [next(made) if able else None for able in smooth]
        of_outside = [next(made) for _ in outside]
        return [*of_init, *(next(made) if x.requires_grad else None for x in self.xs), *of_outside]


def map_over(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """`f(x, *args)` for each element x of `xs` along dim 0, stacked: a `scan` that carries nothing."""
    return scan(lambda carry, x: (carry, f(x, *args)), [], xs)[1]


def associative_scan(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """The first element of `xs` along `dim`, and each further one combined with the result of those before it: a `scan`
    that carries its results, one element after the other."""
    del combine_mode
    first = -1 if reverse else 0

    def rest(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(dim, 0 if reverse else 1, x.shape[dim] - 1)

    def combine(carry: Any, x: Any) -> tuple[Any, Any]:
        made = combine_fn(carry, x)
        return made, pytree.tree_map(torch.clone, made)

    init = pytree.tree_map(lambda x: x.select(dim, first), xs)
    if pytree.tree_leaves(xs)[0].shape[dim] == 1:
        return xs
    _, ys = scan(combine, init, pytree.tree_map(rest, xs), dim=dim, reverse=reverse)

    def joined(one: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
        parts = (one.unsqueeze(dim), many)
        return torch.cat(parts[::-1] if reverse else parts, dim)

    return pytree.tree_map(joined, init, ys)
