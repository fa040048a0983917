"""`monarch.actor.get_meter`: OpenTelemetry's instruments, whose numbers are rows of the table `metrics`.

The names and arguments are those of OpenTelemetry's API, which need not be installed. Instruments that are asked by
callbacks ("observable" ones) are not among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from monarch.compiler.execution.events import Metric, heard, tell

Attributes = Mapping[str, str | bool | int | float]


class Instrument:
    """The name of an instrument, and its unit."""

    kind = ""

    def __init__(self, name: str, unit: str = "", description: str = "") -> None:
        self.name, self.unit, self.description = name, unit, description

    def _tell(self, value: float, attributes: Attributes | None) -> None:
        if heard(Metric):
            text = json.dumps(dict(attributes), sort_keys=True) if attributes else "{}"
            tell(Metric(self.kind, self.name, float(value), self.unit, text))


class Counter(Instrument):
    """Counts up."""

    kind = "counter"

    def add(self, amount: float, attributes: Attributes | None = None, context: object = None) -> None:
        """Raises ValueError for an amount below 0, and for one that is not finite: the sum would never be a number
        again."""
        if not 0 <= amount < math.inf:
            raise ValueError(f"counter {self.name!r} counts up, and {amount} was added: take an up-down counter")
        self._tell(amount, attributes)


class UpDownCounter(Instrument):
    """Counts up and down."""

    kind = "up_down_counter"

    def add(self, amount: float, attributes: Attributes | None = None, context: object = None) -> None:
        self._tell(amount, attributes)


class Histogram(Instrument):
    """Takes numbers whose distribution matters."""

    kind = "histogram"

    def record(self, amount: float, attributes: Attributes | None = None, context: object = None) -> None:
        self._tell(amount, attributes)


class Gauge(Instrument):
    """Takes numbers of which the last one matters."""

    kind = "gauge"

    def set(self, amount: float, attributes: Attributes | None = None, context: object = None) -> None:
        self._tell(amount, attributes)


class Meter:
    """Makes instruments."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """`counter.add(1, {"kind": "hit"})`"""
        return Counter(name, unit, description)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """`counter.add(-1)`"""
        return UpDownCounter(name, unit, description)

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Histogram:
        """`histogram.record(0.2)`"""
        return Histogram(name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Gauge:
        """`gauge.set(0.2)`"""
        return Gauge(name, unit, description)


_METER = Meter()


def get_meter() -> Meter:
    """Makes instruments: `get_meter().create_counter("requests").add(1)`. Numbers are rows of the table `metrics` of
    `monarch.telemetry`; where that is off, they go nowhere."""
    return _METER
