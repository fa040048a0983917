"""Partitioning by mesh dim: one dim after the other, each on the graph that the previous one left."""

from monarch.compiler.partition.partition import PartitionByMesh, nesting_order

__all__ = ["PartitionByMesh", "nesting_order"]
