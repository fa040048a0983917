"""Links between workers. Apart from machines, for it is all of costs that workers load, to choose algorithms by."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """What connects workers.

    `bandwidth`  bytes a second in one direction
    `latency`    seconds from the first byte's sending until a waiting peer goes on
    `message`    seconds of a sender for each message
    """

    bandwidth: float
    latency: float
    message: float = 0.0

    def slower(self, times: float) -> Link:
        """One on which all takes so many times as long."""
        return Link(self.bandwidth / times, self.latency * times, self.message * times)


NETWORK = Link(bandwidth=1.2e9, latency=120e-6, message=40e-6)
"""Between hosts, all of whose workers share it. Of the tcp transport, rounded up from what `python -m benchmarks
transports` prints on a quiet machine (a signal there and back in 54 µs, 2.0 GB/s over loopback): workers compute
meanwhile, and networks are slower."""
