"""Triton behind the gateway: the connection, what is served, and rows of requests."""
