"""Plans: everything that a worker needs to run a program, and the Protocol by which programs are run.

The runtime may import this package and nothing else of the compiler, so what it needs of types and errors is here too.
"""

from monarch.compiler.errors import DeviceIndexError, DeviceMeshError, LayoutError, MonarchError, PlanError, Source
from monarch.compiler.executors import abstract_can_run, attach_hosts, executor_for, executors_by, set_executor_factory
from monarch.compiler.ops import OPS
from monarch.compiler.plan.executor import Executor, Handle, Hosts, Outgoing, Procs, Returned, outgoing
from monarch.compiler.plan.options import BACKENDS, TARGETS, CompileOptions, check_backend, check_target
from monarch.compiler.plan.plan import Instruction, Plan, Region, Slot, ValueSpec
from monarch.compiler.plan.report import Alternative, Decision, Report, Value
from monarch.compiler.plan.trace import Command, Handled, Span, Step, Trace, TracedPlan
from monarch.compiler.sizes import format_bytes
from monarch.compiler.types import DTYPE_NAMES, DTYPES, REDUCTIONS, Layout, MeshSpec, TensorType

__all__ = [
    "Alternative",
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
    "Executor",
    "Handle",
    "Handled",
    "Hosts",
    "Instruction",
    "Layout",
    "LayoutError",
    "MeshSpec",
    "MonarchError",
    "Outgoing",
    "Region",
    "Plan",
    "PlanError",
    "Procs",
    "Report",
    "Returned",
    "Slot",
    "Source",
    "Span",
    "Step",
    "TensorType",
    "Trace",
    "TracedPlan",
    "Value",
    "ValueSpec",
    "abstract_can_run",
    "attach_hosts",
    "check_backend",
    "check_target",
    "executor_for",
    "executors_by",
    "format_bytes",
    "outgoing",
    "set_executor_factory",
]
