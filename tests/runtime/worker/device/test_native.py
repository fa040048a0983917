"""Kernels as callables: how operands may lie, whose memory results take, what is refused, and what is done without a
compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch.compiler.errors import PlanError
from monarch.compiler.kernels.cpp import build as building
from monarch.compiler.kernels.cpp import emit as cpp_emit
from monarch.compiler.kernels.cpp.build import BuildError, build_kernels, find_compiler
from monarch.runtime.worker.device.native import bind

AXPY = """
kernel axpy(a0: f32[3, 4], a1: f32[3, 4], a2: f32[]) -> (b0: f32[3, 4], b1: f32[3])
nest [3 | 4] {
  %0 = load a0 [4, 1]
  %1 = load a1 [4, 1]
  %2 = load a2 [0, 0]
  %3 = fma f32(%1, %2, %0)
  %4 = store b0 [4, 1] %3
  %5 = reduce max %3
  %6 = store b1 [1, 0] %5
}
"""


@pytest.fixture(scope="module", params=["compiled", "by torch's ops"])
def path(request: pytest.FixtureRequest) -> Path | None:
    if request.param != "compiled":
        return None
    if find_compiler() is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return build_kernels([AXPY])


def tensors() -> list[torch.Tensor]:
    return [torch.arange(12.0).reshape(3, 4), torch.ones(3, 4), torch.tensor(2.0)]


EXPECTED = torch.arange(12.0).reshape(3, 4) + 2


def test_fresh_memory_at_every_call(path: Path | None) -> None:
    call = bind(path, AXPY, [-1, -1], 1)
    first, second = call(tensors()), call(tensors())
    assert torch.equal(first[0], EXPECTED) and torch.equal(first[1], EXPECTED.amax(1))
    assert first[0].data_ptr() != second[0].data_ptr()


def test_an_operands_memory(path: Path | None) -> None:
    for operand in (0, 1):
        given = tensors()
        result, _ = bind(path, AXPY, [operand, -1], 1)(given)
        assert result is given[operand] and torch.equal(result, EXPECTED)
        assert torch.equal(given[1 - operand], tensors()[1 - operand])


@pytest.mark.parametrize("over", [[2, -1], [0, 0], [3, -1], [-2, -1], [-1, 0], [-1]])
def test_memory_that_does_not_fit_is_refused(path: Path | None, over: list[int]) -> None:
    with pytest.raises(PlanError, match="axpy"):
        bind(path, AXPY, over, 1)


@pytest.mark.parametrize("over", [[-1, -1], [0, -1]])
@pytest.mark.parametrize("turned", [True, False])
def test_operands_that_lie_otherwise(path: Path | None, turned: bool, over: list[int]) -> None:
    x, y, factor = tensors()
    padded = torch.zeros(3, 9)[:, 2:6].copy_(y)
    result, _ = bind(path, AXPY, over, 1)([x.T.contiguous().T if turned else x, padded, factor])
    assert torch.equal(result, EXPECTED)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 3), torch.zeros(12), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 5)]
)
def test_another_tensor_is_refused(path: Path | None, wrong: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"a kernel wants torch.float32 of \[3, 4\]"):
        bind(path, AXPY, [-1, -1], 1)([wrong, *tensors()[1:]])
    with pytest.raises(ValueError):
        bind(path, AXPY, [-1, -1], 1)(tensors()[:2])


def test_the_stride_of_one_element_means_nothing() -> None:
    text = "kernel row(a0: f32[1, 4]) -> (b0: f32[4])\nnest [4] {\n%0 = load a0 [1]\n%1 = store b0 [1] %0\n}\n"
    if find_compiler() is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    call = bind(build_kernels([text]), text, [-1], 1)
    row = torch.arange(4.0).as_strided((1, 4), (1, 1))
    assert torch.equal(call([row])[0], torch.arange(4.0))


def test_without_a_compiler_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    building.say_once.cache_clear()
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    assert build_kernels([]) is None
    assert capsys.readouterr().err == ""
    assert build_kernels([AXPY]) is None and build_kernels([AXPY]) is None
    said = capsys.readouterr().err
    assert said.count("no C++ compiler") == 1 and "apt-get install g++" in said


def test_source_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An object that is there is found by its kernels and by the program that writes them."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    first = build_kernels([AXPY])

    def emit(*_: object) -> str:
        raise AssertionError("written again")

    monkeypatch.setattr(building, "emit", emit)
    assert build_kernels([AXPY, AXPY]) == first
    with pytest.raises(AssertionError, match="written again"):
        build_kernels([AXPY.replace("axpy", "other")])
    monkeypatch.setattr(cpp_emit, "writer", lambda: "another program")
    with pytest.raises(AssertionError, match="written again"):
        build_kernels([AXPY])


def test_a_compiler_that_refuses_is_said_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    building.say_once.cache_clear()

    def refuse(*_: object) -> Path:
        raise BuildError("g++ does not compile a kernel:\nerror: no")

    monkeypatch.setattr(building, "build", refuse)
    if find_compiler() is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    assert build_kernels([AXPY]) is None
    assert "error: no" in capsys.readouterr().err
