"""Monarch: write one Python program for the whole cluster."""

from __future__ import annotations

__version__ = "0.1.0"
