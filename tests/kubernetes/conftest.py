"""The stack in a namespace of its own, under the load of 32 clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import WAIT_S, Cluster
from triton_transformers.settings import UserError


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Apply the overlay, and delete the namespace at the end."""
    try:
        cluster = Cluster(tmp_path_factory.mktemp("overlay"))
    except (UserError, AssertionError, FileNotFoundError) as error:
        pytest.exit(f"error: {error}", returncode=1)
    try:
        yield cluster
    finally:
        cluster.delete()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(2 * WAIT_S))
