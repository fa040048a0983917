"""Torch's learning-rate schedulers inside a program: what they compute of a count that a program reads at each call."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from torch.optim import lr_scheduler

from monarch.language.recorder.scalar import Scalar


def _cos(x: Any) -> Any:
    return x.cos() if type(x) is Scalar else math.cos(x)


_math: Any = ModuleType("math")
vars(_math).update(vars(math), cos=_cos)
vars(lr_scheduler)["math"] = _math
