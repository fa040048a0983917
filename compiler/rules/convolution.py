"""Convolution, pooling and upsampling: batch and channels shard, spatial dims stay whole."""

from __future__ import annotations

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, line
from monarch.compiler.rules.localize import LocalCall, Localized, localize_sizes, localizer
from monarch.compiler.rules.register import sharding_rule


def _convolution_dims(call: Call) -> tuple[str, str, str, str, dict[str, int]]:
    """The texts of a convolution's input, weight, bias and output, and the number of groups.

    `i` and `o` are the input and output channels of one group. With one group they are the tensors' own channels,
    and shard; with more, whole groups do.
    """
    groups = call["groups"]
    space = " ".join(["_"] * (len(call.shape("weight") or ()) - 2))
    into, out = ("i", "o") if groups == 1 else ("(g i)", "(g o)")
    weight = f"{into} o {space}" if call["transposed"] else f"{out} i {space}"
    return f"n {into} {space}", weight, out, f"n {out} {space}", {"g": groups} if groups != 1 else {}


@sharding_rule("aten.convolution")
def _convolution(call: Call) -> Line:
    x, weight, bias, y, sizes = _convolution_dims(call)
    return line(f"{x}, {weight}, {bias} -> {y}", linear=({0, 2}, {1, 2}), addends={2}, sizes=sizes)


@sharding_rule("aten.convolution_backward")
def _convolution_backward(call: Call) -> Line:
    # The bias's gradient sums the incoming gradient over batch and space: input channels do not enter.
    x, weight, bias, y, sizes = _convolution_dims(call)
    return line(f"{y}, {x}, {weight} -> {x}, {weight}, {bias}", linear=[{0}], kept=[("i", 2)], sizes=sizes)


@localizer("aten.convolution aten.convolution_backward")
def _local_convolution(call: LocalCall) -> Localized:
    changes = {}
    if call.strategy.factor == "g":
        changes["groups"] = call["groups"] // call.k
    if call.get("bias_sizes") is not None and call.strategy.factor in ("g", "o"):
        changes["bias_sizes"] = [size // call.k for size in call["bias_sizes"]]
    return call.replace(**changes)


def _spatial(ops: str, dims: int, operands: int, results: int = 1, linear: bool = False) -> None:
    """Ops that work on each plane by itself: all dims but the last `dims` shard."""
    tensor = "... " + " ".join(["_"] * dims)
    text = f"{', '.join([tensor] * operands)} -> {', '.join([tensor] * results)}"
    for name in ops.split():
        sharding_rule(f"aten.{name}", text, linear=[{0}] if linear else [])


for _n in (1, 2, 3):
    _spatial(f"adaptive_avg_pool{_n}d avg_pool{_n}d", _n, 1, linear=True)
    _spatial(f"adaptive_max_pool{_n}d", _n, 1, results=2)
    _spatial(f"upsample_nearest{_n}d upsample_nearest{_n}d_backward", _n, 1, linear=True)
    _spatial(f"_upsample_nearest_exact{_n}d _upsample_nearest_exact{_n}d_backward", _n, 1, linear=True)
    _spatial(f"reflection_pad{_n}d replication_pad{_n}d", _n, 1, linear=True)
    _spatial(f"reflection_pad{_n}d_backward replication_pad{_n}d_backward", _n, 2, linear=True)
for _n in (2, 3):
    _spatial(f"_adaptive_avg_pool{_n}d", _n, 1, linear=True)
    _spatial(f"max_pool{_n}d_with_indices", _n, 1, results=2)
    _spatial(f"max_pool{_n}d_with_indices_backward adaptive_max_pool{_n}d_backward", _n, 3, linear=True)
    _spatial(f"avg_pool{_n}d_backward _adaptive_avg_pool{_n}d_backward", _n, 2, linear=True)
for _name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"):
    _spatial(f"{_name} {_name}_backward", int(_name[-2]), 1, linear=True)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _spatial(f"{_name} {_name}_backward", 2, 1, linear=True)
for _n in (2, 3):
    _spatial(f"max_unpool{_n}d", _n, 2, linear=True)
    _spatial(f"fractional_max_pool{_n}d_backward", _n, 3, linear=True)
    _space = " ".join(["_"] * _n)
    sharding_rule(f"aten.fractional_max_pool{_n}d", f"n c {_space}, n c _ -> n c {_space}, n c {_space}")
    _grid = f"n {_space} _"
    sharding_rule(f"aten.grid_sampler_{_n}d", f"n c {_space}, {_grid} -> n c {_space}", linear=[{0}])
    sharding_rule(
        f"aten.grid_sampler_{_n}d_backward",
        f"n c {_space}, n c {_space}, {_grid} -> n c {_space}, {_grid}",
        linear=[{0}],
    )
_spatial("pixel_shuffle pixel_unshuffle", 3, 1, linear=True)


@sharding_rule("aten.im2col aten.col2im")
def _columns(call: Call) -> Line:
    ndims = len(call.shapes[0]), len(call.result)
    batch = ["n"] if min(ndims) == 3 else []
    taken, made = (" ".join([*batch, *["_"] * (ndim - len(batch))]) for ndim in ndims)
    return line(f"{taken} -> {made}", linear=[{0}])


@sharding_rule("aten.affine_grid_generator")
def _affine_grid(call: Call) -> Line:
    return line(f"n _ _ -> n {' '.join(['_'] * (len(call.result) - 1))}", linear=[{0}])


@localizer("aten.affine_grid_generator")
def _local_affine_grid(call: LocalCall) -> Localized:
    return call.replace(size=[call.result[0], *call["size"][1:]])


localize_sizes(
    """
    aten.upsample_nearest1d_backward aten.upsample_nearest2d_backward aten.upsample_nearest3d_backward
    aten._upsample_nearest_exact1d_backward aten._upsample_nearest_exact2d_backward
    aten._upsample_nearest_exact3d_backward aten.upsample_linear1d_backward aten.upsample_bilinear2d_backward
    aten.upsample_bicubic2d_backward aten.upsample_trilinear3d_backward aten._upsample_bilinear2d_aa_backward
    aten._upsample_bicubic2d_aa_backward
    """,
    "input_size",
)


@sharding_rule("aten.channel_shuffle aten.native_channel_shuffle")
def _channel_shuffle(call: Call) -> Line:
    dims = " ".join(["n", "_", *(f"s{number}" for number in range(len(call.result) - 2))])
    return line(f"{dims} -> {dims}", linear=[{0}])
