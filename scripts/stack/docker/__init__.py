"""The runtime with Docker."""
