"""The committed dashboards and their panels."""

from __future__ import annotations

import pytest

from monitoring.__main__ import FOLDER
from monitoring.drawing.evaluate import load

ALL = {path.relative_to(FOLDER).with_suffix("").as_posix(): load(path) for path in sorted(FOLDER.rglob("*.json"))}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']} ({panel['type']})")
    for name, dashboard in ALL.items()
    for panel in dashboard["panels"]
]
