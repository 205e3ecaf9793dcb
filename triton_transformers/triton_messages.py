"""Triton's own sentences, as the releases 2.51 to 2.72 write them: no other file of ours knows their words."""

from __future__ import annotations

import re

_STACK_TRACE = re.compile(r"\s*At:\n.*?(\n\s*;|$)", re.DOTALL)
_PREFIX = re.compile(r"^((in ensemble '[^']*', )|(\[request id: [^]]*\] ))+")
_NO_SERVER = r"connections to all backends failing|failed to connect"  # gRPC's
_CRASHED = r"Stub process .* is not healthy"
_OUTAGE = re.compile(rf"{_NO_SERVER}|{_CRASHED}|Server is stopping")
_NOT_REPORTED = re.compile(r"is not healthy|health mutex")
_NO_SHARED_MEMORY = re.compile(r"shared memory (key|pool).*No space left on device", re.DOTALL)
_WRONG_TENSOR = re.compile(r"unexpected (shape|data ?type|datatype|inference input)|input '")


def reason(message: str) -> str:
    """Return the message without the stack trace that the Python backend appends."""
    return _STACK_TRACE.sub("", message).strip().rstrip(";").strip()


def own_message(message: str) -> str:
    """Return the message of a model, without what Triton writes around it: ensembles, the request's id, a trace."""
    return _PREFIX.sub("", reason(message))


def is_outage(message: str) -> bool:
    """Return whether no server listens, it ends, or the process of a model crashed."""
    return bool(_OUTAGE.search(message))


def is_unreported(message: str) -> bool:
    """Return whether a Python process did not report in time, as happens on a busy machine: Triton waits for 1 s."""
    return bool(_NOT_REPORTED.search(message))


def is_full_memory(message: str) -> bool:
    """Return whether /dev/shm is full."""
    return bool(_NO_SHARED_MEMORY.search(message))


def is_unreadable_model(message: str) -> bool:
    """Return whether a model's folder cannot be read. The message has no reason: see `polling_error`."""
    return "failed to poll" in message


def polling_error(log: str, model: str) -> str:
    """Return what Triton logged last about the model's folder, or nothing."""
    poll = rf"(?:ModelConfig: (.*)\n)?.*Poll failed for model directory '{re.escape(model)}': (.*)\""
    errors = re.findall(poll, log)
    return ": ".join(filter(None, reversed(errors[-1]))) if errors else ""


def is_crash(message: str) -> bool:
    """Return whether the process of a called model crashed."""
    return "is not healthy" in message


def is_starting(message: str) -> bool:
    """Return whether the server still starts, so that it loads no model on request."""
    return "Server not ready" in message


def is_not_ready(message: str) -> bool:
    """Return whether a called model is not loaded."""
    return "is not ready" in message


def is_unknown_model(message: str) -> bool:
    return "unknown model" in message


def is_wrong_tensor(message: str) -> bool:
    """Return whether the request has a tensor that the model's configuration does not allow."""
    return bool(_WRONG_TENSOR.search(message))


def is_too_large_batch(message: str) -> bool:
    return "batch-size must be" in message


def is_restricted(message: str) -> bool:
    """Return whether the request lacks the key of a restricted protocol."""
    return "restricted" in message
