"""The passes of plans for GPUs alone. The pipeline loads this module by name when it compiles one: the Triton emitter
takes as long to load as a small program takes to compile."""

from monarch.compiler.kernels.products import FuseProducts
from monarch.compiler.kernels.triton.ahead import triton_version, with_binaries
from monarch.compiler.kernels.triton.calls import calls_of

__all__ = ["FuseProducts", "calls_of", "triton_version", "with_binaries"]
