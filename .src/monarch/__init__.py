"""Monarch: write one Python program for the whole cluster.

    import torch, monarch
    from monarch.distributed import Mesh

    mesh = Mesh(data=4, model=2)
    x = monarch.distribute(torch.randn(1024, 1024), mesh, "[@data, -]")
    print((x @ x.T).full_tensor().shape)

Names are loaded when they are first used, and workers start when a mesh first needs them.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from monarch.compiler.display import draw_with
from monarch.compiler.execution.ending import end, end_with
from monarch.compiler.execution.factories import set_executor_factory
from monarch.compiler.execution.presets import choose_with
from monarch.compiler.execution.watching import watch_with
from monarch.compiler.kernels.templates import set_templates
from monarch.compiler.loading import load as _named

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial, Replicate, Shard

    from monarch import actor, builtins, config, data, distributed, exceptions, job, launch, rdma, spmd, telemetry
    from monarch.compiler.errors import (
        CheckpointError,
        DeviceCheckError,
        DeviceIndexError,
        DeviceMeshError,
        GraphError,
        LayoutError,
        MonarchError,
        PerformanceWarning,
        PlanError,
        ProgramError,
        RuleError,
    )
    from monarch.compiler.inspect.profile import profile
    from monarch.compiler.mesh import Extent, NDSlice, Point, Shape
    from monarch.compiler.plan import Plan
    from monarch.compiler.rules import sharding_rule
    from monarch.compiler.types import Layout, MeshSpec, TensorType
    from monarch.config import (
        clear_runtime_config,
        configure,
        configured,
        get_global_config,
        get_runtime_config,
    )
    from monarch.language import (
        DistributedTensor,
        Mesh,
        MeshFailure,
        Shrink,
        all_gather,
        all_to_all,
        cond,
        distribute,
        from_dtensor,
        heal_mesh,
        layout,
        local,
        manual_seed,
        module_to_mesh,
        permute,
        program,
        reduce,
        reduce_scatter,
        resize_mesh,
        scan,
        vary,
        while_loop,
    )
    from monarch.runtime.actors.hosts import hosts
    from monarch.runtime.actors.meshes import HostMesh, this_host
    from monarch.stdlib.checkpoints.loading import load
    from monarch.stdlib.checkpoints.saving import save
    from monarch.stdlib.elastic import elastic
    from monarch.stdlib.fetching import fetch_shard, inspect
    from monarch.stdlib.generation import generate
    from monarch.stdlib.gradients import grad_generator
    from monarch.stdlib.live.page import dashboard
    from monarch.stdlib.logs import log, log_to
    from monarch.stdlib.remote import remote
    from monarch.stdlib.syncing import sync, version

__version__ = "0.1.0"

_HOMES = {
    "monarch": (
        "actor",
        "builtins",
        "config",
        "data",
        "distributed",
        "exceptions",
        "job",
        "launch",
        "rdma",
        "spmd",
        "telemetry",
    ),  # modules
    "monarch.compiler.errors": (
        "CheckpointError",
        "DeviceCheckError",
        "DeviceIndexError",
        "DeviceMeshError",
        "GraphError",
        "LayoutError",
        "MonarchError",
        "PerformanceWarning",
        "PlanError",
        "ProgramError",
        "RuleError",
    ),
    "monarch.compiler.inspect.profile": ("profile",),
    "monarch.compiler.mesh": ("Extent", "NDSlice", "Point", "Shape"),
    "monarch.compiler.plan": ("Plan",),
    "monarch.compiler.rules": ("sharding_rule",),
    "monarch.compiler.types": ("Layout", "MeshSpec", "TensorType"),
    "monarch.config": (
        "clear_runtime_config",
        "configure",
        "configured",
        "get_global_config",
        "get_runtime_config",
    ),
    "monarch.language": (
        "DistributedTensor",
        "Mesh",
        "MeshFailure",
        "Shrink",
        "all_gather",
        "all_to_all",
        "cond",
        "distribute",
        "from_dtensor",
        "heal_mesh",
        "layout",
        "local",
        "manual_seed",
        "module_to_mesh",
        "permute",
        "program",
        "reduce",
        "reduce_scatter",
        "resize_mesh",
        "vary",
        "scan",
        "while_loop",
    ),
    "monarch.runtime.actors.hosts": ("hosts",),
    "monarch.runtime.actors.meshes": ("HostMesh", "this_host"),
    "monarch.stdlib.checkpoints.loading": ("load",),
    "monarch.stdlib.checkpoints.saving": ("save",),
    "monarch.stdlib.elastic": ("elastic",),
    "monarch.stdlib.fetching": ("fetch_shard", "inspect"),
    "monarch.stdlib.generation": ("generate",),
    "monarch.stdlib.gradients": ("grad_generator",),
    "monarch.stdlib.live.page": ("dashboard",),
    "monarch.stdlib.logs": ("log", "log_to"),
    "monarch.stdlib.remote": ("remote",),
    "monarch.stdlib.syncing": ("sync", "version"),
    "torch.distributed.tensor": ("Partial", "Replicate", "Shard"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointError",
    "DeviceCheckError",
    "DeviceIndexError",
    "DeviceMeshError",
    "DistributedTensor",
    "Extent",
    "GraphError",
    "HostMesh",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshFailure",
    "MeshSpec",
    "MonarchError",
    "NDSlice",
    "Partial",
    "PerformanceWarning",
    "Plan",
    "PlanError",
    "Point",
    "ProgramError",
    "Replicate",
    "RuleError",
    "Shape",
    "Shard",
    "Shrink",
    "TensorType",
    "actor",
    "all_gather",
    "all_to_all",
    "builtins",
    "clear_runtime_config",
    "cond",
    "config",
    "configure",
    "configured",
    "dashboard",
    "data",
    "distribute",
    "distributed",
    "elastic",
    "exceptions",
    "fetch_shard",
    "from_dtensor",
    "generate",
    "get_global_config",
    "get_runtime_config",
    "grad_generator",
    "heal_mesh",
    "hosts",
    "inspect",
    "job",
    "launch",
    "layout",
    "load",
    "local",
    "log",
    "log_to",
    "manual_seed",
    "module_to_mesh",
    "permute",
    "profile",
    "program",
    "rdma",
    "reduce",
    "reduce_scatter",
    "remote",
    "resize_mesh",
    "save",
    "scan",
    "sharding_rule",
    "spmd",
    "sync",
    "telemetry",
    "this_host",
    "vary",
    "version",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'monarch' has no attribute {name!r}")
    home = _HOME[name]
    value = globals()[name] = _named(f"monarch.{name}" if home == "monarch" else f"{home}:{name}")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _start_local(mesh: MeshSpec) -> Any:
    """Start workers on this host: an Executor. `language` asks for them through the Protocol, and knows no runtime."""
    return _named("monarch.runtime.controller.executor:start_local")(mesh)


def _templates() -> Any:
    """The library's kernels for whole ops, by op."""
    return _named("monarch.stdlib.kernels.calls:TEMPLATES")


def _automatic() -> Any:
    """What chooses layouts where a module is placed with layouts="auto"."""
    return _named("monarch.stdlib.parallel:automatic")


def _draw(value: Any) -> str:
    """A layout's or tensor type's drawing, for a notebook."""
    html: str = _named("monarch.compiler.inspect.html:html_of")(value)
    return html


def _live() -> Any:
    """What shows the program in `monarch top` and `monarch dashboard`."""
    return _named("monarch.stdlib.live.page:start")


set_executor_factory(_start_local)
set_templates(_templates)
draw_with(_draw)
choose_with(_automatic)
watch_with(_live)


_ENDED = (
    "monarch.stdlib.logs",
    "monarch.stdlib.telemetry.session",
    "monarch.stdlib.live.page",
    "monarch.runtime.actors.processes.host",
    "monarch.runtime.processes.parent",
)
"""What ends with the program, in this order: what reads from meshes and actors, and then these. Rows of telemetry are
kept until all that is logged has been written."""


def _at_exit() -> None:
    """Registered here, so that it runs after the handlers that a program registers, which can use meshes and actors.
    What one of them raises does not keep the others from ending. A forked child has inherited it, and ends what it has
    started itself."""
    with ExitStack() as ends:
        for name in reversed(_ENDED):
            if (module := sys.modules.get(name)) is not None:
                ends.callback(module.at_exit)


end_with(_at_exit)
atexit.register(end)
