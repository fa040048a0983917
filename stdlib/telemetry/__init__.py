"""`monarch.telemetry`: the events of all hosts, as tables that SQL reads, and for OpenTelemetry and Prometheus."""
