"""Collectives. Read `meeting` first: how workers meet; then `shares`, `reduce`, `chain`, `cost` (which of them
runs) and `collectives`. For plans that choose process groups: `membership` and `rendezvous`, how workers come to be in
one; `listening`, `gloo` and `process_groups` for Gloo; `nccl`, `communicator` and `streamed` for NCCL."""

from monarch.runtime.collectives.collectives import Collectives
from monarch.runtime.collectives.meeting import Meetings

__all__ = ["Collectives", "Meetings"]
