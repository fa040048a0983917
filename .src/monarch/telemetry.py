"""What happens on all hosts, as tables that SQL reads: `monarch.telemetry.start()`, then `query("SELECT …")`.

The guide: docs/guide/telemetry.md.
"""

from __future__ import annotations

from monarch.runtime.actors.telemetry.meters import Meter, get_meter
from monarch.runtime.actors.telemetry.spans import span, traced
from monarch.stdlib.telemetry.session import TelemetryConfig, query, start, stop

__all__ = ["Meter", "TelemetryConfig", "get_meter", "query", "span", "start", "stop", "traced"]
