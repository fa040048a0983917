"""Distributed tensors outside programs: placing, fetching, eager ops, views and writes."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.types import Layout
from monarch.language import DistributedTensor, Mesh, distribute, layout, module_to_mesh, program
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, compile_dense


def test_forms_of_a_layout(mesh: Mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard

    x = torch.arange(32.0).view(4, 8)
    forms: list[dict[str, Any]] = [
        {"layout": "[@data, @model]"},
        {"sharding_spec": ["data", "model"]},
        {"placements": [Shard(0), Shard(-1)]},
        {"layout": Layout((("data",), ("model",)))},
    ]
    for form in forms:
        placed = distribute(x, mesh, **form)
        assert str(placed.tensor_type) == "f32[4@data, 8@model]"
        assert torch.equal(placed.full_tensor(), x)
        assert torch.equal(placed.to_local(data=1), x[2:, :4])
    assert distribute(x, mesh, placements=[Replicate(), Shard(0)]).sharding == Layout((("model",), ()))
    assert distribute(x, mesh, [("data", "model"), None]).sharding == Layout((("data", "model"), ()))
    assert distribute(x, mesh).sharding.is_replicated


def test_what_only_a_dtensor_has_says_what_to_write(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    assert not hasattr(x, "placements") and not hasattr(x, "device_mesh")
    with pytest.raises(AttributeError, match=r"x\.sharding is its layout, and x\.to_dtensor\(\) a DTensor"):
        x.placements  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"x\.mesh is its mesh"):
        x.device_mesh  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["data"], "the layout of the tensor has 1 dims, and the tensor has 2"),
        (["data", "data"], "mesh dim 'data' stands twice"),
        (["rows", None], "unknown mesh dim 'rows'"),
        ([3, None], "the layout of the tensor holds 3"),
    ],
)
def test_layouts_that_do_not_fit(spec: list[Any], message: str, mesh: Mesh) -> None:
    with pytest.raises(LayoutError, match=message):
        distribute(torch.ones(4, 4), mesh, sharding_spec=spec)


def test_fetching_asks_one_worker_of_each_group_of_copies(mesh: Mesh) -> None:
    executor: Any = mesh.executor
    asked: list[int] = []
    shards = executor.shards
    executor.shards = lambda handle, workers: (asked.append(len(workers)), shards(handle, workers))[1]
    distribute(torch.ones(4), mesh).full_tensor()
    distribute(torch.ones(4), mesh, "[@model]").full_tensor()
    distribute(torch.ones(4, 4), mesh, "[@model, @data]").full_tensor()
    assert asked == [1, 2, 4]


def test_python_sees_values(mesh: Mesh) -> None:
    x = distribute(torch.tensor([1, 2, 3]), mesh)
    total = x.sum()
    assert total.item() == 6 and int(total) == 6 and float(total) == 6.0 and bool(total > 5)
    assert (x * 2).tolist() == [2, 4, 6]
    assert list(range(total))[-1] == 5
    assert (x + 1).numpy().sum() == 9
    assert f"{total}" == "6" and f"{total:03d}" == "006"
    assert len(x) == 3 and [int(value) for value in x] == [1, 2, 3]
    assert torch.equal(x, x) and not torch.equal(x, x + 1)


def test_nothing_runs_until_a_value_is_needed(mesh: Mesh) -> None:
    executor: Any = mesh.executor
    x = distribute(torch.ones(4), mesh)
    y = x
    for _ in range(10):
        y = y * 2 + 1
    assert executor.runs == []
    y.full_tensor()
    assert len(executor.runs) == 1
    y.full_tensor()
    assert len(executor.runs) == 1


def test_values_that_python_dropped_are_not_computed(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    y = (x * 3).exp().log()
    plan: list[str] = []
    with compiling_with(lambda graph: (plan.append(str(graph)), compile_dense(graph))[1]):
        dropped = x.sin()
        del dropped
        y.full_tensor()
    assert "aten.sin" not in plan[0]
    assert plan[0].count("update ") == 1


def test_numbers_make_no_new_plan(mesh: Mesh) -> None:
    compiled = []
    x = distribute(torch.ones(4), mesh)
    with compiling_with(lambda graph: (compiled.append(graph), compile_dense(graph))[1]):
        for i in range(5):
            value = 0.1 * i + 0.05
            z = torch.addcmul(x * value + i, x, x, value=value).clamp(0.0, value * 100).add(x, alpha=value)
            dense = torch.addcmul(torch.ones(4) * value + i, torch.ones(4), torch.ones(4), value=value)
            torch.testing.assert_close(z.full_tensor(), dense.clamp(0.0, value * 100).add(torch.ones(4), alpha=value))
    assert len(compiled) == 1


def test_plain_tensors_are_taken_as_replicated(mesh: Mesh) -> None:
    executor: Any = mesh.executor
    x, mask = distribute(torch.ones(4), mesh), torch.tensor([1.0, 0.0, 1.0, 0.0])
    before = executor.puts
    assert (x * mask).tolist() == [1, 0, 1, 0]
    assert (x * mask).tolist() == [1, 0, 1, 0]
    assert executor.puts == before + 1  # it travels once
    mask += 1
    assert (x * mask).tolist() == [2, 1, 2, 1]
    x.copy_(mask)
    assert x.tolist() == [2, 1, 2, 1]


def test_views_share_their_storage_over_runs(mesh: Mesh) -> None:
    x = distribute(torch.zeros(4, 6), mesh)
    row, column, flat, halves = x[1], x.t()[2], x.view(-1), x.split(3, 1)
    dense = torch.zeros(4, 6)
    dense_row, dense_column, dense_flat, dense_halves = dense[1], dense.t()[2], dense.view(-1), dense.split(3, 1)
    row += 1
    dense_row += 1
    assert torch.equal(column.full_tensor(), dense_column)  # runs what was recorded
    column *= 5
    dense_column *= 5
    flat[3:9] -= 2
    dense_flat[3:9] -= 2
    halves[1][:, 0] = 7
    dense_halves[1][:, 0] = 7
    x[dense > 4] = -1.0
    dense[dense > 4] = -1.0
    for ours, theirs in ((x, dense), (row, dense_row), (column, dense_column), (flat, dense_flat)):
        assert torch.equal(ours.full_tensor(), theirs)


def test_autograd_outside_programs(mesh: Mesh) -> None:
    x = distribute(torch.tensor([1.0, 2.0, 3.0]).requires_grad_(), mesh)
    assert x.requires_grad and x.is_leaf
    y = (x**2).sum()
    print(y)  # runs the forward before the backward is recorded
    y.backward()
    assert x.grad.tolist() == [2, 4, 6]
    (grad,) = torch.autograd.grad((x**3).sum(), x)
    assert grad.tolist() == [3, 12, 27]


def test_redistribute_and_layout(mesh: Mesh) -> None:
    x = distribute(torch.arange(8.0).requires_grad_(), mesh, "[@data]")
    graphs: list[str] = []
    with compiling_with(lambda graph: (graphs.append(str(graph)), compile_dense(graph))[1]):
        y = layout(x.redistribute("[@model]") * 2, ["data"])
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * 8
    assert graphs[0].count(" = constrain(") == 4  # both, forward and backward
    assert '"[@model]"' in graphs[0]


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_of_a_gradient_goes_through_layouts(mesh: Mesh, inside: bool) -> None:
    values = torch.randn(8, 4)

    def penalty(x: Any, laid_out: Callable[[Any], Any]) -> Any:
        (gradient,) = torch.autograd.grad(laid_out(x).sin().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x.grad

    def found(x: Any) -> Any:
        return penalty(x, lambda value: layout(value.redistribute("[@model, -]"), "[-, @data]"))

    x = distribute(values, mesh, "[@data, -]").requires_grad_()
    ours = program(found)(x) if inside else found(x)
    torch.testing.assert_close(ours.full_tensor(), penalty(values.clone().requires_grad_(), lambda value: value))


def test_a_gradient_of_a_gradient_does_not_leave_the_mesh(mesh: Mesh) -> None:
    x = torch.randn(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(distribute(x * x, mesh).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inference_mode_reads_what_was_made_outside_of_it(mesh: Mesh, requires_grad: bool) -> None:
    x = distribute(torch.arange(8.0), mesh, "[@data]").requires_grad_(requires_grad)
    with torch.inference_mode():
        assert x[3].item() == x.view(2, 4).detach()[0, 3].item() == x.data[3].item() == 3.0
        assert not x.view(2, 4).is_inference() and (x * 2).is_inference()
    if requires_grad:
        x.detach().mul_(2)
        (x * x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad.full_tensor(), torch.arange(8.0) * 4)  # type: ignore[attr-defined]


def test_copies(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(4, 4), mesh)
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, nn.Parameter) and isinstance(twin.weight, DistributedTensor)
    with torch.no_grad():
        model.weight.zero_()
    assert twin.weight.full_tensor().abs().sum() > 0
    assert model.weight.full_tensor().abs().sum() == 0
    model.load_state_dict(twin.state_dict())
    assert torch.equal(model.weight.full_tensor(), twin.weight.full_tensor())
    plain = nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    model.weight.data = twin.weight.data
    assert torch.equal(model.weight.full_tensor(), twin.weight.full_tensor())


def test_a_module_on_a_mesh(mesh: Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
            self.head.weight = self.embed.weight
            self.norm, self.scale = nn.BatchNorm1d(3), nn.Parameter(torch.ones(1))

    model = module_to_mesh(Tied(), mesh)
    assert str(model.embed.weight.tensor_type) == "f32[10@data, 4]"
    assert model.head.weight is model.embed.weight
    assert str(model.norm.weight.tensor_type) == "f32[3@data]"
    assert str(model.scale.tensor_type) == "f32[1]"  # smaller than the mesh dim
    assert str(model.norm.running_mean.tensor_type) == "f32[3]"
    assert isinstance(model.head.bias, nn.Parameter)

    model = module_to_mesh(
        Tied(), mesh, layouts={"*": {0: "[]", 1: "[-]", 2: "[-, @model]"}, "/head\\.b.*/": "[@data]", "norm.*": None}
    )
    assert str(model.embed.weight.tensor_type) == "f32[10, 4@model]"
    assert str(model.head.bias.tensor_type) == "f32[10@data]"
    with pytest.raises(LayoutError, match="are one tied parameter, and have two layouts"):
        module_to_mesh(Tied(), mesh, layouts={"embed.weight": "[@data, -]", "head.weight": "[-, @model]"})


def test_foreach_ops(mesh: Mesh) -> None:
    dense = [torch.full((2,), float(i)) for i in range(3)]
    ours = [distribute(t, mesh) for t in dense]
    for tensors in (dense, ours):
        torch._foreach_add_(tensors, 1)
        torch._foreach_mul_(tensors, [1.0, 2.0, 3.0])
        torch._foreach_addcmul_(tensors, tensors, tensors, value=0.5)
        torch._foreach_lerp_(tensors, [t * 2 for t in tensors], 0.25)
    for a, b in zip(ours, torch._foreach_sqrt(dense), strict=True):
        torch.testing.assert_close(a.sqrt().full_tensor(), b)
    norms = torch._foreach_norm(ours)
    assert [n.item() for n in norms] == pytest.approx([n.item() for n in torch._foreach_norm(dense)])


def test_a_long_recording_is_run_in_parts(mesh: Mesh) -> None:
    executor: Any = mesh.executor
    x = distribute(torch.zeros(2), mesh)
    for _ in range(4500):
        x.add_(1)
    assert x.tolist() == [4500.0, 4500.0]
    assert len(executor.runs) == 2


# -- random programs of views and writes, against plain tensors ------------------------------------------------------

Do = Callable[[list[torch.Tensor], int, float], torch.Tensor | None]


def _pick(tensors: list[torch.Tensor], n: int) -> torch.Tensor:
    return tensors[n % len(tensors)]


def _write(tensors: list[torch.Tensor], n: int, c: float) -> None:
    target, source = _pick(tensors, n), _pick(tensors, n // 7)
    if target.shape == source.shape:
        target.copy_(source * c)


STEPS: list[Do] = [
    lambda t, n, c: _pick(t, n).transpose(0, -1),
    lambda t, n, c: _pick(t, n).reshape(-1),
    lambda t, n, c: _pick(t, n)[n % _pick(t, n).shape[0]] if _pick(t, n).ndim > 1 else None,
    lambda t, n, c: _pick(t, n)[:: 1 + n % 2],
    lambda t, n, c: _pick(t, n).unsqueeze(n % 2),
    lambda t, n, c: _pick(t, n).squeeze(),
    lambda t, n, c: _pick(t, n).chunk(2, -1)[n % 2] if _pick(t, n).shape[-1] > 1 else None,
    lambda t, n, c: _pick(t, n).unbind(0)[0] if _pick(t, n).ndim > 1 else None,
    lambda t, n, c: _pick(t, n).diagonal() if _pick(t, n).ndim == 2 else None,
    lambda t, n, c: _pick(t, n) * c,
    lambda t, n, c: _pick(t, n).clone(),
    lambda t, n, c: _pick(t, n).detach(),
    lambda t, n, c: _pick(t, n).add_(c),
    lambda t, n, c: _pick(t, n).mul_(c),
    lambda t, n, c: _pick(t, n).zero_(),
    lambda t, n, c: _pick(t, n).fill_(c),
    lambda t, n, c: _write(t, n, c),
    lambda t, n, c: _pick(t, n).masked_fill_(_pick(t, n) > c, c),
    lambda t, n, c: torch.cumsum(_pick(t, n), 0),
    lambda t, n, c: _pick(t, n).sum(0, keepdim=True) + _pick(t, n),
]


def _play(
    tensors: list[torch.Tensor], steps: list[tuple[int, int, float]], peek: Callable[[torch.Tensor], Any]
) -> None:
    for at, (kind, n, c) in enumerate(steps):
        made = STEPS[kind](tensors, n, c)
        if made is not None and made.ndim and made.numel():
            tensors.append(made)
        if at % 5 == 4:
            peek(_pick(tensors, n))


@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 100), st.sampled_from([0.5, -1.0, 2.0, 0.25])),
        max_size=25,
    ),
    inside=st.booleans(),
)
def test_views_and_writes_are_those_of_plain_tensors(steps: list[tuple[int, int, float]], inside: bool) -> None:
    with executors_by(DenseExecutor), compiling_with(compile_dense), Mesh(data=2) as mesh:
        start = torch.arange(24.0).view(4, 6)
        dense = [start.clone()]
        _play(dense, steps, lambda t: None)
        base = distribute(start, mesh)
        if inside:

            @program
            def run() -> list[torch.Tensor]:
                tensors: list[torch.Tensor] = [base]
                _play(tensors, steps, lambda t: None)
                return tensors

            ours: list[Any] = run()
            assert torch.equal(base.full_tensor(), dense[0])
        else:
            ours = [base]
            _play(ours, steps, lambda t: t.full_tensor())  # type: ignore[attr-defined]
        for a, b in zip(ours, dense, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


def test_importing_and_recording_load_no_compiler_of_torchs() -> None:
    """TorchDynamo and DTensor take as long to load as the rest of torch."""
    code = """
        import sys, torch, monarch.language as m
        x = m.distribute(torch.ones(4, 4), m.Mesh.abstract(data=2), "[@data, -]").requires_grad_()
        m.program(lambda x: (m.layout(x @ x.T, "[-, @data]") * 2 + 1).relu().sum()).trace(x)
        print(sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", dedent(code)], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_shapes_and_dtypes_are_those_of_plain_tensors(dtype: torch.dtype, mesh: Mesh) -> None:
    """Every kind of operands for the ops that have a shape function of ours."""
    wide, row, column, scalar = (
        torch.ones(shape, dtype=kind)
        for shape, kind in (((3, 4), dtype), ((4,), dtype), ((3, 1), torch.float32), ((), dtype))
    )
    operands = [wide, row, column, scalar, wide.t(), wide[:, ::2], 2, 0.5]
    calls: list[Any] = [torch.add, torch.mul, torch.div, torch.pow, torch.mm, torch.maximum, torch.lt]
    calls += [lambda a, b: torch.addmm(b, a, a.t()), lambda a, b: torch.bmm(a[None], b[None])]
    calls += [lambda a, b: a.sum(), lambda a, b: a.mean(0, keepdim=True), lambda a, b: a.sum([-1], dtype=torch.float64)]
    calls += [lambda a, b: a.clone().mul_(b), lambda a, b: a.clone().add_(b, alpha=2), lambda a, b: a.exp().sqrt()]
    calls += [lambda a, b: torch.addcmul(a, b, b), lambda a, b: torch.lerp(a, b, 0.5), lambda a, b: a.relu()]
    compared = 0
    for call, a, b in itertools.product(calls, operands[:-2], operands):
        ours = [distribute(x, mesh) if isinstance(x, torch.Tensor) else x for x in (a, b)]
        try:
            expected = call(a, b)
        except (RuntimeError, TypeError, IndexError):
            continue  # what torch's meta kernels let pass is refused by the workers
        found = call(*ours)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        compared += 1
    assert compared > 100


def test_ops_without_a_shape_function_of_their_own(mesh: Mesh) -> None:
    values = torch.tensor([3.0, 1.0, 2.0])
    x = distribute(values, mesh)
    assert torch.equal(torch.histc(x, 3).full_tensor(), torch.histc(values, 3))
    assert torch.special.bessel_j0(x).full_tensor().allclose(torch.special.bessel_j0(values))


def test_threads_share_the_eager_door(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    found: dict[int, float] = {}

    def work(number: int) -> None:
        y = x
        for _ in range(50):
            y = y * 1.01 + number
        found[number] = y.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        expected = torch.ones(4)
        for _ in range(50):
            expected = expected * 1.01 + number
        assert found[number] == pytest.approx(expected.sum().item(), rel=1e-5)


def test_the_data_of_a_plain_tensor_cannot_be_a_distributed_one(mesh: Mesh) -> None:
    plain, layer = torch.ones(4), torch.nn.Linear(4, 4)
    with pytest.raises(MonarchError, match=r"plain tensor to f32\[4\].*[\s\S]*x.data = y.full_tensor\(\)"):
        plain.data = distribute(torch.zeros(4), mesh)
    assert plain.tolist() == [1, 1, 1, 1]
    with pytest.raises(MonarchError, match="module_to_mesh"):
        layer.weight.data = distribute(torch.zeros(4, 4), mesh)
    plain.data = torch.zeros(4)
    assert plain.data.tolist() == [0, 0, 0, 0]


def test_set_shares_memory(mesh: Mesh) -> None:
    x, y = (distribute(torch.full((4,), value), mesh) for value in (1.0, 2.0))
    row = x[:2]
    x.set_(y)
    y.add_(1)
    assert (x.tolist(), row.tolist()) == ([3, 3, 3, 3], [1, 1])
    with pytest.raises(MonarchError, match=r"set_ of a distributed and a plain tensor[\s\S]*x.copy_\(y\)"):
        x.set_(torch.zeros(4))
    with pytest.raises(MonarchError, match=r"memory from elsewhere[\s\S]*x.set_\(y.as_strided\(size, stride, offset"):
        x.set_(y, 1, (4,), (0,))
    x.set_(y.as_strided((4,), (0,), 1))
    assert x.tolist() == [3, 3, 3, 3]
    x.data = distribute(torch.arange(4.0).view(2, 2), mesh).t().reshape(4)
    assert x.tolist() == [0, 2, 1, 3]
