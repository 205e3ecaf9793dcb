"""PyTorch's own sentences, as release 2.13 writes them: no other file of ours knows their words."""

from __future__ import annotations

import re

_OF_STATE = re.compile("memory|CUDA|cuDNN|CUBLAS", re.IGNORECASE)
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def is_of_state(message: str) -> bool:
    """Return whether a RuntimeError comes from the server's state, not from a request: PyTorch raises it for both."""
    return bool(_OF_STATE.search(message))


def is_out_of_memory(message: str) -> bool:
    return "memory" in message


def refused_global(message: str) -> str:
    """Return the name in a pickle that PyTorch did not load, because it is code; nothing if that was not the reason."""
    match = _GLOBAL.search(message)
    return match[1] if match else ""
