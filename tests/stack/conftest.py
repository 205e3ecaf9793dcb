"""Stacks that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stacks import TestStack, bring_up, filled_stack, stacks


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
