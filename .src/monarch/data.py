"""Batches from where data lies onto a mesh: `monarch.data.stream(source, mesh, layout, batch=32)`."""

from __future__ import annotations

from monarch.stdlib.data.columns import DataError, Ragged
from monarch.stdlib.data.engines import query
from monarch.stdlib.data.packing import document_mask, pack
from monarch.stdlib.data.stream import Stream, stream

__all__ = ["DataError", "Ragged", "Stream", "document_mask", "pack", "query", "stream"]
