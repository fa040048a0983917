"""Data: streams of batches onto a mesh (`monarch.data`), and text that every machine has."""

from __future__ import annotations

from monarch.stdlib.data.corpus import batches, corpus, decode, encode

__all__ = ["batches", "corpus", "decode", "encode"]
