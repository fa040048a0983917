"""Triton: kernels for GPUs, compiled ahead of time on machines that have none.

Nothing here imports triton before a kernel is compiled: it is no dependency of running on CPUs.
"""
