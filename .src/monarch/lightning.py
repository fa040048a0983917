"""Strategies with which Lightning trains on a mesh: `Trainer(strategy=MeshStrategy(mesh))`, and one for Fabric."""

from __future__ import annotations

from monarch.stdlib.lightning import FabricMeshStrategy, MeshStrategy

__all__ = ["FabricMeshStrategy", "MeshStrategy"]
