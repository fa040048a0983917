"""Actors: services beside programs, on meshes of processes.

from monarch.actor import Actor, endpoint, this_host

class Counter(Actor):
    def __init__(self) -> None:
        self.value = 0

    @endpoint
    def add(self, n: int) -> int:
        self.value += n
        return self.value

counters = this_host().spawn_procs(per_host={"gpus": 4}).spawn("counters", Counter)
print(counters.add.call(3).get())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import monarch.runtime.actors.processes.host as _host
from monarch import config
from monarch.compiler.loading import load
from monarch.compiler.mesh import Extent, NDSlice, Point, Shape
from monarch.runtime.actors.accumulate import Accumulator
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.actor_mesh import ActorMesh
from monarch.runtime.actors.adverbs import Endpoint, as_endpoint, send
from monarch.runtime.actors.channel import Channel, Port, PortReceiver
from monarch.runtime.actors.debugging.debugger import debug
from monarch.runtime.actors.debugging.stacks import report_slow_calls
from monarch.runtime.actors.endpoint import concurrent_endpoint, endpoint
from monarch.runtime.actors.errors import ActorError, MeshFailure, SupervisionError
from monarch.runtime.actors.meshes import (
    HostMesh,
    ProcMesh,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from monarch.runtime.actors.processes.current import Context, context, current_actor_name, current_rank, current_size
from monarch.runtime.actors.processes.host import shutdown_context
from monarch.runtime.actors.shards import Shards
from monarch.runtime.actors.telemetry.meters import get_meter
from monarch.runtime.actors.telemetry.spans import span, traced
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.runtime.actors.joining import (
        attach_to_workers,
        enable_transport,
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
    )

unhandled_fault_hook = _host.fault_hook
"""Called with a `MeshFailure` that no actor dealt with; assign another to `monarch.actor.unhandled_fault_hook`.
This one prints the report to standard error and raises SystemExit(1), which stops the program."""

_host.fault_hook = lambda failure: unhandled_fault_hook(failure)

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "NDSlice",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "Shape",
    "Shards",
    "SupervisionError",
    "ValueMesh",
    "as_endpoint",
    "attach_to_workers",
    "config",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "report_slow_calls",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]

_JOINING = ("attach_to_workers", "enable_transport", "run_worker_loop_forever", "run_worker_loop_until_shutdown")


def __getattr__(name: str) -> Any:
    """What attaches hosts loads the control plane, and is loaded when it is first used."""
    if name not in _JOINING:
        raise AttributeError(f"module 'monarch.actor' has no attribute {name!r}")
    value = globals()[name] = load(f"monarch.runtime.actors.joining:{name}")
    return value
