"""State of kinds that few programs have, changed from outside between calls: what a call gives and leaves is what the
same code does without a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from monarch.language import Mesh
from tests.language.alike import assert_alike


def metadata_of_fields(w: Any) -> Any:
    shared = {"k": 2.0}

    @dataclass
    class Config:
        a: float = field(default=1.0, metadata={"k": 2.0})
        b: float = field(default=3.0, metadata=shared)

    config = Config()

    def step(x: Any) -> Any:
        fields = dataclasses.fields(config)
        return x * sum(each.metadata["k"] * getattr(config, each.name) for each in fields), len(fields)

    def change(call: int) -> None:
        shared["k"] += 1
        if call == 3:
            vars(Config)["__dataclass_fields__"]["a"].metadata = {"k": 7.0}

    return step, change


def fields_of_a_class(w: Any) -> Any:
    @dataclass
    class Config:
        a: float = 1.0
        b: float = 3.0

    config, fields = Config(), vars(Config)["__dataclass_fields__"]

    def step(x: Any) -> Any:
        other = dataclasses.replace(config, a=2.0)
        return x * sum(dataclasses.asdict(other).values()) + sum(dataclasses.astuple(config)) + fields["a"].default

    def change(call: int) -> None:
        if call == 1:
            fields["a"].default = 5.0
        elif call == 2:
            fields["b"].name = "a"
        elif call == 3:
            del fields["b"]

    return step, change


def changes_in_place_of_another_dtype(w: Any) -> Any:
    """PyTorch computes in the promoted dtype, and casts what it writes."""
    held = {dtype: w["make"](torch.ones(4, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float32)}

    def step(x: Any) -> Any:
        other = x.sum(0)
        for each in held.values():
            each.add_(other, alpha=0.5).mul_(other.double())
            each[1:].sub_(other[1:]).clamp_(min=-other[1:].abs())
            each.addcmul_(other, other.bfloat16())
        return list(held.values())

    def change(call: int) -> None:
        if call == 2:
            held[torch.float32] = held[torch.float32].half()

    step.held = held  # type: ignore[attr-defined]
    return step, change


CASES: list[Callable[..., Any]] = [metadata_of_fields, fields_of_a_class, changes_in_place_of_another_dtype]


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Callable[..., Any], mesh: Mesh) -> None:
    assert_alike(case, mesh)
