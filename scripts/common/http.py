"""HTTP to this stack's own servers."""

from __future__ import annotations

import urllib.request

# A company's proxy is for the world outside.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str) -> bool:
    try:
        with opener.open(url, timeout=2):
            return True
    except OSError:
        return False
