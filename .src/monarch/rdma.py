"""Memory that other processes read and write directly: `from monarch.rdma import RDMABuffer`."""

from __future__ import annotations

from monarch.runtime.rdma import (
    RDMAAction,
    RDMABuffer,
    Transfer,
    configure,
    get_rdma_backend,
    is_ibverbs_available,
)

__all__ = ["RDMAAction", "RDMABuffer", "Transfer", "configure", "get_rdma_backend", "is_ibverbs_available"]
