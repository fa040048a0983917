"""Kernels in C++, for workers that compute on a CPU."""
