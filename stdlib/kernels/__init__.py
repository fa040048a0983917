"""Kernels written by hand in Triton, for ops that the compiler's loop IR cannot express.

Each file holds one template: kernels, the variants to build and measure, and plain functions of tensors that launch
them. Importing a template imports triton; importing this package does not. See docs/internals/kernels-templates.md.
"""
