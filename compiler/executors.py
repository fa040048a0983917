"""Who starts workers for a mesh. `monarch` says so on import, before torch is loaded: so this module loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.compiler.plan.executor import Executor
    from monarch.compiler.types import MeshSpec

    Factory = Callable[[MeshSpec], Executor]

_factory: Factory | None = None


def set_executor_factory(factory: Factory) -> None:
    """Say how workers are started; `monarch` itself does so on import."""
    global _factory
    _factory = factory


@contextmanager
def executors_by(factory: Factory) -> Iterator[None]:
    """Within a block, meshes that start their workers get this executor: one without workers, for compiling ahead of
    time."""
    global _factory
    before, _factory = _factory, factory
    try:
        yield
    finally:
        _factory = before


def executor_for(mesh: MeshSpec) -> Executor:
    """Start workers for `mesh`."""
    if _factory is None:
        raise RuntimeError("no runtime: import monarch first")
    return _factory(mesh)
