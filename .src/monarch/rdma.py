"""Memory that other processes read and write directly: `from monarch.rdma import RDMABuffer`."""

from __future__ import annotations

from monarch.runtime.rdma import RDMAAction, RDMABuffer, Transfer, configure

__all__ = ["RDMAAction", "RDMABuffer", "Transfer", "configure"]
