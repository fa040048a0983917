"""Settings, as users set them: `configure`, `configured`, and what they are now (docs/reference/settings.md)."""

from monarch.compiler.config import (
    ConfigError,
    ConfigTypeError,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)

__all__ = [
    "ConfigError",
    "ConfigTypeError",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
]
