"""What a program takes: numbers, lists and arrays where a tensor is expected, types in `Annotated`; and which mesh."""

from __future__ import annotations

import datetime
import decimal
import fractions
import operator
import random
import re
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
import torch

import monarch
from monarch.compiler.errors import LayoutError, PerformanceWarning, ProgramError
from monarch.compiler.execution.factories import executors_by
from monarch.language import Mesh, distribute, module_to_mesh, program
from monarch.language.compile import compiling_with
from monarch.language.errors import TracedAgainWarning
from tests.language.dense import DenseExecutor, compile_dense

Batch = Annotated[torch.Tensor, "f32[4@data, 2]"]


@pytest.fixture(autouse=True)
def no_other_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes that other tests of this process have left open are none of these programs'."""
    monkeypatch.setattr("monarch.language.tensors.mesh._meshes", weakref.WeakValueDictionary())


@program
def double(x: Batch) -> torch.Tensor:
    return x * 2


# -- arrays ----------------------------------------------------------------------------------------------------------


def read_only() -> np.ndarray:
    array = np.full((4, 2), 3, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2]] * 4,
        [(0.1, 0.2)] * 4,
        [[True, False]] * 4,
        np.arange(8, dtype=np.float32).reshape(4, 2),
        np.arange(8, dtype=np.float32).reshape(2, 4).T,
        read_only(),
        [np.arange(2, dtype=np.float32)] * 4,
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_lists_and_arrays_are_tensors(mesh: Mesh, value: Any, keyword: bool) -> None:
    wanted = torch.as_tensor(np.array(value), dtype=torch.float32) * 2
    found: Any = double(x=value) if keyword else double(value)
    assert torch.equal(found.full_tensor(), wanted)
    assert "input 0" in str(double.trace(value).graph)
    assert "f32[4@data, 2]" in str(double.trace(value).graph)


def test_numbers_are_tensors(mesh: Mesh) -> None:
    @program
    def scaled(x: torch.Tensor, by: "f32[]", times: "i64[]") -> torch.Tensor:
        return x * by**times

    x = torch.arange(3.0)
    for by, times in ((0.5, 2), (3, 1), (np.float32(0.25), np.int64(3)), (True, 4)):
        found: Any = scaled(x, by, times)  # type: ignore[arg-type]
        torch.testing.assert_close(found.full_tensor(), x * float(by) ** int(times))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((4, 2)), r"'x' is f64\[4, 2\], and is annotated as f32\[4@data, 2\]"),
        ([[1.0, 2.0]] * 3, r"'x' is f32\[3, 2\], and is annotated as f32\[4@data, 2\]"),
        ([[1.0, 2.0], [1.0]], r"makes no such tensor: .*(.|\n)*it is \[\[1.0, 2.0\], \[1.0\]\]"),
        (["a"], "makes no such tensor"),
    ],
)
def test_what_does_not_fit_its_annotation_is_refused(mesh: Mesh, value: Any, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        double(value)


def test_a_sparse_tensor_is_refused_as_an_argument_and_closed_over(mesh: Mesh) -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(LayoutError, match=r"torch.sparse_coo cannot be on a mesh[\s\S]*to_dense"):
        program(lambda x: x * 2, mesh=mesh).trace(sparse)
    assert list(program(lambda x: x * len(sparse), mesh=mesh).trace(torch.ones(4)).graph.calls)


def test_a_fraction_is_no_whole_number(mesh: Mesh) -> None:
    @program
    def step(x: "i32[2]") -> torch.Tensor:
        return x + 1

    with pytest.raises(ProgramError, match=r"'x' is f32\[2\], and is annotated as i32\[2\]"):
        step([1.5, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="makes no such tensor"):
        step([2**40, 1])  # type: ignore[arg-type]
    assert step([1, 2]).full_tensor().dtype == torch.int32  # type: ignore[arg-type, attr-defined]


# -- annotations -----------------------------------------------------------------------------------------------------


def test_types_in_annotated(mesh: Mesh) -> None:
    import typing as t

    @program
    def step(x: Batch, y: Annotated[torch.Tensor, "a batch", "f32[4, 2@model]"], z: t.Annotated[float, "rate"]) -> Any:
        return x + y * z

    x, y = torch.rand(4, 2), torch.rand(4, 2)
    graph = str(step.trace(x, y, 0.5).graph)
    assert "f32[4@data, 2]" in graph and "f32[4, 2@model]" in graph
    step.__wrapped__.__annotations__.update(x=Batch, y=Annotated[torch.Tensor, "f32[4, 2@data]"])
    assert "f32[4, 2@data]" in str(program(step.__wrapped__).trace(x, y, 0.5).graph)
    with pytest.raises(ProgramError, match=r"annotated as f32\[4@data, 2\]"):
        step(torch.zeros(3, 2), y, 0.5)


# -- which mesh ------------------------------------------------------------------------------------------------------


@pytest.fixture
def dense() -> Any:
    with executors_by(DenseExecutor), compiling_with(compile_dense):
        yield


def test_a_program_finds_the_only_mesh(dense: Any) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with Mesh.abstract(data=512) as abstract:
        assert "mesh<data=512>" in str(step.trace(torch.ones(3)).graph)
    assert abstract.is_closed
    for size in (2, 3):  # the mesh that the program found before is closed
        with Mesh.abstract(data=512), Mesh(data=size) as mesh:
            view = mesh.rename(data="rows")
            for _ in range(3):
                found: Any = step(torch.ones(3))
                assert found.mesh is mesh and found.full_tensor().tolist() == [2, 2, 2]
            with Mesh(rows=2):  # a program keeps the mesh that it has found
                found = step(torch.ones(3))
                assert found.mesh is mesh
            del view


def test_of_several_meshes_none_is_chosen(dense: Any) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    words = r"step has no mesh, and this process has 2(.|\n)*Mesh\(data=2\)\n +Mesh\(rows=3\)\n(.|\n)*mesh=\.\.\."
    with Mesh(data=2), Mesh(rows=3) as second:
        with pytest.raises(ProgramError, match=words):
            step(torch.ones(3))
        found: Any = step(monarch.distribute(torch.ones(3), second))
        assert found.mesh is second


class Count(int):
    pass


KINDS: dict[str, tuple[Any, Any]] = {
    "a float of NumPy": (lambda i: np.float32(i), float),
    "a number of NumPy in a list": (lambda i: [np.int64(i)], lambda value: int(value[0])),
    "a record": (lambda i: np.array([(float(i),)], dtype=[("k", "f4")])[0], lambda value: float(value["k"])),
    "a fraction": (lambda i: fractions.Fraction(i, 3), float),
    "a decimal": (lambda i: decimal.Decimal(i), float),
    "a date": (lambda i: datetime.date(2000 + i, 1, 1), lambda value: value.year),
    "a pattern": (lambda i: re.compile("a" * i), lambda value: len(value.pattern)),
    "a class of integers": (lambda i: Count(i), lambda value: value + 0),
    "a slice": (lambda i: slice(i), lambda value: value.stop),
    "an iterator": (lambda i: iter([i]), next),
    "a generator": (lambda i: (each for each in [i]), next),
    "random numbers": (lambda i: random.Random(i), lambda value: value.random()),
    "an exception": (lambda i: ValueError(i), lambda value: value.args[0]),
    "a getter": (lambda i: operator.itemgetter(i), lambda value: value(range(9))),
}


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_another_object_of_any_kind_is_another_argument(kind: str, mesh: Mesh) -> None:
    make, read = KINDS[kind]
    step = program(lambda x, value: x * read(value), mesh=mesh)
    for number in range(4):
        assert step(torch.ones(1), make(number)).tolist() == [pytest.approx(float(read(make(number))))]


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
def test_one_iterator_goes_on_from_call_to_call(mesh: Mesh) -> None:
    step = program(lambda x, numbers: x * next(numbers), mesh=mesh)
    for numbers in (iter([1, 2, 3, 4]), (number for number in (1, 2, 3, 4))):
        assert [step(torch.ones(1), numbers).item() for _ in range(4)] == [1, 2, 3, 4]


# -- objects that hold what changes ----------------------------------------------------------------------------------


@dataclass
class Several:
    x: torch.Tensor


@dataclass
class Registered:
    x: torch.Tensor


torch.export.register_dataclass(Registered)


def test_a_program_that_is_traced_for_what_an_argument_holds_says_what_helps(mesh: Mesh, traces: list[str]) -> None:
    step = program(lambda batch: batch.x * 2, mesh=mesh)
    with pytest.warns(TracedAgainWarning, match="'batch' is a Several, and its content .'x', .*register_dataclass"):
        for i in range(10):
            assert step(Several(torch.full((1,), float(i)))).item() == 2 * i
    mean = program(lambda x, numbers: x * numbers.mean(), mesh=mesh)
    with pytest.warns(TracedAgainWarning, match="the array 'numbers' is built into the plan. Pass it as a tensor"):
        for i in range(10):
            assert mean(torch.ones(1), np.full(3, float(i))).item() == i
    traces.clear()
    for i in range(10):
        assert step(Registered(torch.full((1,), float(i)))).item() == 2 * i
        assert mean(torch.ones(1), torch.as_tensor(np.full(3, float(i)))).item() == i
    assert len(traces) == 2


@pytest.mark.parametrize("what", ["tensor", "array"])
def test_a_program_that_is_traced_for_a_plain_tensor_or_array_says_to_place_it(
    mesh: Mesh, traces: list[str], what: str
) -> None:
    state = SimpleNamespace(rate=torch.ones(1) if what == "tensor" else np.ones(1, "float32"))
    step = program(lambda x: x * torch.as_tensor(state.rate), mesh=mesh)
    with pytest.warns(TracedAgainWarning, match="'rate' is no tensor on a mesh.* monarch.distribute"):
        for _ in range(10):
            step(torch.ones(1))
            state.rate *= 0.5
    traces.clear()
    state.rate = monarch.distribute(torch.as_tensor(state.rate), mesh)
    for _ in range(10):
        before = state.rate.item()
        assert step(torch.ones(1)).item() == before
        state.rate *= 0.5
    assert len(traces) == 1


# -- torch.compile ---------------------------------------------------------------------------------------------------


def test_torch_compile_of_a_program_is_the_program(mesh: Mesh) -> None:
    assert torch.compile(double) is double
    assert torch.compile(double, mode="max-autotune") is double
    assert torch.compile(fullgraph=True)(double) is double
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]


class Scales(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`")
@pytest.mark.parametrize("form", ["torch.compile", "of a function", "in place", "decorator", "within"])
def test_what_torch_compile_has_made_runs_on_meshes(form: str, mesh: Mesh, traces: list[str]) -> None:
    model, x = Scales(), torch.rand(3, 4)
    expected = model(x).detach()
    compiled: Any = model
    if form == "torch.compile":
        compiled = torch.compile(model)
    elif form == "of a function":
        compiled = torch.compile(lambda x: model(x), fullgraph=True)
    elif form == "in place":
        model.compile()
    elif form == "decorator":
        compiled = torch.compile(dynamic=True)(lambda x: model(x))
    else:
        compiled = lambda x: torch.compile(model)(x)  # noqa: E731
    module_to_mesh(model, mesh, {})
    step = program(lambda x: compiled(x), mesh=mesh)
    for _ in range(3):
        torch.testing.assert_close(step(x).full_tensor(), expected)
    assert len(traces) == 1 or form == "within"
    torch.testing.assert_close(compiled(distribute(x, mesh)).detach().full_tensor(), expected)
    torch.testing.assert_close(compiled(x).detach().full_tensor(), expected)


# -- one object at several places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("calls", ["tuut", "uttu"])
def test_a_tensor_that_is_passed_twice_is_one(mesh: Mesh, calls: str, placed: bool) -> None:
    def step(a: Any, b: Any) -> Any:
        return torch.autograd.grad((a * b).sum(), a)[0] * (3.0 if a is b else 1.0)

    ours = program(step, mesh=mesh)
    for second in calls:
        for _ in range(4):
            t, u = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
            wanted = step(t, {"t": t, "u": u}[second])
            if placed:
                t, u = (distribute(each.detach(), mesh).requires_grad_() for each in (t, u))
            assert torch.equal(ours(t, {"t": t, "u": u}[second]).full_tensor(), wanted)


ONE, OTHER = SimpleNamespace(), SimpleNamespace()
FIRST, SECOND = frozenset([1.0]), frozenset([1.0])


@pytest.mark.parametrize(("one", "other"), [(ONE, OTHER), (FIRST, SECOND)])
def test_a_program_notices_which_object_an_argument_is(mesh: Mesh, one: Any, other: Any) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return x * ((2.0 if a is b else 1.0) + (4.0 if a is ONE or a is FIRST else 0.0))

    for a, b, wanted in ((one, one, 6.0), (one, other, 5.0), (other, other, 2.0), (other, one, 1.0), (one, one, 6.0)):
        for _ in range(4):
            assert step(torch.ones(1), a, b).item() == wanted


def test_an_argument_that_a_program_changes_as_what_it_closes_over_is_one_tensor(mesh: Mesh) -> None:
    state, x = distribute(torch.ones(2), mesh), torch.full((2,), 5.0)

    @program(mesh=mesh)
    def step(a: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return state * a

    for call in range(4):
        assert step(x).tolist() == [5.0 * (2 * call + 2)] * 2
        assert step(state).tolist() == [(2 * call + 3.0) ** 2] * 2
    assert step(state.clone()).tolist() == [90.0, 90.0]  # 9 before the call, and 10 in it
    assert state.tolist() == [10.0, 10.0]


def test_an_argument_may_be_compared_with_a_tensor_of_pythons(mesh: Mesh) -> None:
    state = distribute(torch.ones(2), mesh)

    @program(mesh=mesh)
    def step(a: torch.Tensor) -> torch.Tensor:
        return a * (3.0 if a is state else 1.0)

    for _ in range(4):
        assert step(distribute(torch.ones(2), mesh)).tolist() == [1.0, 1.0]
        assert step(state).tolist() == [3.0, 3.0]
    assert step(state.clone()).tolist() == [1.0, 1.0]


def test_an_example_for_two_arguments_is_two_inputs(mesh: Mesh) -> None:
    """A plan that is made ahead serves arguments of which nobody knows that they are one."""
    x = torch.ones(4)
    traced = monarch.program(mesh=mesh)(lambda a, b: a - b).trace(x, x)
    assert str(traced.graph).count(" = input ") == 2


def test_a_number_or_text_that_is_another_at_each_call_is_named_once(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, at: int, *, state: dict[str, Any], flag: bool = False) -> torch.Tensor:
        return x[:at] * state["n"][0]

    with pytest.warns(PerformanceWarning) as said:
        for number in range(12):
            step(torch.ones(2), 5, state={"n": [number], "name": "a"}, flag=number % 2 == 0)
            step(torch.ones(2), number, state={"n": [0], "name": "a"})
            step(torch.ones(2), 5, state={"n": [0], "name": str(number)})
    assert sorted(str(each.message) for each in said) == [
        "the program 'step' is traced and compiled for each value of 'at' (7 is number 8), which it uses as a size, an "
        "index, a key or text.",
        "the program 'step' is traced and compiled for each value of 'state['name']' ('6' is number 8).",
    ]


def test_an_argument_that_is_computed_from_what_the_program_reads_is_refused_where_it_differentiates(
    mesh: Mesh,
) -> None:
    """Its history ends at the program, and a gradient would lack what goes through it."""
    w = distribute(torch.arange(3.0), mesh).requires_grad_()
    other = distribute(torch.ones(3), mesh).requires_grad_()

    @program
    def step(h: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((h * w).sum(), w)[0]

    for _ in range(4):
        assert step(other * 2).tolist() == [2.0] * 3
        for given in (w * 2, w[:].view(3), w + other):
            with pytest.raises(ProgramError, match="argument 0 of the program was computed from a tensor that the pro"):
                step(given)
        assert step((w * 2).detach()).tolist() == [0.0, 2.0, 4.0]

    @program
    def forward(h: torch.Tensor) -> torch.Tensor:
        return h * w

    assert forward(w * 2).tolist() == [0.0, 2.0, 8.0]


class Loss(NamedTuple):
    value: Any
    weight: float = 2.0


def test_a_class_of_named_tuples_is_an_argument(mesh: Mesh) -> None:
    step = program(lambda kind, x: kind(x).value * kind(x).weight, mesh=mesh)
    assert step(Loss, torch.ones(1)).tolist() == [2.0]
