"""Plans for GPUs that use templates: a whole training step with the kernels that were chosen, against eager PyTorch."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.compiler import local_ops
from monarch.compiler.cli.load import load_program
from monarch.compiler.context import Context
from monarch.compiler.graph import Graph, tensor_type
from monarch.compiler.kernels.templates import templates
from monarch.compiler.kernels.triton.ahead import with_binaries
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.calls import TemplateSite, arguments, calls_of
from monarch.compiler.kernels.triton.emit import emit, variants_of
from monarch.compiler.loops.contraction import contraction
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.pipeline import fusing, lowering, partition_graph
from monarch.compiler.plan.binaries import check_binaries, kernels_of
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from tests.compiler.kernels.triton.assembly import assert_no_spills, assert_tensor_cores, assert_wide
from tests.compiler.kernels.triton.emitted import launch_all
from tests.compiler.kernels.triton.interpreter import interpreting
from tests.compiler.reference import run_reference
from tests.stdlib.kernels.numerics import TARGETS

PROGRAM = """
import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT

mesh = Mesh.abstract(data=2)
model = monarch.module_to_mesh(GPT(width=32, layers=1, sequence=16, vocabulary=64){to}, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@monarch.program
def step(tokens: "i64[4@data, 16]", targets: "i64[4@data, 16]"):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1){float}, targets.flatten())
    loss.backward()
    optimizer.step()
    return loss
"""


def traced(folder: Path, half: bool) -> Graph:
    path = folder / "train.py"
    path.write_text(PROGRAM.format(to=".bfloat16()" if half else "", float=".float()" if half else ""))
    return load_program(f"{path}:step", None, {}, False).graph


def lowered(graph: Graph, target: str, when: str, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setenv("MONARCH_TEMPLATES", when)
    made = partition_graph(graph)
    context = Context(CompileOptions(target=target, kernels="all"))
    for step in [*fusing(context), *lowering(context)]:
        made = step.run(made, context)
    return made


def inputs_of(graph: Graph) -> dict[str | int, Any]:
    generator = torch.Generator().manual_seed(3)
    found: dict[str | int, Any] = {}
    for node in graph.placeholders:
        label, type_ = node.meta["label"], tensor_type(node)
        if node.meta["kind"] == "input":
            found[label] = torch.randint(64, type_.shape, generator=generator)
        elif node.meta["kind"] == "scalar":
            found[label] = 1e-3
        elif "step" in str(label):
            found[label] = torch.ones(type_.shape, dtype=type_.dtype)
        else:
            values = torch.randn(type_.shape, generator=generator) / 8
            norm = "norm" in str(label) and "adamw" not in str(label)
            found[label] = (values.abs() + 0.01 if "sq" in str(label) else values + norm).to(type_.dtype)
    return found


def with_templates(graph: Graph, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[TemplateSite]:
    """Make the graph compute with the plan's kernels and templates, in Triton's interpreter."""

    def kernel(position: Any, sizes: Any, tensors: Any, text: str, over: Any) -> tuple[torch.Tensor, ...]:
        outputs, error = launch_all(parse_kernel(text), tensors)
        assert error == 0
        return tuple(outputs)

    monkeypatch.setitem(local_ops.LOCAL_OPS, "kernel", kernel)
    calls = calls_of(plan, graph, "all")
    places = [at for at, each in enumerate(plan.instructions) if each.op != "commit"]
    chosen = {at: call for call in calls for at in call.instructions}
    for at, node in zip(places, list(graph.calls), strict=True):
        if at in chosen:
            node.target = _interpreted(chosen[at])
    return calls


def _interpreted(call: TemplateSite) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        results, launches = call.template.launches(call.template.variants(*args, **kwargs)[0], args, kwargs)
        with interpreting():
            for launch in launches:
                launch.run()  # type: ignore[attr-defined]
        return results

    run.__name__ = call.template.name
    return run


@pytest.mark.full
@pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])
def test_a_training_step_with_templates_is_eagers(half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = traced(tmp_path, half)
    graph = lowered(eager, "cuda:90", "all", monkeypatch)
    plan = emit_plan(graph.copy(), CompileOptions(target="cuda:90"))
    names = {kernel.name for kernel in kernels_of(plan).values() if any(map(contraction, kernel.nests))}
    assert {"mm_gelu", "mm_add", "mm_gelu_backward"} <= names
    calls = with_templates(graph, plan, monkeypatch)
    assert [call.template.name for call in calls] == ["flash_attention", "flash_attention_backward"]
    inputs = inputs_of(eager)
    found, updates = run_reference(graph, inputs)
    wanted, expected = run_reference(eager, inputs)
    tolerance = 3e-2 if half else 2e-4
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert updates.keys() == expected.keys()
    for label in updates:
        torch.testing.assert_close(
            updates[label], expected[label], rtol=tolerance, atol=tolerance, msg=lambda text, at=label: f"{at}: {text}"
        )


def test_off_leaves_atens_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lowered(traced(tmp_path, True), "cuda:90", "off", monkeypatch)
    plan = emit_plan(graph, CompileOptions(target="cuda:90"))
    assert not any(contraction(nest) for kernel in kernels_of(plan).values() for nest in kernel.nests)
    assert calls_of(plan, graph, "off") == []


def attention_plan(
    dtype: str = "bf16", dim: int = 64, length: int = 256, keys: int | None = None, rest: str = "0.0, true"
) -> tuple[Plan, Graph]:
    q, k = f"{dtype}[2, 4, {length}, {dim}]", f"{dtype}[2, 4, {keys or length}, {dim}]"
    graph = parse_graph(f"""graph @f on mesh<> {{
  %q = input 0 : {q}
  %k = input 1 : {k}
  %v = input 2 : {k}
  %a = aten._scaled_dot_product_flash_attention_for_cpu(%q, %k, %v, {rest}) : ({q}, f32[2, 4, {length}])
  %o = getitem(%a, 0) : {q}
  return %o
}}""")
    return emit_plan(graph, CompileOptions(target="cuda:90")), graph


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_in_a_plan(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code of every variant that fits, with matrix instructions and wide loads; the file gives it back."""
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    plan, graph = attention_plan()
    plan = replace(plan, options=CompileOptions(target=target))
    whole = with_binaries(plan, calls=calls_of(plan, graph))
    assert whole.binaries
    for binary in whole.binaries:
        call, (launch,) = binary.call, binary.launches
        assert call is not None and call.instructions == (0,) and "us estimated" in call.why
        assert launch.arguments == ("a0", "a1", "a2", "b0", "b1") and launch.grid[1:] == (4, 2)
    first = calls_of(plan, graph)[0]
    args, kwargs, _ = first.made()
    compiled = first.template.launches(first.template.variants(*args)[0], args, kwargs)[1][0].compile_fixed(target)
    assert_tensor_cores(compiled)
    assert_wide(compiled, kinds=("load",))
    assert plan_from_bytes(plan_bytes(whole)) == whole
    assert with_binaries(plan, calls=calls_of(plan, graph)) == whole


REFUSED = {
    "dropout": {"rest": "0.1, true"},
    "float64": {"dtype": "f64"},
    "wide heads": {"dim": 320},
    "a causal mask over a cache": {"keys": 512},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_template_refuses_stays_atens(case: str) -> None:
    plan, graph = attention_plan(**REFUSED[case])  # type: ignore[arg-type]
    assert calls_of(plan, graph, "all") == []


def test_calls_that_are_alike_share_their_machine_code() -> None:
    graph = parse_graph("""graph @f on mesh<> {
  %q = input 0 : f32[2, 4, 64, 16]
  %a = aten._scaled_dot_product_flash_attention_for_cpu(%q, %q, %q) : (f32[2, 4, 64, 16], f32[2, 4, 64])
  %b = getitem(%a, 0) : f32[2, 4, 64, 16]
  %c = aten._scaled_dot_product_flash_attention_for_cpu(%q, %b, %b) : (f32[2, 4, 64, 16], f32[2, 4, 64])
  %d = getitem(%c, 0) : f32[2, 4, 64, 16]
  %e = aten._scaled_dot_product_flash_attention_for_cpu(%q, %d, %d) : (f32[2, 4, 64, 16], f32[2, 4, 64])
  %f = getitem(%e, 0) : f32[2, 4, 64, 16]
  return %f
}""")
    plan = emit_plan(graph, CompileOptions(target="cuda:90"))
    assert [call.instructions for call in calls_of(plan, graph)] == [(0,), (2, 4)]
    assert graph.returns[0] is not None and graph.returns[0].target is operator.getitem


def test_the_arguments_of_an_instruction() -> None:
    plan, _ = attention_plan()
    tensors = [torch.empty(1), torch.empty(2), torch.empty(3)]
    assert arguments(plan.instructions[0], tensors) == ([*tensors, 0.0, True], {})
    assert set(templates()) >= {plan.instructions[0].op}
    check_binaries(plan, lambda text: pytest.fail(text))


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_the_demos_products_compiled(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan would run them, at the demo's width: on matrix units, with nothing spilled from registers."""
    path = tmp_path / "train.py"
    small = "GPT(width=32, layers=1, sequence=16, vocabulary=64)"
    text = PROGRAM.format(to=".bfloat16()", float=".float()").replace(small, "GPT(layers=1)")
    path.write_text(text.replace("4@data, 16", "64@data, 128"))
    traced = load_program(f"{path}:step", None, {}, False).graph
    plan = emit_plan(lowered(traced, target, "all", monkeypatch), CompileOptions(target=target))
    products = [kernel for kernel in kernels_of(plan).values() if any(map(contraction, kernel.nests))]
    assert {"mm_gelu", "mm_gelu_backward"} <= {kernel.name for kernel in products}
    for kernel in products:
        (tiles, _), *_ = variants_of(kernel, target)
        (compiled,) = compile_launches(kernel, emit(kernel, tiles=tiles), target)
        assert re.search(r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma", compiled.assembly), kernel.name
        assert_wide(compiled, kinds=("load",))
        assert_no_spills(compiled)
