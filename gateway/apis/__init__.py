"""Translate the requests of each API; each file lists its routes."""
