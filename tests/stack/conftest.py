"""Stacks that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stacks import TestStack, brought_up, filled, stacks


@pytest.fixture(scope="module")
def new_stack() -> Iterator:
    """Give a function that makes stacks. They end with the module: memory does not hold those of all modules."""
    with stacks(filled) as make_one:
        yield make_one


@pytest.fixture(scope="session")
def stack() -> Iterator[TestStack]:
    """Start one stack for all tests that leave it as it was."""
    with stacks(filled) as make_one:
        yield brought_up(make_one())
