"""Layouts found: the cheapest ones of parameters, inputs and activations for a mesh, a machine and a memory limit."""
