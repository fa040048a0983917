"""Settings: one typed, documented place for all that users may choose about how Monarch runs.

    monarch.config.configure(kernels="off")                   # for this process and what it spawns from now on
    with monarch.config.configured(codec_max_frame_length="2 GiB"):
        …                                                     # within the block only

Values come from defaults < a file < the environment < `configure` (see `store`). Code reads
them where it needs them, as attributes: `settings.kernels` (`definitions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from monarch.compiler.config import store
from monarch.compiler.config.definitions import Settings, settings
from monarch.compiler.config.store import ConfigError, ConfigTypeError, Setting

__all__ = [
    "ConfigError",
    "ConfigTypeError",
    "Settings",
    "clear_runtime_config",
    "configure",
    "configured",
    "for_spawned",
    "get_global_config",
    "get_runtime_config",
    "setting_of",
    "settings",
    "spawned_with",
]

T = TypeVar("T")


def configure(**values: Any) -> None:
    """Set values for this process, and for the processes that it spawns from now on.

    Durations are text with units ("30s", "1h 30m"), sizes text or numbers of bytes ("2 GiB"). Raises ConfigError, a
    ValueError, for an unknown name and a value that is not allowed, and ConfigTypeError, a TypeError, for a value of
    another type; nothing is set then.
    """
    store.set_runtime(_read(values))


@contextmanager
def configured(**values: Any) -> Iterator[dict[str, Any]]:
    """`configure` within a block, which may contain others: it gives the block all settings, as `get_global_config`
    does, and restores at its end the values that it set. Raises as `configure`."""
    with store.runtime_values(_read(values)):
        yield get_global_config()


def get_global_config() -> dict[str, Any]:
    """All settings as they are now, by name: durations as text, sizes in bytes. Changing the dict changes nothing."""
    return {name: each.kind.show(getattr(settings, name)) for name, each in Settings.definitions().items()}


def get_runtime_config() -> dict[str, Any]:
    """The values that `configure` and `configured` set in this process, by name."""
    return _shown(store.runtime_layer())


def clear_runtime_config() -> None:
    """Forget what `configure` and `configured` set in this process."""
    store.clear_runtime()


def for_spawned() -> dict[str, Any]:
    """The values for a process that is spawned now: this one's, but for defaults and the machine's own."""
    told = {name: each for name, each in Settings.definitions().items() if not each.local}
    values = {name: getattr(settings, name) for name in told}
    return _shown({name: value for name, value in values.items() if value != told[name].default})


def setting_of(values: Mapping[str, Any] | Iterable[tuple[str, Any]], setting: Setting[T]) -> T:
    """The value of a setting in a process that is spawned with these values (of `for_spawned`)."""
    return setting.kind.read(dict(values).get(setting.name, setting.kind.show(setting.default)))


def spawned_with(values: dict[str, Any]) -> None:
    """Have this process follow its spawner's settings, as `for_spawned` gave them there. Raises as `configure`."""
    store.follow(_read(values))


def _read(values: dict[str, Any]) -> dict[str, Any]:
    return {name: Settings.definition(name).read(given, name) for name, given in values.items()}


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    return {name: Settings.definition(name).kind.show(value) for name, value in values.items()}
