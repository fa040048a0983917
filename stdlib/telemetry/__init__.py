"""`monarch.telemetry`: what happens on all hosts, as tables that SQL reads, and for OpenTelemetry and Prometheus."""
