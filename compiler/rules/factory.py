"""Ops that make tensors from numbers: every dim of the result shards, and nothing is needed for it."""

from __future__ import annotations

from typing import Any

from monarch.compiler import ops
from monarch.compiler.graph import tensor_type
from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localize_sizes, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text
from monarch.compiler.rules.whole import draws_numbers


@sharding_rule(
    """
    aten.empty aten.empty_strided aten.full aten.ones aten.zeros aten.new_empty aten.new_empty_strided
    aten.new_full aten.new_ones aten.new_zeros aten.scalar_tensor
    """
)
def _filled(call: Call) -> Line:
    operands = [tensor_text(["_"] * len(shape)) for shape in call.shapes]
    return line(f"{', '.join(operands)} -> {tensor_text(factor_names(len(call.result)))}")


localize_sizes(
    "aten.empty aten.full aten.ones aten.zeros aten.new_empty aten.new_full aten.new_ones aten.new_zeros", "size"
)


@localizer("aten.empty_strided aten.new_empty_strided")
def _local_strided(call: LocalCall) -> Localized:
    # The values are whatever they are; a local block is contiguous.
    strides = [1] * len(call.result)
    for dim in range(len(strides) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, call.result[dim + 1])
    return call.replace(size=list(call.result), stride=strides)


# Where an element stands matters to these.
for _name in ("aten.eye", "aten.linspace", "aten.logspace", "aten.tril_indices", "aten.triu_indices"):

    @sharding_rule(_name)
    def _whole(call: Call) -> Line:
        operands = ", ".join("[]" for _ in call.shapes)
        return line(f"{operands} -> {tensor_text(['_'] * len(call.result))}")


# -- arange ------------------------------------------------------------------------------------------------------------


@sharding_rule("aten.arange prims.iota arange_shard")
def _arange(call: Call) -> Line:
    return line(f"{', '.join('[]' for _ in call.shapes)} -> n")


def _arange_shard(call: LocalCall, start: Any, step: Any) -> Localized:
    dtype = tensor_type(call.node).dtype
    return ops.arange_shard, (start, step, call.result[0], dtype, [call.mesh_dim]), {}


@localizer("aten.arange")
def _local_arange(call: LocalCall) -> Localized:
    return _arange_shard(call, call.get("start", 0), call.get("step", 1))


@localizer("prims.iota")
def _local_iota(call: LocalCall) -> Localized:
    return _arange_shard(call, call["start"], call["step"])


@localizer("arange_shard")
def _nested_arange(call: LocalCall) -> Localized:
    return call.replace(length=call.result[0], mesh_dims=[*call["mesh_dims"], call.mesh_dim])


# -- random numbers ----------------------------------------------------------------------------------------------------


@sharding_rule("random")
def _random(call: Call) -> Line:
    return line(f"{', '.join('[]' for _ in call.shapes)} -> {tensor_text(factor_names(len(call.result)))}")


def _offsets(call: LocalCall) -> list[list[str]]:
    """Where a worker's block begins, with the mesh dim that is being done."""
    offsets = [list(names) for names in call["offsets"]]
    dim = call.strategy.results[0]
    if isinstance(dim, int):
        offsets[dim].append(call.mesh_dim)
    return offsets


@localizer("random")
def _local_random(call: LocalCall) -> Localized:
    return call.replace(shape=list(call.result), offsets=_offsets(call))


@sharding_rule("sample")
def _sample(call: Call) -> Line:
    text, parameters = tensor_text(factor_names(len(call.result))), len(call["parameters"])
    return line(f"{', '.join([text] * parameters + ['[]'] * (len(call.shapes) - parameters))} -> {text}")


@localizer("sample")
def _local_sample(call: LocalCall) -> Localized:
    return call.replace(offsets=_offsets(call))


sharding_rule("check", "..., ... -> ...")


def _draws(call: Call) -> Line:
    raise draws_numbers(call)


for _name in """
    bernoulli binomial dropout exponential multinomial normal normal_functional poisson rand rand_like randint
    randint_like randn randn_like random randperm rrelu_with_noise rrelu_with_noise_functional _sample_dirichlet
    _standard_gamma uniform
    """.split():
    sharding_rule(f"aten.{_name}")(_draws)
