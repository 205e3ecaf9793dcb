"""Distribute the tests among the workers of pytest-xdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class Scheduler(LoadFileScheduling):
    """Give a worker a whole module, or all modules of a group: `groups` maps modules to the names of their groups.

    pytest-xdist's own groups have no effect: it changes an attribute of the tests that pytest 9 does not read.
    """

    def __init__(self, config: pytest.Config, log: Any, groups: dict[str, str]) -> None:
        super().__init__(config, log)
        self.groups = groups

    def _split_scope(self, nodeid: str) -> str:
        module = Path(super()._split_scope(nodeid)).stem
        return self.groups.get(module, module)
