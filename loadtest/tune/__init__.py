"""make tune: find the fastest configuration for a latency target on the running server."""
