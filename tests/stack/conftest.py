"""The stack that the tests share, and stacks of a module's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scheduling import Scheduler
from tests.support.stacks import TestStack, bring_up, filled_stack, stacks
from triton_transformers.settings import ROOT

GRAFANA = ROOT / "tests/docker/stand-ins/grafana/grafana_stand_in.py"
# The modules of the shared stack. One worker runs them, one after the other: they load models and change
# configurations. The alerts of test_dashboards must not fire for what other modules did before.
SHARED = (
    *("test_dashboards", "test_clients", "test_embedding", "test_gateway", "test_generation", "test_gpt2"),
    *("test_onnx_backends", "test_tasks", "test_tools", "test_adapters", "test_structured_output", "test_chat"),
)
# Another worker runs these on a stack of its own. The first four share tests/support/served_pipelines.py.
LONG = (
    *("test_pipelines", "test_huggingface", "test_gateway_page", "test_openai_audio", "test_vision"),
    "test_vision_language",
)
# The modules that use the fixture `stack` below.
STACK_MODULES = (*SHARED, *LONG)
STACK = pytest.StashKey[TestStack]()
# Modules that take minutes start first, so that no worker is left with one of them at the end.
ORDER = (*STACK_MODULES, "test_comparison", "test_lifecycle", "test_drill", "test_neuron_embedding", "test_tune")
# Ends only what hangs. A busy machine may need ten times as long as an idle one.
HANGS = pytest.mark.timeout(1200)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log, dict.fromkeys(SHARED, "shared") | dict.fromkeys(LONG, "long"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(HANGS)
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the worker's stack after the last module that uses it: an idle one takes a tenth of a core."""
    leaves = nextitem and item.path.stem in STACK_MODULES and nextitem.path.stem not in STACK_MODULES
    if leaves and (stack := item.config.stash.get(STACK, None)):
        del item.config.stash[STACK]
        down = stack.make("down")
        assert down.returncode == 0, down.stdout + down.stderr


@pytest.fixture(scope="module")
def new_stack() -> Iterator:
    """Return a function that makes stacks. They end with the module: memory cannot hold those of all modules."""
    with stacks(filled_stack) as create:
        yield create


@pytest.fixture(scope="session")
def stack(grafana_home, pytestconfig) -> Iterator[TestStack]:
    """Start one stack for all tests that leave the server as it was. `serve` changes which systems it serves."""
    with stacks(filled_stack) as create:
        stack = create()
        stack.environment |= {
            "API_KEYS": f"another-key-for-clients {stack.client_key}",
            "GATEWAY_IN_FLIGHT": "32",
            "GRAFANA_HOME": str(grafana_home),
        }
        pytestconfig.stash[STACK] = stack
        yield bring_up(stack)


@pytest.fixture(scope="module")
def openai(client_packages: None) -> ModuleType:
    return importlib.import_module("openai")


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
