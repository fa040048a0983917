"""Kernels on a worker's device: a plan's generated kernels as callables on a CPU, and plans made ready for a GPU."""
