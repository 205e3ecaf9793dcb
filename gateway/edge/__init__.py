"""Serve HTTP for every API: keys, limits, bodies, streams and outages."""
