"""Which module's forward runs: what a program's ops are recorded with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from monarch.language.programs.environment import Environment
from monarch.language.recorder.recording import current


@contextmanager
def module_paths(environment: Environment) -> Iterator[None]:
    """Keep `current.module` the path of the innermost module of `environment` whose forward this thread runs.

    Paths are those of the state's labels: within the module, and prefixed by its name where the program reaches
    several. A module that stands at several places has its first path; one that the program does not reach by name
    (made in its function) counts as part of its caller.
    """
    paths: dict[int, str] = {}
    for name, module in environment.modules.items():
        for path, child in module.named_modules(prefix=name if len(environment.modules) > 1 else ""):
            paths.setdefault(id(child), path)
    thread = threading.get_ident()
    callers: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            callers.append(current.module)
            current.module = paths.get(id(module), current.module)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == thread:
            current.module = callers.pop()

    before = current.module
    try:
        with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
            yield
    finally:
        current.module = before
