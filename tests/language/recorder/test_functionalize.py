"""What a recorded program is as a pure graph, as text."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monarch.compiler.graph import Graph, provenance
from monarch.language import Mesh, distribute, module_to_mesh, program
from tests.language.models import CNN, TinyGPT, make_step, token_batch, token_loss

MESH = Mesh.abstract(data=2)


def state(*shape: int) -> Any:
    return distribute(torch.zeros(*shape), MESH, ["data", *[None] * (len(shape) - 1)])


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    return program(mesh=MESH)(function).trace(*args).graph


def text_of(function: Callable[..., Any], *args: Any) -> str:
    """The graph's text without its source lines and the spaces that line up its columns."""
    lines = str(graph_of(function, *args)).splitlines()
    return "\n".join(re.sub(r" +(: )", r" \1", re.sub(r" +# \S+$", "", line)) for line in lines)


def expect(function: Callable[..., Any], text: str, *args: Any) -> None:
    assert text_of(function, *args) == dedent(text).strip()


def test_a_write_through_a_view() -> None:
    w = state(4, 4)

    def step() -> None:
        w[1].mul_(2)

    expect(
        step,
        """
        graph @step on mesh<data=2> {
          %w = state "w" : f32[4@data, 4]
          %select = aten.select.int(%w, 0, 1) : f32[4]
          %mul = aten.mul.Tensor(%select, 2) : f32[4]
          %select_scatter = aten.select_scatter(%w, %mul, 0, 1) : f32[4, 4]
          update "w" = %select_scatter
          return
        }
        """,
    )


def test_a_view_is_read_anew_after_a_write() -> None:
    w = state(4, 2)

    def step() -> torch.Tensor:
        flat = w.view(-1)
        w.add_(1)
        return flat * 3

    expect(
        step,
        """
        graph @step on mesh<data=2> {
          %w = state "w" : f32[4@data, 2]
          %add = aten.add.Tensor(%w, 1) : f32[4, 2]
          %view = aten.view(%add, [8]) : f32[8]
          %mul = aten.mul.Tensor(%view, 3) : f32[8]
          update "w" = %add
          return %mul
        }
        """,
    )


def test_copies_casts_and_dead_code_go() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x.clone().detach().to(torch.float32).contiguous()[:].float() + 1

    expect(
        step,
        """
        graph @step on mesh<data=2> {
          %x = input 0 : f32[2, 4]
          %add = aten.add.Tensor(%x, 1) : f32[2, 4]
          return %add
        }
        """,
        torch.ones(2, 4),
    )


def test_every_result_has_a_buffer_of_its_own() -> None:
    w = state(4, 2)

    def step(x: torch.Tensor) -> Any:
        w.add_(x)
        y = w * 1
        return y.t(), x, w

    expect(  # the state that is returned is no result of its own
        step,
        """
        graph @step on mesh<data=2> {
          %x = input 0 : f32[4, 2]
          %w = state "w" : f32[4@data, 2]
          %add = aten.add.Tensor(%w, %x) : f32[4, 2]
          %mul = aten.mul.Tensor(%add, 1) : f32[4, 2]
          %permute = aten.permute(%mul, [1, 0]) : f32[2, 4]
          %clone = aten.clone(%x) : f32[4, 2]
          update "w" = %add
          return %permute, %clone
        }
        """,
        torch.ones(4, 2),
    )


def test_numbers_of_the_call() -> None:
    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x.addcdiv(x, x + 1, value=-rate).add(x, alpha=rate * 2)

    expect(
        step,
        """
        graph @step on mesh<data=2> {
          %x = input 0 : f32[4]
          %argument1 = scalar "argument1" : f64[]
          %add = aten.add.Tensor(%x, 1) : f32[4]
          %neg = aten.neg(%argument1) : f64[]
          %to_copy = aten._to_copy(%neg, dtype=f32) : f32[]
          %mul = aten.mul.Tensor(%x, %to_copy) : f32[4]
          %addcdiv = aten.addcdiv(%x, %mul, %add) : f32[4]
          %mul_1 = aten.mul.Tensor(%argument1, 2.0) : f64[]
          %to_copy_1 = aten._to_copy(%mul_1, dtype=f32) : f32[]
          %addcmul = aten.addcmul(%addcdiv, %x, %to_copy_1) : f32[4]
          return %addcmul
        }
        """,
        torch.ones(4),
        0.5,
    )


def test_random_numbers() -> None:
    def step() -> torch.Tensor:
        return torch.randn(2, 4)

    expect(
        step,
        """
        graph @step on mesh<data=2> {
          %seed = seed "seed" : i64[]
          %random = random("normal", [2, 4], f32, %seed, 0, [2, 4], [[], []]) : f32[2, 4]
          return %random
        }
        """,
    )


@pytest.mark.parametrize(
    ("write", "value"),
    [
        (lambda x: x.exp_(), torch.e**2),
        (lambda x: x.clamp_(0, 1), 1),
        (lambda x: x.index_fill_(0, torch.tensor([0, 1]), 5.0), 5),
        (lambda x: x.masked_fill_(x > 1, 3.0), 3),
        (lambda x: torch.add(x, 1, out=x), 3),
        (lambda x: torch.mul(x, x, out=x), 4),
        (lambda x: x.index_put_((torch.tensor([0, 1]),), torch.tensor(7.0)), 7),
        (lambda x: x.div_(4, rounding_mode="floor"), 0),
        (lambda x: x.lerp_(x * 2, 0.5), 3),
        (lambda x: x.copy_(torch.tensor(9)), 9),
    ],
)
def test_in_place_ops(write: Callable[[torch.Tensor], Any], value: float, mesh: Mesh) -> None:
    x = distribute(torch.full((2,), 2.0), mesh)
    program(lambda: write(x))()
    assert x.tolist() == pytest.approx([value] * 2)


def test_composite_ops_stay_whole_and_backward_ops_know_their_forward_line() -> None:
    model = module_to_mesh(TinyGPT(), MESH)
    graph = graph_of(make_step(model, torch.optim.AdamW(model.parameters()), token_loss), *token_batch(0))
    names = {str(node.target) for node in graph.calls}
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "gelu",
        "gelu_backward",
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "embedding",
        "embedding_dense_backward",
    ):
        assert f"aten.{name}.default" in names
    assert not any(re.search(r"_\.|clone|detach", name) for name in names)
    for node in graph.calls:
        if node.target is torch.ops.aten.gelu_backward.default:
            assert provenance(node).backward
            assert "F.gelu(" in provenance(node).source.excerpt()
        if node.target is torch.ops.aten.gelu.default:
            assert "backward" not in node.meta
        assert node.target is operator.getitem or provenance(node).source is not None


def test_batch_norm_updates_its_statistics() -> None:
    model = module_to_mesh(CNN(), MESH)
    text = text_of(lambda x: model(x), torch.ones(4, 1, 8, 8))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert f'update "features.1.{name}"' in text
    assert "aten._native_batch_norm_legit_functional" in text
    assert "aten.max_pool2d_with_indices" in text and "aten.convolution" in text


def test_the_same_program_is_the_same_text() -> None:
    def build() -> str:
        torch.manual_seed(0)
        model = module_to_mesh(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), MESH)
        optimizer = torch.optim.Adam(model.parameters())
        step = make_step(model, optimizer, lambda m, x, y: F.mse_loss(m(x), y))
        return str(graph_of(step, torch.ones(4, 4), torch.ones(4, 2)))

    assert build() == build()


def test_what_cannot_be_written(mesh: Mesh) -> None:
    from monarch.compiler.errors import ProgramError

    x = distribute(torch.ones(2), mesh)
    with pytest.raises((ProgramError, RuntimeError), match=r"expand|single memory location"):
        program(lambda: x.expand(3, 2).add_(1))()
    with pytest.raises(ProgramError, match=r"cannot write through aten\.unfold"):
        program(lambda: x.unfold(0, 1, 1).zero_())()
