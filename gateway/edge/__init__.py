"""The door itself: HTTP, keys, limits, bodies, streams and outages. It knows no API."""
