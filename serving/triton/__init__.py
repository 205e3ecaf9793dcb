"""Triton's side of a backend: its classes, requests and responses, parameters, metrics, traces and processes."""
