"""The running stack: up, down, status, logs, smoke, generate."""
