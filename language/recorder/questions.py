"""Libraries' questions to PyTorch about how their code runs: inside of a program it is traced, and a program is
compiled.

`transformers` and others choose a path without branches on values where `torch.compiler.is_compiling()` says yes. So
programs do, to all but PyTorch's own modules, which would take other arithmetic for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from monarch.language.recorder.recording import current

_ARITHMETIC = ("torch.optim.radam", "torch.optim.asgd")
"""The modules of PyTorch that take their `capturable` path, which branches on no value, for tensors on a GPU only."""


def _asks(function: Callable[[], bool]) -> Callable[[], bool]:
    def is_compiling() -> bool:
        if current.recording is None and not current.without_data:
            return function()
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return asker in _ARITHMETIC or not (asker == "torch" or asker.startswith("torch."))

    is_compiling.__doc__ = function.__doc__
    return is_compiling


torch.compiler.is_compiling = _asks(torch.compiler.is_compiling)
torch.compiler.is_dynamo_compiling = _asks(torch.compiler.is_dynamo_compiling)
