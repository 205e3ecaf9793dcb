"""Stacks that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import TestStack, brought_up, filled, stacks


@pytest.fixture(scope="module")
def new_stack() -> Iterator:
    """Of a module's tests: the machine has no room for those of all."""
    with stacks(filled) as make_one:
        yield make_one


@pytest.fixture(scope="session")
def stack() -> Iterator[TestStack]:
    """One that is up, shared by the tests that leave it as it was."""
    with stacks(filled) as make_one:
        yield brought_up(make_one())
