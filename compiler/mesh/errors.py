"""Errors of the mesh algebra: the same for meshes of workers, hosts, processes, actors and values.

All are LayoutErrors; each is also the built-in exception that Python's own containers raise for the same mistake.
"""

from __future__ import annotations

from monarch.compiler.errors import LayoutError


class MeshDimError(LayoutError, TypeError, KeyError):
    """A dim that the mesh does not have."""


class MeshIndexError(LayoutError, IndexError):
    """A position or rank outside the mesh."""


class MeshShapeError(LayoutError, ValueError):
    """A grid that cannot be: a bad name or size, an empty slice, a split that does not divide, a flatten with gaps."""
