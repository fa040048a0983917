"""The classes of actors, in messages that refer to actors: pickled once, and read once by each process.

One that a script or a notebook defines is pickled by value, with the globals that its methods use. To do that for each
message would cost several times what the rest of it does; and to read it again would give the methods of actors that
run already new globals, and the class the attributes that it had where the message comes from.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle

from monarch.compiler.execution.executor import outgoing

Pickled: TypeAlias = tuple[str, bytes]
"""A token, by which a process that has read it once knows it, and the pickle."""

LARGEST = 1 << 20
"""Classes with more bytes are pickled with each message, so that they travel beside it, and no process keeps them."""

_pickled: WeakKeyDictionary[type, Pickled | None] = WeakKeyDictionary()
"""None for those that cannot be pickled alone."""
_read: WeakValueDictionary[str, type] = WeakValueDictionary()


class _Pickling(threading.local):
    def __init__(self) -> None:
        self.classes: set[type] = set()


_pickling = _Pickling()


def sent(cls: type) -> type | Pickled:
    """The reference to a class in a message: the class itself, to be pickled with the message, where it cannot be
    pickled alone, or is large."""
    if cls in _pickled:
        found = _pickled.get(cls)
    elif cls in _pickling.classes:  # its methods use a mesh of actors of this class
        found = None
    else:
        _pickled[cls] = found = _alone(cls)
        if found is not None:
            _read[found[0]] = cls
    return found or cls


def _alone(cls: type) -> Pickled | None:
    # A distributed tensor among its globals is lent to one message, and cannot be in a pickle that others share.
    before = outgoing.set(None)
    _pickling.classes.add(cls)
    try:
        data = cloudpickle.dumps(cls)
    except Exception:  # which is raised again if that cannot be done with the message either
        return None
    finally:
        _pickling.classes.discard(cls)
        outgoing.reset(before)
    return (secrets.token_hex(8), data) if len(data) <= LARGEST else None


def read(what: type | Pickled) -> Any:
    """The class that `sent` stands for. Raises what unpickling raises."""
    if isinstance(what, type):
        return what
    cls = _read.get(what[0])
    if cls is None:
        cls = cloudpickle.loads(what[1])
        _read[what[0]] = cls
        _pickled[cls] = what  # and is handed on as it came
    return cls


def renew(cls: type) -> None:
    """Pickle it anew when it is next sent: actors are spawned of it, as it is now."""
    _pickled.pop(cls, None)
