"""The factory of a mesh's workers. `monarch` registers it on import, before torch is loaded: so this module loads
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.compiler.execution.executor import Executor, Hosts, Procs
    from monarch.compiler.types import MeshSpec

    Factory = Callable[[MeshSpec], Executor]

_factory: Factory | None = None
_instead = False
_abstract_too = False


def set_executor_factory(factory: Factory) -> None:
    """Say how workers are started; `monarch` itself does so on import."""
    global _factory
    _factory = factory


@contextmanager
def executors_by(factory: Factory, *, abstract: bool = False) -> Iterator[None]:
    """Within a block, meshes that start their workers get this executor, wherever these would run: one without workers,
    for compiling ahead of time. With `abstract`, meshes that have no workers get it too."""
    global _factory, _instead, _abstract_too
    before = _factory, _instead, _abstract_too
    _factory, _instead, _abstract_too = factory, True, abstract
    try:
        yield
    finally:
        _factory, _instead, _abstract_too = before


def abstract_can_run() -> bool:
    """Whether there are executors for meshes without workers."""
    return _abstract_too


def executor_for(mesh: MeshSpec, where: Hosts | Procs | None = None) -> Executor:
    """Start workers for `mesh`: on this machine, or on those hosts, or in those processes."""
    if _factory is None:
        raise RuntimeError("no runtime: import monarch first")
    return _factory(mesh) if where is None or _instead else where.start(mesh)
