"""Errors that users see: as the reason why a model does not load, or as the response to a request."""


class ConfigError(ValueError):
    """Raised when a model cannot be served as its config.pbtxt asks; Triton reports the message."""


class Busy(RuntimeError):
    """Raised when too many requests wait: HTTP status 503."""


class BadRequest(ValueError):
    """Raised for a wrong request: HTTP status 400. The message names the input and never quotes its content."""
