"""What users read when they get it wrong: the whole text, with the line, the numbers and what to do."""

from __future__ import annotations

import pickle
import re
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.compiler.config import configured
from monarch.compiler.errors import LayoutError, MonarchError, ProgramError
from monarch.language import (
    DistributedTensor,
    Mesh,
    OperatorError,
    distribute,
    layout,
    module_to_mesh,
    program,
    reduce,
)
from monarch.language.tensors import mesh as meshes
from monarch.stdlib.parallel import tensor_parallel
from tests.language.models import make_step, mlp, square_loss, twins, vector_batch


def text_of(error: pytest.ExceptionInfo[Any]) -> str:
    """The error's text, with the line number of this file left out."""
    return re.sub(r"^test_errors\.py:\d+:\d+: ", "test_errors.py: ", str(error.value))


def lines(*expected: str) -> str:
    return "\n".join(expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: bool(t > 0),
        lambda t: float(t),
        lambda t: t.item(),
        lambda t: range(t.long()),
        lambda t: [1, 2][t.long()],
        lambda t: t.tolist(),
        lambda t: print(t),
        lambda t: f"{t}",
        lambda t: t.full_tensor(),
        lambda t: t.numpy(),
        lambda t: torch.equal(t, t),
    ],
)
def test_a_tensors_value_cannot_be_read_in_a_program(read: Callable[[torch.Tensor], Any], mesh: Mesh) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        read(x.sum())
        return x

    with pytest.raises(ProgramError, match="cannot branch on a tensor's value, or read it into Python"):
        step(distribute(torch.ones(4), mesh))


def test_branching_shows_the_wrong_call_beside_the_right_ones(mesh: Mesh) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 3:
            x = x + 1
        return x

    with pytest.raises(ProgramError) as error:
        step(distribute(torch.ones(4), mesh))
    assert text_of(error) == lines(
        "test_errors.py: error: a @monarch.program cannot branch on a tensor's value, or read it into Python",
        "      if x.sum() > 3:",
        "         ^^^^^^^^^^^",
        "  if x.sum() > 3:                                          "
        "# wrong: the value lives on the workers, and this line runs once, when the program is traced",
        "  x = monarch.cond(x.sum() > 3, lambda: x + 1, lambda: x)  # right: the workers decide",
        "  if step(x).item() > 0.1:                                 # right outside the program: waits for the value",
    )


@pytest.mark.parametrize("inside", [True, False])
def test_shapes_that_do_not_fit_are_told_in_torchs_words(inside: bool, mesh: Mesh) -> None:
    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    run = program(multiply) if inside else multiply
    x, w = distribute(torch.ones(4, 3), mesh, "[@data, -]"), distribute(torch.ones(4, 3), mesh)
    with pytest.raises(RuntimeError) as error:
        run(x, w)
    assert isinstance(error.value, OperatorError)
    assert text_of(error) == lines(
        "test_errors.py: error: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
        "      return x @ w",
        "             ^^^^^",
        "  in aten.mm(f32[4@data, 3], f32[4, 3])",
    )
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_tensors_on_two_meshes(mesh: Mesh) -> None:
    other = Mesh(data=4)
    x, y = distribute(torch.ones(4), mesh), distribute(torch.ones(4), other)
    with pytest.raises(ProgramError) as error:
        x + y
    assert text_of(error) == lines(
        "test_errors.py: error: tensors on different meshes in one op",
        "      x + y",
        "      ^^^^^",
        f"  one is on {y.mesh}, the other on {x.mesh}.",
        "  Move one: monarch.distribute(x.full_tensor(), mesh, layout).",
    )
    with pytest.raises(ProgramError, match="a program on two meshes that were made apart"):
        program(lambda a: a + y)(x)


def test_a_layout_of_another_tensor(mesh: Mesh) -> None:
    with pytest.raises(LayoutError) as error:
        distribute(torch.ones(512, 1001), mesh, [None], name="'w'")
    assert text_of(error) == lines(
        "test_errors.py: error: the layout of 'w' has 1 dims, and 'w' has 2",
        "      distribute(torch.ones(512, 1001), mesh, [None], name=\"'w'\")",
        "      " + "^" * 59,
        "  'w' is f32[512, 1001]: give one entry for each of its dims.",
    )


def test_padding_is_the_compilers(mesh: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"(.|\n)*write f32\[10@data\]"):

        @program(mesh=mesh)
        def step(x: "f32[10+2@data]") -> torch.Tensor:
            return x

        step(torch.ones(10))


def test_what_is_no_tensor_cannot_be_distributed(mesh: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"error: 'w' is a list, and meshes hold tensors(.|\n)*torch.as_tensor"):
        distribute([1, 2], mesh, name="'w'")  # type: ignore[arg-type]


def test_an_unknown_mesh_dim(mesh: Mesh) -> None:
    x = distribute(torch.ones(4, 4), mesh)
    with pytest.raises(LayoutError, match=r"unknown mesh dim 'tp' in the layout of the tensor") as error:
        layout(x, "[@tp, -]")
    assert "the mesh is mesh<data=2, model=2>: its dims are data, model." in str(error.value)


def test_layout_of_a_plain_tensor() -> None:
    with pytest.raises(ProgramError) as error:
        layout(torch.ones(4), "[@data]")
    assert "layout() of a plain tensor of shape [4], which is on no mesh" in str(error.value)
    assert "monarch.distribute(x, mesh, layout)" in str(error.value)


def test_a_plain_tensor_that_changed_traces_again(mesh: Mesh) -> None:
    mask = torch.ones(4)
    step = program(lambda x: x * mask)
    x = distribute(torch.full((4,), 3.0), mesh)
    for i in range(8):
        assert step(x).tolist() == [3.0 * (i + 1)] * 4
        mask += 1


def test_writing_to_a_plain_tensor_in_a_program(mesh: Mesh) -> None:
    total = torch.zeros(4)

    @program
    def with_mesh(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x

    @program
    def without(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x

    for step in (with_mesh, without):
        with pytest.raises(ProgramError, match=r"a plain tensor of shape \[4\] is changed in place"):
            step(distribute(torch.ones(4), mesh))
    assert total.tolist() == [0.0] * 4


def test_an_argument_that_is_a_plain_tensor_cannot_be_changed_in_place(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.add_(1) * x.t_() if y.ndim == 2 else x.add_(1) + y.add_(1)

    for plain in ((0, 1), (1,), (0,)):
        given = [torch.ones(4) if at in plain else distribute(torch.ones(4), mesh) for at in range(2)]
        with pytest.raises(
            ProgramError, match=r"argument [xy] of the program is a plain tensor, and the program changes it in place"
        ):
            step(*given)
        assert all(each.tolist() == [1.0] * 4 for each in given)

    @program(mesh=mesh)
    def normed(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    words = (
        r"test_errors.py:.*argument mean of 'normed', a plain tensor, is changed in place[\s\S]*mean = mean.clone\(\) "
    )
    with pytest.raises(ProgramError, match=words):
        normed(distribute(torch.ones(4, 2), mesh), torch.zeros(2), torch.ones(2))


def test_annotations_are_checked(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(tokens: "i64[16@data, 128]") -> torch.Tensor:
        return tokens + 1

    with pytest.raises(ProgramError) as error:
        step(torch.zeros(8, 128, dtype=torch.int64))
    assert text_of(error) == lines(
        "test_errors.py: error: argument 'tokens' of step has a type that differs from its annotation",
        "      step(torch.zeros(8, 128, dtype=torch.int64))",
        "      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "  'tokens' is i64[8, 128], and is annotated as i64[16@data, 128].",
        "  Change the annotation, or pass a tensor of type i64[16@data, 128].",
    )
    with pytest.raises(ProgramError, match="has a layout that differs from its annotation"):
        step(distribute(torch.zeros(16, 128, dtype=torch.int64), mesh))
    with pytest.raises(ProgramError, match=r"argument 'tokens' is NoneType, and is(.|\n)*pass a tensor: torch"):
        step(None)  # type: ignore[arg-type]
    assert step(torch.zeros(16, 128, dtype=torch.int64)).shape == (16, 128)
    assert "i64[16@data, 128]" in str(step.trace(torch.zeros(16, 128, dtype=torch.int64)).graph)


def test_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "_meshes", {})  # without those of other files of tests

    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(ProgramError, match="step has no mesh"):
        step(torch.ones(3))


def _train_plain(x: torch.Tensor, kind: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    program(step)(x)


def _batches(x: torch.Tensor) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)))


def _again(x: torch.Tensor) -> None:
    other = distribute(torch.ones(4, 4), Mesh(data=2, model=2))
    program(lambda x, y: x + y)(x, other)


def _laid_out_again(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(4, 4), mesh, {"weight": "[@data, -]"})
    module_to_mesh(model, mesh)
    module_to_mesh(model, mesh, {"weight": "[@data, -]"})
    module_to_mesh(model, mesh, {"*": {1: "[-]", 2: "[-, @data]"}})


def _placed_again() -> None:
    model = module_to_mesh(nn.Linear(4, 4), Mesh(data=2))
    module_to_mesh(model, Mesh(data=2))


@program
def scaled(
    x: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    return x * scale


@program
def typed(n: int, x: "f32[4@dta, 4]") -> torch.Tensor:
    return x * n


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: scaled(), TypeError, "scaled: missing a required argument: 'x'"),
        (
            lambda x: scaled(x, 2.0, 3),
            TypeError,
            "too many positional arguments(.|\n)*the call is scaled.x, scale=1.0.",
        ),
        (lambda x: scaled(x, sclae=3.0), TypeError, "scaled: got an unexpected keyword argument 'sclae'"),
        (lambda x: scaled.trace(), ProgramError, "scaled: missing a required argument: 'x'"),
        (lambda x: typed(1, torch.ones(4, 4)), LayoutError, r"unknown mesh dim 'dta'(.|\n)*did you mean data\?"),
        (lambda x: distribute(x, "[@data]"), LayoutError, r"the mesh is a str(.|\n)*distribute.tensor, mesh, layout"),
        (lambda x: module_to_mesh(mlp(), "cuda"), LayoutError, r"the mesh is a str(.|\n)*module_to_mesh.module, mesh"),
        (lambda x: F.softmax(x, 2), IndexError, r"range of \[-2, 1\], but got 2(.|\n)*in aten._softmax.f32\[4, 4\]"),
        (lambda x: x.sort(dim=2), IndexError, r"range of \[-2, 1\], but got 2"),
        (lambda x: program(lambda x: F.softmax(x, -3))(x), IndexError, r"range of \[-2, 1\], but got -3"),
        (lambda x: x + torch.ones(3), RuntimeError, r"in aten.add.f32\[4, 4\], f32\[3\]"),
        (lambda x: torch.cat([x, torch.ones(3, 3)]), RuntimeError, r"in aten.cat.f32\[4, 4\], f32\[3, 3\]"),
        (lambda x: distribute(x, x.mesh, 0), LayoutError, r"the layout of the tensor is 0(.|\n)*\['data', None\]"),
        (lambda x: program(x.mesh), ProgramError, r"function, not Mesh(.|\n)*@monarch.program\(mesh=mesh\)"),
        (lambda x: program(nn.Linear), ProgramError, "not the class 'Linear'(.|\n)*above the method that is a step"),
        (lambda x: program(lambda x: np.exp(x))(x), ProgramError, r"NumPy asks(.|\n)*write torch.exp for exp"),
        (lambda x: _train_plain(x, torch.optim.SGD), ProgramError, r"a plain parameter(.|\n)*before the optimizer"),
        (
            lambda x: _train_plain(x, torch.optim.Adam),
            ProgramError,
            r"its optimizer's state, of shape \[4, 4\]",
        ),
        (
            lambda x: program(lambda x: [*_batches(x)])(x),
            ProgramError,
            r"read a DataLoader(.|\n)*outside of the program",
        ),
        (lambda x: _again(x), ProgramError, r"are alike: Mesh\(data=2, model=2\) twice(.|\n)*make the mesh once"),
        (lambda x: x.redistribute("[@dta, -]"), LayoutError, r"unknown mesh dim 'dta'(.|\n)*did you mean data"),
        (
            lambda x: distribute(mlp(), x.mesh),
            LayoutError,
            r"is a Sequential(.|\n)*monarch.module_to_mesh\(model, mesh\)",
        ),
        (lambda x: module_to_mesh(mlp().parameters(), x.mesh), LayoutError, r"is a generator(.|\n)*nn.Module itself"),
        (lambda x: module_to_mesh(nn.Linear, x.mesh), LayoutError, r"Linear is a class(.|\n)*the nn.Module itself"),
        (lambda x: module_to_mesh(mlp(), x.mesh, ["[-]"]), LayoutError, r"layouts=\['\[-\]'\](.|\n)*a dict from names"),
        (
            lambda x: module_to_mesh(mlp(), x.mesh, "fsdp"),
            LayoutError,
            r"layouts='fsdp'(.|\n)*fully_shard.model, mesh, .data..",
        ),
        (lambda x: module_to_mesh(mlp(), x.mesh, {"*": "[@data, -]"}), LayoutError, r"\{'\*': \{1: ..., 2: ...\}\}"),
        (lambda x: tensor_parallel(mlp(), x.mesh, "modle"), LayoutError, "did you mean model"),
        (
            lambda x: program(lambda x: reduce(x, "dta"))(x),
            LayoutError,
            r"unknown mesh dim 'dta'(.|\n)*did you mean data",
        ),
        (lambda x: x.to(Mesh(data=3)), ProgramError, r"made apart(.|\n)*this process: monarch.distribute"),
        (
            lambda x: monarch.data.stream([1], "[@data]", batch=1),
            LayoutError,
            r"the mesh is a str(.|\n)*stream\(source",
        ),
        (
            lambda x: _laid_out_again(x.mesh),
            LayoutError,
            r"'weight' is on the mesh already, as f32\[4@data, 4\], and layouts say f32\[4, 4@data\]",
        ),
        (lambda x: _placed_again(), LayoutError, r"already on another mesh(.|\n)*new.load_state_dict"),
        (lambda x: x.share_memory_(), MonarchError, r"no storage here(.|\n)*elsewhere pass x.full_tensor"),
        (lambda x: pickle.dumps(x.mesh), TypeError, r"Mesh\(data=2, model=2\) cannot be pickled"),
    ],
)
def test_everyday_mistakes(call: Callable[[Any], Any], error: type[Exception], words: str, mesh: Mesh) -> None:
    with pytest.raises(error) as found:
        call(distribute(torch.ones(4, 4), mesh))
    text = "\n".join(map(str, found.value.args[:2]))  # without the excerpt, which has the words of this table
    assert re.search(words, text), text


def test_an_annotations_error_stands_at_its_parameter(mesh: Mesh) -> None:
    with pytest.raises(LayoutError) as error:
        program(mesh=mesh)(typed.__wrapped__)(1, torch.ones(4, 4))
    assert text_of(error).splitlines()[1:3] == [
        '      def typed(n: int, x: "f32[4@dta, 4]") -> torch.Tensor:',
        "                        ^",
    ]

    annotated_later = eval("lambda x: x")
    annotated_later.__annotations__["x"] = "f32[4@@]"
    with pytest.raises(LayoutError) as error:
        program(annotated_later)
    assert error.value.source is not None and error.value.source.column == 0


@pytest.mark.parametrize(
    ("annotation", "hint"),
    [
        ("float32[4@data, 4]", 'write f32\\[...\\] in its place: "f32\\[64@data, 1024\\]"'),
        ("torch.float32[4]", "write f32"),
        ("f32(4)", "write f32"),
        ("[4@data, 4]", "begins with one of f64, f32"),
        ("f31[4]", "begins with one of f64, f32"),
        ("list[int]", ""),
        ("np.ndarray[3]", ""),
        ("Float[Tensor, 'batch dim']", ""),
        ("int | None", ""),
    ],
)
def test_an_annotation_that_is_meant_as_a_tensor_type_is_none(annotation: str, hint: str) -> None:
    def step(x: Any) -> Any:
        return x

    step.__annotations__["x"] = annotation
    if not hint:
        program(step)
        return
    with pytest.raises(LayoutError, match=f"is no tensor type(.|\n)*{hint}"):
        program(step)


def test_tracebacks_have_the_users_lines_alone(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = distribute(torch.ones(4, 4), mesh)

    def user(x: torch.Tensor) -> torch.Tensor:
        return nn.Linear(3, 3)(x)

    def names(call: Callable[[], Any], error: type[Exception]) -> list[str]:
        with pytest.raises(error) as found:
            call()
        return [frame.name for frame in traceback.extract_tb(found.value.__traceback__)][2:]

    in_torch = ["_wrapped_call_impl", "_call_impl", "forward"]
    assert names(lambda: user(x), RuntimeError) == ["user", *in_torch, "__torch_dispatch__"]
    assert names(lambda: program(user)(x), RuntimeError) == ["__call__", "user", *in_torch[:2], "inner", "forward"]
    with configured(full_tracebacks=True):
        assert len(names(lambda: program(user)(x), RuntimeError)) > 10

    def broken(*args: Any) -> Any:
        raise KeyError("a defect of Monarch's")

    monkeypatch.setattr("monarch.language.recorder.dispatch.run_fake", broken)
    assert names(lambda: program(lambda x: x + 1)(x), KeyError)[-1] == "broken"


def test_a_failed_trace_leaves_everything_as_it_was(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    fail = [False]

    def failing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = make_step(model, ours, square_loss)(x, y)
        if fail[0]:
            raise KeyError("the user's own")
        return loss

    step, reference = program(failing), make_step(plain, theirs, square_loss)
    for first_fails in (True, False):
        if first_fails:
            fail[0] = True
            with pytest.raises(KeyError, match="the user's own"):
                step(*vector_batch(0))
            assert not ours.state and ours.param_groups[0]["lr"] == 1e-2
            assert all(p.grad is None for p in model.parameters())
            fail[0] = False
    for seed in range(4):
        batch = vector_batch(seed)
        fail[0] = seed == 1
        if fail[0]:  # what it reads has changed: the second call is traced again
            with pytest.raises(KeyError):
                step(*batch)
            fail[0] = False
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)


def test_a_pattern_that_matches_nothing(mesh: Mesh) -> None:
    with pytest.raises(LayoutError) as error:
        module_to_mesh(mlp(), mesh, layouts={"0.wieght": "[@data, -]"})
    assert "no parameter or buffer matches '0.wieght'" in str(error.value)
    assert "did you mean '0.weight'" in str(error.value)


def test_an_abstract_mesh_runs_nothing() -> None:
    mesh = Mesh.abstract(data=2, model=2)
    x = distribute(torch.ones(4, 4), mesh, "[@data, -]")
    step = program(lambda a: a + 1)
    assert "input 0" in str(step.trace(x).graph)
    with pytest.raises(MonarchError, match="an abstract mesh has no workers"):
        step(x)
    with pytest.raises(MonarchError, match="an abstract mesh has no workers"):
        x.full_tensor()
    assert "f32[4@data, 4]" in str(x)


def test_tensors_that_leak_from_a_trace_have_no_value(mesh: Mesh) -> None:
    leaked = threading.local()  # a list would be what it was before the call

    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        leaked.value = x + 1
        raise KeyError

    with pytest.raises(KeyError):
        step(distribute(torch.ones(4), mesh))
    with pytest.raises(MonarchError, match="made while a program was traced, and has no value"):
        (leaked.value + 1).full_tensor()


def test_safetensors_own_call_says_what_to_do(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    with pytest.raises(MonarchError, match=r'monarch.save\(model, "model.safetensors"\)'):
        safetensors.torch.save_file({"x": x}, "never.safetensors")


def test_repr_fetches_nothing(mesh: Mesh) -> None:
    x = distribute(torch.ones(4, 4), mesh, "[@data, -]")
    y = x + 1
    assert repr(x) == "DistributedTensor(f32[4@data, 4] on mesh<data=2, model=2>)"
    assert repr(y) == "DistributedTensor(f32[4, 4] on mesh<data=2, model=2>, not computed yet)"
    assert isinstance(y, DistributedTensor) and y._ref.cell.handle is None
    assert "2., 2." in str(y)
    assert nn.Parameter(x).requires_grad


def test_a_schedulers_plain_learning_rate_is_named_with_both_ways_out(mesh: Mesh) -> None:
    def train(rate: Any) -> list[float]:
        torch.manual_seed(0)
        model = module_to_mesh(nn.Linear(2, 2), mesh, {})
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        @program(mesh=mesh)
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss

        return [step(torch.ones(2, 2)).item() for _ in range(3)]

    said = r"a scheduler changes the learning rate of its optimizer, a plain tensor[\s\S]*lr=0.1\)[\s\S]*distribute"
    with pytest.raises(ProgramError, match=said):
        train(torch.tensor(0.1))
    assert train(distribute(torch.tensor(0.1), mesh)) == pytest.approx(train(0.1))
