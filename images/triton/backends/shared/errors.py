"""The ways in which a backend says no."""


class ConfigError(ValueError):
    """A model that cannot be served as its config.pbtxt asks. Triton shows the message as the reason."""


class Busy(RuntimeError):
    """More than is kept waiting: a 503."""


class BadRequest(ValueError):
    """The request's own fault: a 400. The message names the input and never quotes what was in it."""
