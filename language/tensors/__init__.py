"""Meshes of workers, and tensors whose data lies on them."""
