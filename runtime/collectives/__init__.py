"""Collectives. Read `meeting` first: how workers meet; then `reduce`, `chain` and `collectives`."""

from monarch.runtime.collectives.collectives import Collectives

__all__ = ["Collectives"]
