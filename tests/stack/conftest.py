"""Stacks that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stacks import TestStack, bring_up, filled_stack, stacks

# Modules that take minutes. They start first, so that no worker of xdist is left with one of them at the end.
SLOWEST = ("test_comparison", "test_switching", "test_neuron_embedding", "test_lifecycle", "test_neuron")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


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
