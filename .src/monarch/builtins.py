"""Functions for every process of the active mesh: logging, and PyTorch's random numbers there.

    with hosts.spawn_procs().activate():
        set_logging_level_remote.call(logging.INFO).get()
        log_remote.call("epoch %d", 3, level=logging.INFO).get()

Each is a `monarch.remote` function, with an endpoint's adverbs (`call`, `call_one`, `broadcast`). Random numbers are
those of actors and remote functions in these processes; a program's follow `monarch.manual_seed`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from monarch.runtime.actors.functions import Remote

__all__ = [
    "get_rng_state_remote",
    "log_remote",
    "seed_remote",
    "set_logging_level_remote",
    "set_manual_seed_remote",
    "set_rng_state_remote",
]

_log = logging.getLogger(__name__)


@Remote
def log_remote(*args: Any, level: int = logging.WARNING, **kwargs: Any) -> None:
    """Log a message there, as `logging.Logger.log` does; the record reaches the program's own handlers."""
    _log.log(level, *args, **kwargs)


@Remote
def set_logging_level_remote(level: int) -> None:
    """From which level on `log_remote` logs there."""
    _log.setLevel(level)


@Remote
def set_manual_seed_remote(seed: int, process_idx: int = 0) -> None:
    """`torch.manual_seed(seed ^ process_idx)` there."""
    torch.manual_seed(seed ^ process_idx)


@Remote
def seed_remote() -> int:
    """`torch.seed()` there: a seed that nobody can predict, which is returned."""
    return torch.seed()


@Remote
def get_rng_state_remote() -> torch.Tensor:
    """The state of PyTorch's CPU generator there: u8[n]."""
    return torch.get_rng_state()


@Remote
def set_rng_state_remote(new_state: torch.Tensor) -> None:
    """Set that state: what `get_rng_state_remote` gave."""
    torch.set_rng_state(new_state)
