"""Plans as data: everything that a worker needs to run a program, their files, and what checks them.

Of the compiler the runtime imports this package, and little else; so what it needs of types and errors is here too.
"""

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
from monarch.compiler.loading import load
from monarch.compiler.ops import OPS
from monarch.compiler.plan.options import BACKENDS, TARGETS, CompileOptions, check_backend, check_target
from monarch.compiler.plan.plan import Instruction, Part, Plan, Region, Slot, ValueSpec, set_files
from monarch.compiler.plan.report import Alternative, Decision, Report, Value
from monarch.compiler.plan.trace import Command, Handled, Span, Step, Trace, TracedPlan
from monarch.compiler.plan.transfers import Route, Transfer, routes
from monarch.compiler.sizes import format_bytes
from monarch.compiler.types import DTYPE_NAMES, DTYPES, REDUCTIONS, Layout, MeshSpec, TensorType

__all__ = [
    "Alternative",
    "AnomalyError",
    "BACKENDS",
    "Command",
    "CompileOptions",
    "DTYPES",
    "DTYPE_NAMES",
    "OPS",
    "REDUCTIONS",
    "TARGETS",
    "Decision",
    "DeviceIndexError",
    "DeviceMeshError",
    "Handled",
    "Instruction",
    "Layout",
    "LayoutError",
    "LostError",
    "MeshSpec",
    "MonarchError",
    "Part",
    "Region",
    "Route",
    "Plan",
    "PlanError",
    "ReplicaError",
    "Report",
    "Slot",
    "Source",
    "Span",
    "Step",
    "TensorType",
    "Trace",
    "TracedPlan",
    "Transfer",
    "Value",
    "ValueSpec",
    "check_backend",
    "check_target",
    "format_bytes",
    "routes",
    "check_kind",
]

set_files(lambda: load("monarch.compiler.plan.file"))
