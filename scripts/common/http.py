"""HTTP to this stack's own servers."""

from __future__ import annotations

import urllib.request

# A company's proxy must not see requests to this stack's own servers.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str) -> bool:
    """Return whether the URL answers with success within two seconds."""
    try:
        with opener.open(url, timeout=2):
            return True
    except OSError:
        return False
