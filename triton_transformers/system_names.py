"""Names of systems, and the files that list them."""

from __future__ import annotations

import re
from pathlib import Path

# Names become folders, arguments on command lines, and parts of URLs.
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


def listed_names(path: Path) -> list[str] | None:
    """Return the names that a file lists; None if there is no such file, or if it has anything but names.

    A crash of the machine or a full disk may leave any bytes in it.
    """
    try:
        names = path.read_text(encoding="utf-8").split()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return None
    return names if all(map(NAME.fullmatch, names)) else None
