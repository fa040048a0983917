"""Which algorithm takes least time: a model of the cost of messages and bytes between hosts.

Times are those of a worker's messages, one after the other, and of the bytes that a host's workers send together over
its one connection to the network. The choice depends on sizes and places only, and never on a measurement made while a
program runs: all workers have to choose alike. (The results would be the same whatever they chose.)
"""

from __future__ import annotations

from monarch.compiler.cost.link import NETWORK
from monarch.runtime.collectives.meeting import Group

# On one host, above this, more than two workers share the additions instead of each doing all of them.
_NEAR_DIRECT_BYTES = 32 << 10


def direct_is_faster(group: Group, size: int, area: int) -> bool:
    """Whether everyone reads everything, in one round, rather than that each reduces a share."""
    if not 0 < size <= area:
        return False
    if group.size == 2:
        return True
    if not group.hosts:
        return size <= _NEAR_DIRECT_BYTES
    return _direct(group, size) <= min(_shared(group, size), _chain(group, size))


def chain_is_faster(group: Group, size: int) -> bool:
    """Whether sums go from host to host, rather than that everyone sends to everyone."""
    return len(group.by_host) > 1 and _chain(group, size) < _shared(group, size)


def chain_scatters_faster(group: Group, size: int) -> bool:
    """For a reduce_scatter of `size` bytes a worker: the same, rather than that each sends everyone its block."""
    if len(group.by_host) < 2:
        return False
    far = group.size - _each(group)
    flat = NETWORK.latency + far * NETWORK.message + _each(group) * size * far / group.size / NETWORK.bandwidth
    return _chain(group, size) < flat


def _each(group: Group) -> int:
    """How many of the group's workers share a host's connection."""
    return max(1, group.size // (len(group.hosts) + 1))


def _direct(group: Group, size: int) -> float:
    others = len(group.hosts)
    return NETWORK.latency + others * NETWORK.message + _each(group) * others * size / NETWORK.bandwidth


def _shared(group: Group, size: int) -> float:
    """Two rounds: a share of the input to each worker, and a share of the result to each host."""
    others, far = len(group.hosts), group.size - _each(group)
    sent = _each(group) * size * far / group.size + others * size / (others + 1)
    return 2 * (NETWORK.latency + others * NETWORK.message) + far * NETWORK.message + sent / NETWORK.bandwidth


def _chain(group: Group, size: int) -> float:
    """A host's sums go to the next, and the last host's to all."""
    if len(group.by_host) < 2:
        return float("inf")
    hosts = len(group.by_host)
    return (
        hosts * (NETWORK.latency + NETWORK.message)
        + hosts * NETWORK.message
        + max(1, hosts - 1) * size / NETWORK.bandwidth
    )
