"""The world, for the tests of all APIs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.apis.world import World, running_world


@pytest.fixture(scope="module")
def running() -> Iterator[World]:
    with running_world() as world:
        yield world


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """Return the world without the requests of other tests. At the end no request may run, nor keep a slot."""
    running.triton.received.clear()
    running.triton.cancelled.clear()
    yield running
    running.gateway.wait_until(running.is_idle)
