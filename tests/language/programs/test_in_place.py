"""Arrays, files in memory and sizes: a program gives and leaves what the same code does without it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike, nothing

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@case
def arrays_that_are_as_they_were(w):
    array, rows = np.zeros(2, dtype=np.float32), np.zeros((2, 3), dtype=[("k", "f4")])

    def step(x):
        array[0] += 1
        rows["k"] += array[0]
        rows.shape = rows.shape[::-1]
        return x * float(array[0]) + float(rows["k"].sum()) + rows.shape[0]

    def change(call):
        array[:], rows["k"] = 0, 0

    return step, change


@case
def arrays_of_objects(w):
    array = np.array([1.0, None], dtype=object)

    def step(x):
        array[1] = array[0] + 1
        return x * array[1]

    return step, lambda call: array.__setitem__(0, float(call))


@case
def files_in_memory(w):
    text, raw = io.StringIO("xyz"), io.BytesIO(b"abc")

    def step(x):
        text.write("q")
        read = len(raw.read(1)) or raw.seek(0)
        return x * read + raw.tell() + len(text.getvalue()), text.tell()

    def change(call):
        if call == 3:
            text.seek(0)
            text.truncate()
            raw.write(b"defg")

    return step, change


@case
def sizes(w):
    def step(x):
        return x * x.shape.numel(), x.shape, {"sizes": [x.shape[1:]]}

    return step, nothing


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Callable[..., Any], mesh: Mesh) -> None:
    assert_alike(case, mesh)


@pytest.mark.parametrize("make", [io.StringIO, io.BytesIO, lambda _: np.zeros(2)], ids=["text", "bytes", "array"])
def test_an_exception_leaves_them_as_they_were(make: Callable[[Any], Any], mesh: Mesh) -> None:
    held = make(None)
    read = held.tolist if isinstance(held, np.ndarray) else lambda: (held.getvalue(), held.tell())
    before = read()

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        if isinstance(held, np.ndarray):
            held[0] += 1
        else:
            held.write("abc" if isinstance(held, io.StringIO) else b"abc")
        raise KeyError(x.shape)

    with pytest.raises(KeyError):
        step(torch.ones(2))
    assert read() == before


def test_sizes_among_arguments_are_sizes(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, shape: torch.Size, more: dict[str, torch.Size]) -> Any:
        return x.reshape(shape) * more["shape"].numel(), shape

    found, shape = step(torch.ones(3, 4), torch.Size([4, 3]), {"shape": torch.Size([2, 5])})
    assert found.full_tensor().equal(torch.full((4, 3), 10.0))
    assert type(shape) is torch.Size


def test_an_array_that_meets_a_tensor_is_refused_with_the_call_that_works(mesh: Mesh) -> None:
    array = np.ones(4, dtype=np.float32)
    with pytest.raises(ProgramError, match=r"(?s)NumPy asks for a tensor's values.*x \+ torch.as_tensor\(array\)"):
        program(lambda x: x + array, mesh=mesh)(torch.ones(4))
    assert program(lambda x: x + torch.as_tensor(array), mesh=mesh)(torch.ones(4)).tolist() == [2.0] * 4


def test_anomaly_mode_is_refused_with_the_mode_that_works(mesh: Mesh) -> None:
    weight = distribute(torch.ones(4), mesh).requires_grad_()

    def step(x: torch.Tensor) -> None:
        (weight * x).sum().backward()

    with (
        pytest.raises(ProgramError, match=r"(?s)anomaly mode reads each gradient.*with mesh.detect_anomaly\(\)"),
        torch.autograd.set_detect_anomaly(True),
    ):
        program(step, mesh=mesh)(torch.ones(4))
    with mesh.detect_anomaly():
        program(step, mesh=mesh)(torch.ones(4))
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 4
