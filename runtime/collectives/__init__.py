"""Collectives. Read `meeting` first: how workers meet; then `shares`, `reduce`, `chain`, `cost` (which of them
runs) and `collectives`; `listening`, `membership` and `process_groups` for plans that choose Gloo."""

from monarch.runtime.collectives.collectives import Collectives
from monarch.runtime.collectives.listening import Network

__all__ = ["Collectives", "Network"]
