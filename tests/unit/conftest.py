"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.python_backend import python_backend


@pytest.fixture(scope="module")
def pb_utils() -> Iterator[ModuleType]:
    with python_backend() as module:
        yield module


@pytest.fixture(scope="module")
def few_parity_texts() -> Iterator[None]:
    """Compare each model with few texts when it is assembled; the tests send texts of their own."""
    from scripts.models.exporters import text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PARITY_TEXTS", 1)
        yield
