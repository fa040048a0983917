"""How works of a link end early. Beside `interface`, for callers that catch these and have no link of their own."""

from __future__ import annotations

from monarch.compiler.plan import MonarchError


class LinkLost(MonarchError):
    """The other process, or the way to it, is gone: nothing that is under way on the link will be finished."""


class AccessRefused(MonarchError):
    """The owner of the memory refused: no such region or one that was dropped, a wrong key, or out of bounds. Nothing
    was written, and the link goes on."""
