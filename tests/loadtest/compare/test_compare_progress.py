"""A comparison tells other commands what it does, and for how long."""

from __future__ import annotations

import time

from loadtest.compare.compare import progress_bar


def test_progress_is_noted_with_the_seconds_that_are_left(monkeypatch):
    now, noted = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar(10, lambda doing, seconds: noted.append((doing, seconds))) as (show, _):
        for now[0], label, done in (
            (101.0, "none", 0),
            (103.0, "none", 0.3),
            (120.0, "dynamic", 2),
            (200.0, "none", 10),
        ):
            show(label, done)
    assert noted == [("none", None), ("none", None), ("dynamic", 80.0), ("none", 0.0)]
