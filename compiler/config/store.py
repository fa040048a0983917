"""Where a setting's value comes from: defaults < file < environment < the process that spawned this one < runtime.

    default        in its definition (`definitions.py`)
    file           `kernels = "off"` in ~/.config/monarch/config.toml, or in the file that MONARCH_CONFIG names
    environment    MONARCH_KERNELS=off
    spawner        of a process that Monarch started: what its spawner had then. Such a process follows neither its own
                   file nor its environment, except for settings of the machine (`Setting.local`)
    runtime        configure(kernels="off")

Nothing else of Monarch reads the environment.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from monarch.compiler.config.kinds import Kind
from monarch.compiler.errors import MonarchError

T = TypeVar("T")
_MISSING: Any = object()


class ConfigError(MonarchError, ValueError):
    """A setting that does not exist, or a value that it may not have."""


class ConfigTypeError(MonarchError, TypeError):
    """A value of another type than the setting's, or text that cannot be read as that type."""


class Setting(Generic[T]):
    """One setting: an attribute of `Settings`, whose value is looked up whenever it is read.

    `kind` reads and checks values; `about` documents it, its first line in one sentence. A `local` setting belongs to a
    machine or to its user (folders, credentials), and does not go along to spawned processes and hosts.
    """

    def __init__(self, kind: Kind[T], default: T, about: str, *, local: bool = False) -> None:
        self.kind = kind
        self.default = default
        self.about = about
        self.local = local

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = f"MONARCH_{name.upper()}"

    @overload
    def __get__(self, instance: None, owner: type[SettingsBase]) -> Setting[T]: ...
    @overload
    def __get__(self, instance: SettingsBase, owner: type[SettingsBase]) -> T: ...
    def __get__(self, instance: SettingsBase | None, owner: type[SettingsBase]) -> Setting[T] | T:
        if instance is None:
            return self
        value = _runtime.get(self.name, _MISSING)
        if value is not _MISSING:
            return value
        if _spawner is not None and not self.local:
            return _spawner.get(self.name, self.default)
        if text := os.environ.get(self.variable):
            return self._of_text(text)
        named = os.environ.get("MONARCH_CONFIG")
        if named not in _files:
            _files[named] = _read_file(named, type(instance))
        return _files[named].get(self.name, self.default)

    def __set__(self, instance: object, value: T) -> None:
        raise AttributeError(f"set it with monarch.config.configure({self.name}=…)")

    def read(self, given: object, where: str) -> T:
        """The setting's value for a given one; `where` begins the error: `kernels`, or `MONARCH_KERNELS`."""
        try:
            return self.kind.read(given)
        except TypeError:
            error: type[MonarchError] = ConfigTypeError
        except ValueError:
            error = ConfigError
        raise error(f"{where}={given!r}: it has to be {self.kind.form}")

    def _of_text(self, text: str) -> T:
        if (known := self._last_text)[0] == text:
            return known[1]
        value = self.read(text, self.variable)
        self._last_text = (text, value)
        return value

    _last_text: tuple[str, Any] = ("", None)
    """The variable's text when it was last read, and its value."""


class SettingsBase:
    """The base of `Settings`: its definitions by name."""

    @classmethod
    def definitions(cls) -> dict[str, Setting[Any]]:
        return {name: each for name, each in vars(cls).items() if isinstance(each, Setting)}

    @classmethod
    def definition(cls, name: str, where: str = "") -> Setting[Any]:
        """Raises ConfigError, with the names that are near."""
        known = cls.definitions()
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "docs/reference/settings.md lists them all."
        raise ConfigError(f"{where}no setting is called {name!r}", hint=hint)


_lock = threading.Lock()
_runtime: dict[str, Any] = {}
"""Replaced, never changed in place, so that readers need no lock."""
_spawner: dict[str, Any] | None = None


def set_runtime(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set values of the runtime layer, or remove those that are `_MISSING`; gives the former ones."""
    global _runtime
    with _lock:
        before = {name: _runtime.get(name, _MISSING) for name in values}
        _runtime = {name: value for name, value in {**_runtime, **values}.items() if value is not _MISSING}
    return before


@contextmanager
def runtime_values(values: Mapping[str, Any]) -> Iterator[None]:
    """Within the block these values hold; after it the former ones, whatever else was set meanwhile."""
    before = set_runtime(values)
    try:
        yield
    finally:
        set_runtime(before)


def runtime_layer() -> dict[str, Any]:
    return _runtime


def follow(values: dict[str, Any] | None) -> None:
    """From now on this process has its spawner's values, and none of its own yet; with None, it has no spawner."""
    global _runtime, _spawner
    with _lock:
        _runtime, _spawner = {}, values


def clear_runtime() -> None:
    global _runtime
    with _lock:
        _runtime = {}


_files: dict[str | None, dict[str, Any]] = {}
"""The values in each file that MONARCH_CONFIG named (None: the user's own), read once in a process."""


def _read_file(named: str | None, settings: type[SettingsBase]) -> dict[str, Any]:
    """The values in the named file, or else in the user's own if there is one. Raises ConfigError, ConfigTypeError."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(named) if named else Path(folder, "monarch", "config.toml")
    if not named and not path.is_file():
        return {}
    import tomllib  # takes a millisecond, and few have the file

    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the settings in {path} cannot be read: {error}", hint="see docs/reference/settings.md."
        ) from None
    return {
        name: settings.definition(name, f"{path}: ").read(given, f"{path}: {name}") for name, given in found.items()
    }
