"""Recorded launches, and the kernels for sizes of 1, which Triton makes constants of the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.stdlib.kernels.attention import attention
from monarch.stdlib.kernels.attention_backward import attention_backward
from monarch.stdlib.kernels.launch import recorded
from tests.stdlib.kernels.numerics import meta

TINY = meta(1, 1, 1, 16)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "attention, one query": (attention, (TINY, meta(1, 50, 1, 16), meta(1, 50, 1, 16)), {"causal": True, "window": 9}),
    "attention": (attention, (TINY, TINY, TINY), {"causal": True}),
    "attention_backward": (
        attention_backward,
        (TINY, TINY, TINY, TINY, TINY, meta(1, 1, 1, dtype=torch.float32)),
        {"causal": True, "window": 1},
    ),
}


def test_recording_runs_nothing() -> None:
    (y, lse), (launch,) = recorded(attention, meta(2, 30, 4, 64), meta(2, 30, 4, 64), meta(2, 30, 4, 64))
    assert y.shape == (2, 30, 4, 64) and lse.shape == (2, 4, 30)
    assert math.prod(launch.grid) >= 8
    assert set(launch.tensors) <= set(launch.kernel.arg_names)


@pytest.mark.parametrize("name", CALLS)
def test_sizes_of_one_compile(name: str) -> None:
    fn, args, kwargs = CALLS[name]
    _, launches = recorded(fn, *args, **kwargs)
    for launch in launches:
        assert launch.compile("cuda:80").binary


def test_what_machine_code_depends_on_is_in_its_fingerprint() -> None:
    def fingerprint(queries: int, causal: bool, dtype: torch.dtype = torch.float32) -> str:
        q = meta(1, queries, 2, 64, dtype=dtype)
        _, (launch,) = recorded(attention, q, q, q, causal=causal)
        return launch.fingerprint

    assert fingerprint(6, True) == fingerprint(6, True)
    others = fingerprint(7, True), fingerprint(6, False), fingerprint(6, True, torch.bfloat16)
    assert len({fingerprint(6, True), *others}) == 4
