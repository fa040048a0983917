"""Kernels: groups of a plan's ops as loops over indices, and the C++ and Triton that is written from them."""
