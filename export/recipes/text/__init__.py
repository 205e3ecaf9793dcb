"""Encoders of texts."""
