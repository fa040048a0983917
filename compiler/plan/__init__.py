"""Plans as data: everything that a worker needs to run a program, their files, and what checks them.

Of the compiler the runtime imports this package, and little else; so what it needs of types and errors is here too.
Names are imported when they are first asked for: what only looks at a plan (`look`) does without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch.compiler.loading import load
from monarch.compiler.plan.files import set_files

if TYPE_CHECKING:
    from monarch.compiler.errors import (
        AnomalyError,
        DeviceIndexError,
        DeviceMeshError,
        LayoutError,
        LostError,
        MonarchError,
        PlanError,
        ReplicaError,
        Source,
        check_kind,
    )
    from monarch.compiler.layout import Layout, MeshSpec
    from monarch.compiler.ops import OPS
    from monarch.compiler.plan.options import TARGETS, CompileOptions, check_backend, check_target
    from monarch.compiler.plan.plan import ArenaRange, Instruction, Part, Plan, Slot, ValueSpec
    from monarch.compiler.plan.report import Report, ReportedValue
    from monarch.compiler.plan.trace import Command, Handled, Span, Step, Trace, TracedPlan
    from monarch.compiler.plan.transfers import Transfer
    from monarch.compiler.sizes import format_bytes
    from monarch.compiler.tensor_type import TensorType
    from monarch.compiler.types import DTYPE_NAMES, DTYPES

__all__ = [
    "AnomalyError",
    "ArenaRange",
    "check_backend",
    "check_kind",
    "check_target",
    "Command",
    "CompileOptions",
    "DeviceIndexError",
    "DeviceMeshError",
    "DTYPE_NAMES",
    "DTYPES",
    "format_bytes",
    "Handled",
    "Instruction",
    "Layout",
    "LayoutError",
    "LostError",
    "MeshSpec",
    "MonarchError",
    "OPS",
    "Part",
    "Plan",
    "PlanError",
    "ReplicaError",
    "Report",
    "ReportedValue",
    "Slot",
    "Source",
    "Span",
    "Step",
    "TARGETS",
    "TensorType",
    "Trace",
    "TracedPlan",
    "Transfer",
    "ValueSpec",
]

_MODULES = {
    "monarch.compiler.errors": "AnomalyError DeviceIndexError DeviceMeshError LayoutError LostError "
    "MonarchError PlanError ReplicaError Source check_kind",
    "monarch.compiler.ops": "OPS",
    "monarch.compiler.plan.options": "TARGETS CompileOptions check_backend check_target",
    "monarch.compiler.plan.plan": "Instruction Part Plan ArenaRange Slot ValueSpec",
    "monarch.compiler.plan.report": "Report ReportedValue",
    "monarch.compiler.plan.trace": "Command Handled Span Step Trace TracedPlan",
    "monarch.compiler.plan.transfers": "Transfer",
    "monarch.compiler.sizes": "format_bytes",
    "monarch.compiler.layout": "Layout MeshSpec",
    "monarch.compiler.tensor_type": "TensorType",
    "monarch.compiler.types": "DTYPE_NAMES DTYPES",
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(load(_WHERE[name]), name)
    return found


set_files(lambda: load("monarch.compiler.plan.file"))
