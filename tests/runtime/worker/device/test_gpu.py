"""Plans for GPUs on one device, with a stand-in for the driver that runs kernels' Triton text in the interpreter: that
all a training step needs is there, and what it gives; not that a GPU would give it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from monarch.compiler.attention import attention, attention_backward
from monarch.compiler.cli.load import load_program
from monarch.compiler.errors import MonarchError, PlanError
from monarch.compiler.graph import Graph
from monarch.compiler.kernels.triton.ahead import with_binaries
from monarch.compiler.kernels.triton.calls import calls_of
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.check import check_ops
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from monarch.runtime.worker.device import gpu as gpu_module
from monarch.runtime.worker.device.gpu import OnGpu
from monarch.runtime.worker.frame import Frame
from tests.compiler.kernels.triton.standin import StandIn, stand_in

CPU = torch.device("cpu")

PROGRAM = """
import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT

mesh = Mesh.abstract(data=1)
model = monarch.module_to_mesh(GPT(width=32, layers=1, sequence=16, vocabulary=64), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@monarch.program
def step(tokens: "i64[4, 16]", targets: "i64[4, 16]"):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    (tmp_path / "train.py").write_text(PROGRAM)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(cache))
    return load_program(f"{tmp_path / 'train.py'}:step", None, {}, False).graph


def arguments(plan: Plan) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    found: list[Any] = []
    for spec in plan.inputs:
        label, shape, dtype = str(spec.label), spec.type.shape, spec.type.dtype
        if spec.kind == "input":
            found.append(torch.randint(64, shape, generator=generator))
        elif spec.kind == "scalar":
            found.append(torch.tensor(1e-3, dtype=dtype))
        elif "step" in label:
            found.append(torch.ones(shape, dtype=dtype))
        else:
            values = torch.randn(shape, generator=generator) / 8
            found.append((values.abs() + 0.01 if "sq" in label else values).to(dtype))
    return found


def rest(name: str, *arguments: Any) -> Callable[..., Any]:
    """For one worker: no collectives, and nobody to wait for."""
    if name in LOCAL_OPS:
        return lambda *args, **kwargs: LOCAL_OPS[name]({"data": 0}, {"data": 1}, *args, **kwargs)
    assert name == "commit"
    return lambda: None


def test_a_training_step_is_that_of_cpus(gpu: StandIn, traced: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_graph(traced, CompileOptions(target="cuda:90", kernels="all"))
    ready = OnGpu(replace(plan, binaries=tuple(each for each in plan.binaries if each.call is None)), CPU)
    assert not {each.op for each in ready.plan.instructions} & {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    }
    plain = compile_graph(traced, CompileOptions(kernels="off"))
    with torch.inference_mode():
        frame = Frame(ready.plan, ready.binds(rest))
        found = frame.run(arguments(plan))
        ready.check()
    assert {name for name, _, _ in gpu.loaded} == gpu.kernels.keys()
    with torch.inference_mode():
        wanted = Frame(plain, rest).run(arguments(plain))
    compare(plan, found, plain, wanted)


def compare(plan: Plan, found: Any, plain: Plan, wanted: Any) -> None:
    ours, theirs = (
        {str(spec.label): value for spec, value in zip(each.outputs, values, strict=True)}
        for each, values in ((plan, found), (plain, wanted))
    )
    assert ours.keys() == theirs.keys() and len(ours) > 30
    for label, value in ours.items():
        torch.testing.assert_close(
            value, theirs[label], rtol=2e-4, atol=2e-4, msg=lambda text, at=label: f"{at}: {text}"
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False")
def test_a_training_step_on_a_gpu_is_that_of_cpus(traced: Graph) -> None:
    device = torch.device("cuda")
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    plan = compile_graph(traced, CompileOptions(target=target, kernels="all"))
    ready = OnGpu(plan, device)
    plain = compile_graph(traced, CompileOptions(kernels="off"))
    with torch.inference_mode():
        found = Frame(ready.plan, ready.binds(rest)).run([value.to(device) for value in arguments(plan)])
        ready.check()
        wanted = Frame(plain, rest).run(arguments(plain))
    compare(plan, [value.cpu() for value in found], plain, wanted)


TEMPLATE = """graph @f on mesh<> {
  %q = input 0 : f16[2, 4, 256, 64]
  %k = input 1 : f16[2, 4, 256, 64]
  %a = aten._scaled_dot_product_flash_attention_for_cpu(%q, %k, %k, 0.0, true) : (f16[2, 4, 256, 64], f32[2, 4, 256])
  %o = getitem(%a, 0) : f16[2, 4, 256, 64]
  return %o
}"""


def test_a_call_that_a_template_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    graph = parse_graph(TEMPLATE)
    plan = emit_plan(graph, CompileOptions(target="cuda:90"))
    plan = with_binaries(plan, calls=calls_of(plan, graph))
    asked: list[Any] = []

    class Template:
        def __init__(self, call: Any, binary: Any, device: torch.device, over: Any) -> None:
            asked.append((call.name, binary.variant, device, over))
            self.binary = binary

        def __call__(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            asked.append([tensor.shape for tensor in tensors])
            return attention(*tensors, causal=True)

    monkeypatch.setattr(gpu_module, "GpuKernel", Template)
    ready = OnGpu(plan, CPU)
    q, k = torch.randn(2, 2, 4, 256, 64, dtype=torch.float16).unbind()
    (found,) = Frame(ready.plan, ready.binds(rest)).run([q, k])
    torch.testing.assert_close(found, attention(q, k, k, causal=True)[0])
    assert asked == [("flash_attention", plan.binaries[0].variant, CPU, (-1, -1)), [q.shape] * 3]


def test_what_makes_tensors_makes_them_on_the_device() -> None:
    plan = emit_plan(
        parse_graph("""graph @f on mesh<> {
  %x = input 0 : f32[3]
  %r = aten.arange.start_step(0, 3, 1) : i64[3]
  %y = aten.add.Tensor(%x, %r) : f32[3]
  return %y
}"""),
        CompileOptions(target="cuda:90"),
    )
    ready = OnGpu(plan, torch.device("meta"))
    (found,) = Frame(ready.plan, ready.binds(rest)).run([torch.empty(3, device="meta")])
    assert found.device.type == "meta" and found.shape == (3,)


MIXED = """
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh

mesh = Mesh.abstract(data=1)
parts = nn.Embedding(10, 16, padding_idx=0), nn.Linear(16, 48), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 10)
model = monarch.module_to_mesh(nn.ModuleList(parts), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@monarch.program
def step(tokens: "i64[4, 8]", targets: "i64[4, 8]"):
    embed, heads, norm, dropout, out = model
    optimizer.zero_grad()
    x = embed(tokens) + torch.linspace(0, 1, 8).unsqueeze(1) * torch.tensor([0.5, 2.0]).repeat(8)
    q, k, v = heads(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    mask = torch.arange(8) <= torch.arange(8).unsqueeze(1)
    x = norm(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
    x = dropout(x + torch.randn_like(x)) * F.one_hot(targets, 16).float()
    loss = F.cross_entropy(out(x).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss
"""


def test_no_value_of_a_plan_lies_elsewhere(tmp_path: Path) -> None:
    """On tensors without data, of which torch knows on which device they would lie, and refuses to mix these."""
    (tmp_path / "train.py").write_text(MIXED)
    traced = load_program(f"{tmp_path / 'train.py'}:step", None, {}, False).graph
    plan = compile_graph(traced, CompileOptions(target="cuda:90", kernels="off"))
    assert plan.constants
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ready = OnGpu(plan, torch.device("cuda", 0))
        frame = Frame(ready.plan, ready.binds(rest))
        found = frame.run(
            [torch.empty(spec.type.shape, dtype=spec.type.dtype, device="cuda:0") for spec in plan.inputs]
        )
    assert {value.device for value in found} == {torch.device("cuda", 0)}
    assert [value.dtype for value in found] == [spec.type.dtype for spec in plan.outputs]


def test_an_op_that_only_cpus_have_is_refused_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "rnn.py").write_text("""
import torch
import monarch
from monarch.distributed import Mesh

model = monarch.module_to_mesh(torch.nn.LSTM(8, 8), Mesh.abstract(data=1))

@monarch.program
def step(x: "f32[5, 8]"):
    return model(x)[0]
""")
    graph = load_program(f"{tmp_path / 'rnn.py'}:step", None, {}, False).graph
    plan = compile_graph(graph, CompileOptions(target="cuda:90", kernels="off"))  # a program takes ops that GPUs have
    at = next(n for n, instruction in enumerate(plan.instructions) if instruction.source >= 0)
    chosen = replace(plan.instructions[at], op="aten.mkldnn_rnn_layer.default")
    plan = replace(plan, instructions=(*plan.instructions[:at], chosen, *plan.instructions[at + 1 :]))
    with pytest.raises(MonarchError, match=r"calls aten.mkldnn_rnn_layer.default, which CPUs alone have") as caught:
        check_ops(plan)
    assert caught.value.source is not None and caught.value.source.line == 10


def test_a_plan_without_machine_code(traced: Graph) -> None:
    plan = replace(compile_graph(traced, CompileOptions(target="cuda:90", kernels="all")), binaries=())
    ready = OnGpu(plan, CPU)
    with pytest.raises(PlanError, match="has no machine code for kernel"):
        Frame(ready.plan, ready.binds(rest))


def test_a_plan_for_cpus(traced: Graph) -> None:
    with pytest.raises(PlanError, match="is for CPUs"):
        OnGpu(compile_graph(traced), CPU)


@pytest.mark.parametrize("mask", ["none", "causal", "added", "bool"])
def test_attention_in_parts_is_atens(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(2))
    keep = torch.rand(16, 16, generator=generator) < 0.8
    keep.fill_diagonal_(True)
    given = {"added": torch.where(keep, 0.5, -torch.inf), "bool": keep}.get(mask)
    theirs = torch.where(keep, 0.0, -torch.inf) if mask == "bool" else given
    ops, causal = torch.ops.aten, mask == "causal"
    out, total = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=theirs, scale=0.3)
    found = attention(q, k, v, 0.0, causal, attn_mask=given, scale=0.3)
    torch.testing.assert_close(found, (out, total))
    wanted = ops._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, total, 0.0, causal, attn_mask=theirs, scale=0.3
    )
    slopes = attention_backward(grad, q, k, v, out, total, 0.0, causal, attn_mask=given, scale=0.3)
    torch.testing.assert_close(slopes, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_parts_of_halves_is_as_near_as_atens(masked: bool) -> None:
    """Also where scores are large; a query that sees no key gets zeros, and passes no gradient on."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (3 * torch.randn(2, 3, 64, 32, generator=generator) for _ in range(4))
    q, k, v, grad = (each.bfloat16() for each in (q, k, v, grad))
    mask = torch.zeros(64, 64, dtype=torch.bfloat16)
    if masked:
        mask[5] = -torch.inf
    ops = torch.ops.aten
    out, total = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
    wanted = ops._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, total, 0.0, False, attn_mask=mask
    )
    found, ours = attention(q, k, v, attn_mask=mask)
    slopes = attention_backward(grad, q, k, v, found, ours, 0.0, False, attn_mask=mask)
    torch.testing.assert_close(ours, total, rtol=1e-5, atol=1e-4)
    with torch.enable_grad():
        exact = [each.double().requires_grad_() for each in (q, k, v)]
        scores = exact[0] @ exact[1].transpose(-1, -2) / 32**0.5
        weights = scores.softmax(-1) * (mask[:, :1] == 0)  # a row without keys has no weights
        result = weights @ exact[2]
        result.backward(grad.double())
    for one, other, right in zip(
        (found, *slopes), (out, *wanted), (result.detach(), *(each.grad for each in exact)), strict=True
    ):
        assert right is not None
        assert (one - right).abs().max() <= 2 * (other - right).abs().max()


GATHERS = """graph @f on mesh<> {
  %t = input 0 : f32[6, 16]
  %w = input 1 : f32[16, 16]
  %i = input 2 : i64[16]
  %a = aten.embedding(%t, %i) : f32[16, 16]
  %m = aten.mm(%a, %w) : f32[16, 16]
  %b = aten.embedding(%t, %i) : f32[16, 16]
  %c = aten.mul.Tensor(%b, %m) : f32[16, 16]
  return %c
}"""


def test_an_index_that_several_kernels_find_out_of_range_fails_one_step(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    plan = compile_graph(parse_graph(GATHERS), CompileOptions(target="cuda:90", kernels="all"))
    assert sum(bool(each.gathers) for each in plan.binaries) == 2
    ready = OnGpu(plan, CPU)
    frame = Frame(ready.plan, ready.binds(rest))
    table, weight, rows = torch.randn(6, 16), torch.randn(16, 16), torch.arange(16) % 6
    frame.run([table, weight, rows + 1])
    with pytest.raises(IndexError, match="an index is out of range: there are 6 rows"):
        ready.check()
    (found,) = frame.run([table, weight, rows])
    ready.check()
    torch.testing.assert_close(found, table[rows] * (table[rows] @ weight))
    frame.run([table, weight, rows + 1])
    ready.forget()
    ready.check()
