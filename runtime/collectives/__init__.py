"""Collectives. Read `meeting` first: how workers meet; then `shares`, `reduce`, `chain`, `cost` (which of them
runs) and `collectives`."""

from monarch.runtime.collectives.collectives import Collectives

__all__ = ["Collectives"]
