"""Meshes of workers: `from monarch.distributed import Mesh`."""

from __future__ import annotations

from monarch.language import DistributedTensor, Mesh

__all__ = ["DistributedTensor", "Mesh"]
