"""What a user can see of a running client: metrics, telemetry, progress, logs."""
