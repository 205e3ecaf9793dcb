"""The stack that the tests share, and stacks of a module's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stacks import TestStack, bring_up, filled_stack, stacks
from triton_transformers.settings import ROOT

GRAFANA = ROOT / "tests/docker/stand-ins/grafana/grafana_stand_in.py"
SHARED = "shared stack"
# Groups that take minutes. They start first, so that no worker of xdist is left with one of them at the end.
SLOWEST = (
    *(SHARED, "test_comparison", "test_lifecycle", "test_tasks", "test_neuron_embedding", "test_tune", "test_neuron"),
    *("test_neuron_language", "test_switching"),
)
# Ends only what hangs. A busy machine may need ten times as long as an idle one.
HANGS = pytest.mark.timeout(1200)


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests of the shared stack to one worker, one after the other, and the others of a file to one."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
        if not item.get_closest_marker("timeout"):
            item.add_marker(HANGS)
    # The alerts of test_dashboards must not fire for what other modules did before.
    items.sort(key=lambda item: (rank(group(item)), item.path.stem != "test_dashboards"))


def group(item: pytest.Item) -> str:
    definitions = item._fixtureinfo.name2fixturedefs.get("stack", ())  # type: ignore[attr-defined]
    return SHARED if any(definition.scope == "session" for definition in definitions) else item.path.stem


def rank(name: str) -> int:
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


@pytest.fixture(scope="module")
def new_stack() -> Iterator:
    """Return a function that makes stacks. They end with the module: memory cannot hold those of all modules."""
    with stacks(filled_stack) as create:
        yield create


@pytest.fixture(scope="session")
def stack(grafana_home) -> Iterator[TestStack]:
    """Start one stack for all tests that leave the server as it was. `serve` changes which systems it serves."""
    with stacks(filled_stack) as create:
        stack = create()
        stack.environment |= {
            "API_KEYS": f"another-key-for-clients {stack.client_key}",
            "GATEWAY_IN_FLIGHT": "32",
            "GRAFANA_HOME": str(grafana_home),
        }
        yield bring_up(stack)


@pytest.fixture(scope="session")
def grafana_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a stand-in of Grafana."""
    binary = tmp_path_factory.mktemp("grafana") / "bin/grafana"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec python3 "{GRAFANA}" "$@"\n')
    binary.chmod(0o755)
    return binary.parents[1]


@pytest.fixture(scope="session")
def encoder_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the weights of systems that several modules serve: `make models` assembles each once."""
    from tests.support.checkpoints import encoders

    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "mood": encoders.save_bert(folder / "mood", "ForSequenceClassification", **encoders.labels(encoders.MOODS)),
        "reranker": encoders.save_cross_encoder(folder / "reranker"),
    }
