"""Recorded launches, and the kernels for sizes of 1, which Triton makes constants of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.stdlib.kernels.adamw import adamw, adamw_table
from monarch.stdlib.kernels.attention import attention
from monarch.stdlib.kernels.attention_backward import attention_backward
from monarch.stdlib.kernels.cross_entropy import cross_entropy_backward, cross_entropy_parts
from monarch.stdlib.kernels.grouped_matmul import grouped_matmul, grouped_matmul_gradient
from monarch.stdlib.kernels.launch import recorded
from monarch.stdlib.kernels.matmul import matmul
from monarch.stdlib.kernels.norms import layer_norm, layer_norm_backward, rms_norm
from monarch.stdlib.kernels.quantize import dequantize, quantize
from monarch.stdlib.kernels.rotary import rotary, rotary_table
from tests.stdlib.kernels.numerics import meta

ONE, ROW, TINY = meta(1), meta(1, 1), meta(1, 1, 1, 16)
FLOAT, STARTS = meta(1, dtype=torch.float32), meta(2, dtype=torch.int32)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "layer_norm": (layer_norm, (ROW, ONE), {"residual": ROW}),
    "layer_norm_backward": (layer_norm_backward, (ROW, ROW, ONE, FLOAT, FLOAT), {}),
    "cross_entropy_parts": (cross_entropy_parts, (ROW, meta(1, dtype=torch.int64)), {"first": 1}),
    "cross_entropy_backward": (cross_entropy_backward, (ROW, meta(1, dtype=torch.int64), FLOAT, FLOAT), {"first": 1}),
    "rotary": (rotary, (TINY, rotary_table(1, 16, device="meta")), {}),
    "adamw": (adamw, (adamw_table(*[[FLOAT]] * 4), meta(8, dtype=torch.float32)), {}),
    "attention, one query": (attention, (TINY, meta(1, 50, 1, 16), meta(1, 50, 1, 16)), {"causal": True, "window": 9}),
    "attention": (attention, (TINY, TINY, TINY), {"causal": True}),
    "attention_backward": (
        attention_backward,
        (TINY, TINY, TINY, TINY, TINY, meta(1, 1, 1, dtype=torch.float32)),
        {"causal": True, "window": 1},
    ),
    "matmul": (matmul, (ROW, ROW), {"bias": ONE, "residual": ROW}),
    "grouped_matmul": (grouped_matmul, (ROW, meta(1, 1, 1), STARTS), {"bias": ROW}),
    "grouped_matmul_gradient": (grouped_matmul_gradient, (ROW, ROW, STARTS), {}),
    "quantize": (quantize, (ONE,), {}),
    "dequantize": (dequantize, (meta(1, dtype=torch.int8), FLOAT), {}),
}


def test_recording_runs_nothing() -> None:
    (y, _, rstd), (launch,) = recorded(rms_norm, meta(6, 5, 256), meta(256))
    assert y.shape == (6, 5, 256) and rstd.shape == (6, 5)
    assert launch.kernel.__name__ == "_forward"
    assert launch.grid == (-(-30 // launch.variant.tiles["ROWS"]),)
    assert launch.arguments["rows"] == 30 and launch.arguments["RESIDUAL"] is None


@pytest.mark.parametrize("name", CALLS)
def test_sizes_of_one_compile(name: str) -> None:
    fn, args, kwargs = CALLS[name]
    _, launches = recorded(fn, *args, **kwargs)
    for launch in launches:
        assert launch.compile("cuda:80").binary


def test_what_machine_code_depends_on_is_in_its_fingerprint() -> None:
    def fingerprint(rows: int, eps: float, dtype: torch.dtype = torch.float32) -> str:
        _, (launch,) = recorded(rms_norm, meta(rows, 256, dtype=dtype), meta(256, dtype=dtype), eps=eps)
        return launch.fingerprint

    assert fingerprint(6, 1e-5) == fingerprint(6, 1e-5)
    others = fingerprint(7, 1e-5), fingerprint(6, 1e-6), fingerprint(6, 1e-5, torch.bfloat16)
    assert len({fingerprint(6, 1e-5), *others}) == 4
