"""What programs read of the world around them: variables of the environment, files, modules that are imported inside,
functions and hooks of PyTorch's that somebody replaces between calls."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from monarch.language import Mesh, program
from tests.language.alike import assert_alike, fit


def environment(w):
    os.environ["MONARCH_TEST_RATE"] = "1.0"

    def step(x):
        return x * float(os.getenv("MONARCH_TEST_RATE", "1.0")) + float(os.environ["MONARCH_TEST_RATE"])

    return step, lambda call: os.environ.update(MONARCH_TEST_RATE=str(float(call)))


def numpy_s(w):
    array, generator = np.ones(4, dtype=np.float32), np.random.default_rng(0)

    def step(x):
        array[1] += 1
        return x * torch.from_numpy(array) + float(array[0]) + generator.random()

    return step, lambda call: array.__setitem__(0, call)


def replaced_functions(w):
    attention = w["place"](nn.MultiheadAttention(4, 2, batch_first=True))
    places = [
        (F, "multi_head_attention_forward", lambda q, *_, **__: (q * 2, None)),
        (F, "linear", lambda x, weight, *_: x + weight.sum()),
    ]
    places += [(nn.Linear, "forward", lambda self, x: x * self.bias), (torch.Tensor, "relu", lambda self: self * 5)]
    places += [(torch.optim.SGD, "step", lambda self: None)]  # the last of five: the sixth change restores it
    before = [vars(owner).get(name) for owner, name, _ in places]

    def restore(owner, name, value):
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def step(x):
        return attention(x[None], x[None], x[None])[0], F.linear(x, x), x.relu(), fit(w, x)

    def change(call):
        if call:
            owner, name, _ = places[call - 1]
            if getattr(owner, name) is places[call - 1][2]:  # each of the two worlds changes what they share
                restore(owner, name, before[call - 1])
        if call < len(places) and getattr(places[call][0], places[call][1]) is not places[call][2]:
            setattr(*places[call])

    return step, change


def hooks_of_all_modules(w):
    made = []

    def change(call):
        if call == 1:
            made.append(register_module_forward_hook(lambda module, args, out: out * 2))
        if call == 3:
            made.pop().remove()

    return lambda x: w["m"](x).detach(), change


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", [environment, numpy_s, replaced_functions, hooks_of_all_modules])
def test_it_is_what_it_is_without_a_program(case: Callable[..., Any], mesh: Mesh) -> None:
    assert_alike(case, mesh)


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("read", [pathlib.Path.read_text, lambda path: str(float(path.exists()))])
def test_files_are_read_at_each_call(read: Callable[[pathlib.Path], str], mesh: Mesh, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rate.txt"

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(read(file))

    for number in range(4):
        file.write_text(f"{number}.0")
        assert step(torch.ones(1)).tolist() == [float(read(file))]
    file.unlink()
    if read is not pathlib.Path.read_text:
        assert step(torch.ones(1)).tolist() == [0.0]


LIBRARY = """
class Documented(type):
    @property
    def __doc__(cls):
        return f"has {len(vars(cls))} attributes"

class Table(metaclass=Documented):
    pass

entries = []

def enter(name):
    entries.append((name, first if len(entries) else None, Table))

enter("first")
first = entries[0]
enter("second")
scale = 2.0
"""


def test_a_module_that_is_imported_inside_inside(
    mesh: Mesh, tmp_path: pathlib.Path, monkeypatch: Any, traces: list[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "imported_inside.py").write_text(LIBRARY)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        import imported_inside  # type: ignore[import-not-found]

        return x * imported_inside.scale * len(imported_inside.entries)

    for number in range(4):
        assert step(torch.ones(1)).tolist() == [4.0 if number < 2 else 6.0]
        if number == 1:
            sys.modules["imported_inside"].scale = 3.0  # type: ignore[attr-defined]
    assert len(traces) == 2  # what the import did is none of the program's doing
