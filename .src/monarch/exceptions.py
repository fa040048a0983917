"""All errors and warnings of Monarch's, to catch: `from monarch.exceptions import DeviceMeshError`."""

from monarch.compiler.config import ConfigError, ConfigTypeError
from monarch.compiler.errors import (
    AnomalyError,
    CheckpointError,
    DeviceCheckError,
    DeviceIndexError,
    DeviceMeshError,
    GraphError,
    LayoutError,
    LostError,
    MonarchError,
    PerformanceWarning,
    PlanError,
    ProgramError,
    ReplicaError,
    RuleError,
)
from monarch.compiler.mesh.errors import MeshDimError, MeshIndexError, MeshShapeError
from monarch.language.errors import OperatorError, TracedAgainWarning
from monarch.runtime.actors.errors import ActorError, OpaqueError, SupervisionError
from monarch.runtime.actors.messages.message import MessageSizeError

__all__ = [
    "ActorError",
    "AnomalyError",
    "CheckpointError",
    "ConfigError",
    "ConfigTypeError",
    "DeviceCheckError",
    "DeviceIndexError",
    "DeviceMeshError",
    "GraphError",
    "LayoutError",
    "LostError",
    "MeshDimError",
    "MeshIndexError",
    "MeshShapeError",
    "MessageSizeError",
    "MonarchError",
    "OpaqueError",
    "OperatorError",
    "PerformanceWarning",
    "PlanError",
    "ProgramError",
    "ReplicaError",
    "RuleError",
    "SupervisionError",
    "TracedAgainWarning",
]
