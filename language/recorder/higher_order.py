"""In programs, PyTorch's own functions for branches and loops are Monarch's: PyTorch's compile their functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from monarch.language.recorder.control import cond, while_loop
from monarch.language.recorder.recording import current_program
from monarch.language.recorder.scan import associative_scan, map_over, scan


def _take_over() -> None:
    ours: dict[str, Callable[..., Any]] = {
        "cond": cond,
        "while_loop": while_loop,
        "scan": scan,
        "map": map_over,
        "associative_scan": associative_scan,
    }
    package = torch._higher_order_ops
    for name, own in ours.items():
        taken = _taken(getattr(package, name), own)
        for holder in (torch, package, sys.modules[f"{package.__name__}.{name}"]):
            if hasattr(holder, name):
                setattr(holder, name, taken)


def _taken(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if current_program() is None else own)(*args, **kwargs)

    return call


_take_over()
