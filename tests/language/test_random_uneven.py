"""Programs over random sizes, layouts and meshes that seldom divide them: what a layer gives, its gradients, and its
parameters after two steps are dense PyTorch's, with all padding that the compiler takes to hold anything poisoned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.language import Mesh, distribute, program
from tests.language.partitioned import partitioned_mesh

MESHES: list[dict[str, int]] = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}]
Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """Parameters and inputs of random sizes, and what is computed of them: a tensor, or several."""

    parameters: Tensors
    inputs: Tensors
    run: Callable[[Any, Any], Any]


def size(draw: random.Random, least: int = 1, most: int = 7) -> int:
    return draw.choice([least, *range(least, most + 1)])


def convolution(draw: random.Random) -> Case:
    dims, groups, stride, dilation = (
        draw.choice([1, 2]),
        draw.choice([1, 2, 3]),
        draw.choice([1, 2]),
        draw.choice([1, 2]),
    )
    given, made = groups * draw.choice([1, 2]), groups * draw.choice([1, 2, 3])
    transposed = draw.random() < 0.3
    weight = (
        torch.randn(given, made // groups, *[3] * dims)
        if transposed
        else torch.randn(made, given // groups, *[3] * dims)
    )
    op: Any = getattr(F, f"conv{'_transpose' * transposed}{dims}d")
    x = torch.randn(size(draw, 0, 5), given, *(size(draw, 5, 7) for _ in range(dims)))
    options = {"stride": stride, "padding": 1, "dilation": dilation, "groups": groups}
    return Case({"w": weight, "b": torch.randn(made)}, {"x": x}, lambda p, i: op(i["x"], p["w"], p["b"], **options))


def norm(draw: random.Random) -> Case:
    groups, kind = draw.choice([1, 2, 3]), draw.choice(["group", "layer", "rms", "batch", "instance"])
    channels = groups * draw.choice([1, 2, 3])
    x = torch.randn(size(draw), channels, size(draw, 2, 5), size(draw, 2, 5))
    shape = x.shape[1:] if kind in ("layer", "rms") else (channels,)

    def run(p: Any, i: Any) -> Any:
        if kind == "group":
            return F.group_norm(i["x"], groups, p["w"], p["b"])
        if kind == "layer":
            return F.layer_norm(i["x"], shape, p["w"], p["b"])
        if kind == "rms":
            return F.rms_norm(i["x"], shape, p["w"]) + p["b"]
        if kind == "batch":
            return F.batch_norm(i["x"], None, None, p["w"], p["b"], training=True)
        return F.instance_norm(i["x"], weight=p["w"], bias=p["b"])

    return Case({"w": torch.randn(shape), "b": torch.randn(shape)}, {"x": x}, run)


def loss(draw: random.Random) -> Case:
    classes, rest = size(draw, 2), [size(draw) for _ in range(draw.choice([0, 1]))]
    x = torch.randn(size(draw), classes, *rest)
    targets = torch.randint(0, classes, (len(x), *rest))
    targets = torch.where(targets == 0, -100, targets) if draw.random() < 0.5 else targets
    reduction, smoothing = draw.choice(["none", "sum", "mean"]), draw.choice([0.0, 0.1])
    weighted = draw.random() < 0.5

    def run(p: Any, i: Any) -> Any:
        weight = p["w"].detach().abs() if weighted else None
        logits = i["x"] * p["w"].view(-1, *[1] * len(rest))
        return F.cross_entropy(logits, i["y"], weight, reduction=reduction, label_smoothing=smoothing)

    return Case({"w": torch.randn(classes)}, {"x": x, "y": targets}, run)


def attention(draw: random.Random) -> Case:
    heads, width = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 3])
    groups = draw.choice([each for each in (1, 3, 5) if heads % each == 0])
    batch, length, masked = size(draw, 1, 5), size(draw, 1, 6), draw.choice(["", "causal", "mask"])

    def run(p: Any, i: Any) -> Any:
        def split(weight: Any, count: int) -> Any:
            return (i["x"] @ weight).view(batch, length, count, width).transpose(1, 2)

        mask = i["seen"][:, None, None] if masked == "mask" else None
        made = F.scaled_dot_product_attention(
            split(p["q"], heads),
            *(split(p[each], groups) for each in "kv"),
            mask,
            is_causal=masked == "causal",
            enable_gqa=True,
        )
        return made.transpose(1, 2).flatten(2) @ p["o"]

    inner = 5
    shapes = {"q": (inner, heads * width), "k": (inner, groups * width), "v": (inner, groups * width)}
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    seen = (torch.rand(batch, length) > 0.4) | (torch.arange(length) == 0)
    x = torch.randn(batch, length, inner)
    return Case({**parameters, "o": torch.randn(heads * width, inner)}, {"x": x, "seen": seen}, run)


def words(draw: random.Random) -> Case:
    table = torch.randn(size(draw, 1, 9), size(draw, 1, 5))
    tokens = torch.randint(0, len(table), (size(draw, 0, 5), size(draw, 1, 5)))
    return Case({"w": table}, {"i": tokens}, lambda p, i: (F.embedding(i["i"], p["w"]) @ p["w"].T).softmax(-1))


def places(draw: random.Random) -> Case:
    rows, columns, width = size(draw), size(draw), size(draw, 1, 5)
    at = {"i": torch.randint(0, rows, (4,)), "j": torch.randint(0, columns, (4,))}
    at["k"] = torch.randint(0, rows, (rows, columns, width))
    ops: list[Callable[[Any, Any], Any]] = [
        lambda x, i: x[i["i"], i["j"]],
        lambda x, i: x.gather(0, i["k"]),
        lambda x, i: x.scatter_add(0, i["k"], x),
        lambda x, i: x.index_put((i["i"],), x[i["i"]] * 2, accumulate=True),
        lambda x, i: x.index_select(1, i["j"]).cumsum(1),
        lambda x, i: x.sort(0, descending=True).values + x.amax((0, 1)),
        lambda x, i: x.topk(min(2, width), 2).values,
        lambda x, i: F.pad(x, (0, 0, 1, 2)).unfold(1, 2, 2).flatten(2),
        lambda x, i: torch.cat([x.flatten(0, 1), x[:, 0]]).std(0, correction=0),
    ]
    op = draw.choice(ops)
    x = torch.randn(rows, columns, width)
    return Case({"w": torch.randn(width)}, {"x": x, **at}, lambda p, i: op(i["x"] * p["w"], i))


def picture(draw: random.Random) -> Case:
    channels, number = size(draw, 1, 5), draw.randrange(5)

    def run(p: Any, i: Any) -> Any:
        x = i["x"] * p["w"][:, None, None]
        if number == 0:
            return F.max_pool2d(x, 3, 2, 1, ceil_mode=True)
        if number == 1:
            return F.avg_pool2d(x, 2, 2, count_include_pad=False)
        if number == 2:
            return F.interpolate(x, scale_factor=1.5, mode="bilinear")
        if number == 3:
            return F.fold(F.unfold(x, 2).square(), x.shape[2:], 2)
        return F.adaptive_avg_pool2d(x, (2, 3))

    x = torch.randn(size(draw, 1, 5), channels, size(draw, 4, 7), size(draw, 4, 7))
    return Case({"w": torch.randn(channels)}, {"x": x}, run)


def region(draw: random.Random) -> Case:
    rows, columns, width, number = size(draw), size(draw), size(draw, 1, 5), draw.randrange(3)

    def run(p: Any, i: Any) -> Any:
        x = i["x"] * p["w"]
        if number == 0:
            return monarch.cond(x.detach().sum() > 0, lambda: (x @ p["m"]).relu(), lambda: x.softmax(0) @ p["m"])
        dim = number - 1
        start = x.new_zeros(columns if dim == 0 else rows, width)
        return monarch.scan(lambda h, row: ((h @ p["m"] + row).tanh(), h.mean(0)), start, x, dim=dim)

    x = torch.randn(rows, columns, width)
    return Case({"w": torch.randn(width), "m": torch.randn(width, width) / 2}, {"x": x}, run)


KINDS = (convolution, norm, loss, attention, words, places, picture, region)


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(each.clone()) for name, each in case.parameters.items()})
        self.run = case.run

    def forward(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        made = self.run(self.weights, inputs)
        return made if isinstance(made, tuple) else (made,)


def layout(draw: random.Random, shape: tuple[int, ...], mesh: dict[str, int]) -> list[Any]:
    entries: list[list[str]] = [[] for _ in shape]
    for name in mesh:
        if shape and draw.random() < 0.75:
            draw.choice(entries).append(name)
    return [tuple(names) or None for names in entries]


def stepping(layer: Layer) -> Callable[[Tensors], list[torch.Tensor]]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Tensors) -> list[torch.Tensor]:
        given = {name: each.detach().requires_grad_(each.is_floating_point()) for name, each in inputs.items()}
        optimizer.zero_grad()
        made = layer(given)
        # The gradients of elements differ, and are bounded.
        sum(((each.detach() + 0.3) / (1 + each.detach().abs()) * each).sum() for each in made).backward()  # type: ignore[union-attr]
        optimizer.step()
        return [*(each.detach() for each in made), *(each.grad for each in given.values() if each.grad is not None)]

    return step


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_are_those_of_dense_pytorch(kind: Callable[[random.Random], Case], seed: int) -> None:
    draw = random.Random(f"{kind.__name__} {seed}")
    torch.manual_seed(seed)
    case = kind(draw)
    sizes = draw.choice(MESHES)
    plain, layer = Layer(case), Layer(case)
    door: Any = draw.choice([program, program, lambda **options: lambda step: step])
    with partitioned_mesh(kernels=draw.random() < 0.3, **sizes) as mesh:
        ours = trained(layer, case, mesh, sizes, draw, door)
        reference = stepping(plain)
        for found in ours:
            for one, other in zip(found, reference(case.inputs), strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-3, equal_nan=True)  # type: ignore[attr-defined]
        for weight, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                weight.detach().full_tensor(), wanted.detach(), rtol=1e-3, atol=1e-3, equal_nan=True
            )


def trained(layer: Layer, case: Case, mesh: Mesh, sizes: dict[str, int], draw: random.Random, door: Any) -> Any:
    layouts = {name: layout(draw, weight.shape, sizes) for name, weight in layer.named_parameters()}
    monarch.module_to_mesh(layer, mesh, layouts)
    step = door(mesh=mesh)(stepping(layer))
    placed = {name: distribute(each, mesh, layout(draw, each.shape, sizes)) for name, each in case.inputs.items()}
    return [step(placed) for _ in range(2)]
