"""Meshes of workers, and tensors whose data is on them."""
