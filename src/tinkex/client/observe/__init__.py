"""Observability of a running client: metrics, traces, telemetry, progress, logs."""
