"""Workers on this host: processes that hold tensors and run plans, driven through one shared ring of commands.

    controller ── commands, in a ring in shared memory, read by every worker ──▶ workers
        ▲──────── progress words in shared memory; failures and values over a socket each ────┘

Read in this order: `futex`, `signals` (how processes wait for each other), `window` (the shared memory), `ring` and
`wire` (commands), `collectives`, `bindings` and `frame` (a plan as a Python function), `worker_state` and `worker`,
`exchange` (what workers in processes of actors have to do with these), `warm` and `processes` (how workers start and
end), `connection`, `controller_state` and `controller`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.compiler.plan import Executor, MeshSpec

__all__ = ["start_local"]


def start_local(mesh: MeshSpec) -> Executor:
    """Start a worker process on this host for each place of `mesh`. Raises MonarchError where that is too many for the
    machine's cores or memory."""
    from monarch.runtime.controller import MeshExecutor

    return MeshExecutor(mesh)
