"""The committed dashboards and their panels."""

from __future__ import annotations

import pytest

from monitoring.__main__ import FOLDER
from monitoring.drawing.evaluate import load, rows

ALL = {path.relative_to(FOLDER).with_suffix("").as_posix(): load(path) for path in sorted(FOLDER.rglob("*.json"))}


def panels_of(dashboard: dict) -> list[dict]:
    """Return the panels of all rows."""
    return [panel for _, panels in rows(dashboard) for panel in panels]


PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']} ({panel['type']})")
    for name, dashboard in ALL.items()
    for panel in panels_of(dashboard)
]
