"""What a program cannot contain ends its trace, whoever catches the error; errors of PyTorch's own are caught as they
are without a program."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch.compiler.errors import MonarchError, ProgramError
from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike, nothing


def _handled(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            read(x)
            scale = 1.0
        except Exception:
            scale = 0.5
        return x * scale

    return step


PLAIN = torch.zeros(3, 4)
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "branch": lambda x: 1.0 if x.sum() > 0 else 2.0,
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "as array": lambda x: np.asarray(x),
    "text": lambda x: f"{x.sum():.3f}",
    "entries": lambda x: [float(entry) for entry in x[0]],
    "pickled": lambda x: pickle.dumps(x),
    "storage": lambda x: x.untyped_storage().data_ptr(),
    "memory": lambda x: torch.from_dlpack(x),
    "mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "different": lambda x: x.unique(),
    "sparse": lambda x: x.to_sparse(),
    "data": lambda x: setattr(x.clone(), "data", torch.zeros(7)),
    "generator": lambda x: torch.rand(3, generator=torch.Generator()),
    "in place": lambda x: PLAIN.add_(x),
}


@pytest.mark.parametrize("name", READS)
def test_a_handler_of_the_programs_does_not_swallow_a_refusal(name: str, mesh: Mesh) -> None:
    step = _handled(READS[name])
    assert step(torch.randn(3, 4)).shape == (3, 4)
    with pytest.raises(MonarchError):
        program(step, mesh=mesh)(distribute(torch.randn(3, 4), mesh))


def suppressed(x: torch.Tensor) -> torch.Tensor:
    scale = 0.5
    with contextlib.suppress(Exception):
        scale = x[0, 0].item()
    return x * scale


def returned_at_last(x: torch.Tensor) -> torch.Tensor:
    scale = 0.5
    try:
        scale = x[0, 0].item()
    finally:
        return x * scale  # noqa: B012


def bare(x: torch.Tensor) -> torch.Tensor:
    scale = 0.5
    try:
        scale = x[0, 0].item()
    except:  # noqa: E722
        pass
    return x * scale


def tried_for_ever(x: torch.Tensor) -> torch.Tensor:
    while True:
        try:
            return x * x[0, 0].item()
        except Exception:
            continue


def generated(x: torch.Tensor) -> torch.Tensor:
    def scales() -> Iterator[float]:
        for column in range(3):
            try:
                yield x[0, column].item()
            except Exception:
                yield 1.0

    return x * sum(scales())


def raised_as_another(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x[0, 0].item()
    except Exception as error:
        raise KeyError("scale") from error


def hooked(x: torch.Tensor) -> torch.Tensor:
    def scaled(grad: torch.Tensor) -> torch.Tensor:
        try:
            return grad * grad.sum().item()
        except Exception:
            return grad * 0.5

    leaf = x.detach().clone().requires_grad_()
    leaf.register_hook(scaled)
    (leaf * 3).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def tried_for_ever_whatever_is_raised(x: torch.Tensor) -> torch.Tensor:
    while True:
        try:
            return x * x[0, 0].item()
        except:  # noqa: E722
            continue


def tried_twice_for_ever(x: torch.Tensor) -> torch.Tensor:
    def once() -> torch.Tensor:
        while True:
            try:
                return x * x[0, 0].item()
            except BaseException:
                pass

    while True:
        try:
            return once()
        except:  # noqa: E722
            continue


def suppressed_for_ever(x: torch.Tensor) -> torch.Tensor:
    while True:
        with contextlib.suppress(BaseException):
            return x * x[0, 0].item()


WAYS = (
    suppressed,
    returned_at_last,
    bare,
    tried_for_ever,
    tried_for_ever_whatever_is_raised,
    tried_twice_for_ever,
    suppressed_for_ever,
    generated,
    raised_as_another,
    hooked,
)


@pytest.mark.parametrize("step", WAYS, ids=lambda step: str(step.__name__))
def test_a_refusal_ends_the_trace_however_it_is_caught(step: Callable[..., torch.Tensor], mesh: Mesh) -> None:
    x = distribute(torch.randn(3, 4), mesh)
    with pytest.raises(ProgramError, match="cannot branch on a tensor's value"):
        program(step, mesh=mesh)(x)
    assert sys.exc_info() == (None, None, None)  # which Python may forget to take back
    assert program(lambda x: x + 1, mesh=mesh)(x).shape == (3, 4)  # and no more than that trace


def test_state_is_that_before_where_a_refusal_was_caught(mesh: Mesh) -> None:
    seen: list[str] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            x.sum().item()
        except Exception:
            seen.append("handled")
        return x

    with pytest.raises(ProgramError):
        program(step, mesh=mesh)(distribute(torch.randn(3, 4), mesh))
    assert seen == []


def test_errors_that_pytorch_raises_too_are_the_programs_to_catch(mesh: Mesh) -> None:
    def case(w: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            found = []
            try:
                x @ x
            except RuntimeError:
                found.append(1)
            try:
                x[7]
            except IndexError:
                found.append(2)
            try:
                torch.cat([x, 3])  # type: ignore[list-item]
            except TypeError:
                found.append(3)
            try:
                len(x.sum())
            except TypeError:
                found.append(4)
            try:
                x.nothing  # type: ignore[attr-defined]  # noqa: B018
            except AttributeError:
                found.append(5)
            return x * sum(found)

        return step, nothing

    assert_alike(case, mesh)


def test_errors_of_symbols_are_not_the_programs_to_catch(mesh: Mesh) -> None:
    """In a program a float argument is a symbol, which some code of C does not take."""

    @program(mesh=mesh)
    def step(x: torch.Tensor, rate: float) -> Any:
        try:
            text = str(datetime.timedelta(seconds=rate))
        except TypeError:
            text = "no number"
        return x * len(text), text

    x = torch.randn(3, 4)
    for rate in (1.0, 2e6, 3e6):
        found, text = step(distribute(x, mesh), rate)
        assert text == str(datetime.timedelta(seconds=rate))
        torch.testing.assert_close(found.full_tensor(), x * len(text))


def test_memory_tells_tensors_from_one_another(mesh: Mesh) -> None:
    def case(w: Any) -> Any:
        first, second = w["make"](torch.ones(4)), w["make"](torch.ones(4))
        held = [first, second, first, first[2:], torch.Tensor.view(first, 2, 2)]

        def step(x: torch.Tensor) -> Any:
            different = {tensor.data_ptr(): tensor for tensor in held}
            return x * sum(tensor.sum() for tensor in different.values()), len(different)

        return step, lambda call: held.append(held[call % 2]) if call % 3 else held.append(w["make"](torch.ones(4)))

    assert_alike(case, mesh)
