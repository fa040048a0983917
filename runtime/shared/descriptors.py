"""A bound on the file descriptors that unknown peers may use up."""

from __future__ import annotations

import resource


def for_strangers(most: int) -> int:
    """How many connections may be open at one listener whose peers have not proved their identity: at most `most`, and
    an eighth of the descriptors that this process may have. The others stay for meshes, processes and files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if allowed == resource.RLIM_INFINITY else max(1, min(most, allowed // 8))
