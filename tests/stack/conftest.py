"""Stacks that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stacks import TestStack, bring_up, filled_stack, stacks

# Modules that take minutes. They start first, so that no worker of xdist is left with one of them at the end.
SLOWEST = (
    *("test_comparison", "test_lifecycle", "test_tasks", "test_dashboards", "test_neuron_embedding", "test_tune"),
    *("test_neuron", "test_switching", "test_neuron_language"),
)
# Ends only what hangs. A busy machine may need ten times as long as an idle one.
HANGS = pytest.mark.timeout(1200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(HANGS)


@pytest.fixture(scope="module")
def new_stack() -> Iterator:
    """Return a function that makes stacks. They end with the module: memory cannot hold those of all modules."""
    with stacks(filled_stack) as create:
        yield create


@pytest.fixture(scope="session")
def stack() -> Iterator[TestStack]:
    """Start one stack for all tests that do not change it."""
    with stacks(filled_stack) as create:
        yield bring_up(create())
