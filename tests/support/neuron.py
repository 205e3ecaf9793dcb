"""AWS Neuron in tests: its libraries are stood in for by those under tests/support/neuron_stand_in."""

from __future__ import annotations

import json

from scripts.common.settings import ROOT
from tests.support.stack import TestStack


def on_neuron(stack: TestStack) -> TestStack:
    """The stack, as if it were on a machine with NeuronCores."""
    stack.environment |= {
        "PROFILE": "neuron",
        "NEURON_DEVICES": "8",
        "PYTHONPATH": str(ROOT / "tests/support/neuron_stand_in"),
        "NEURON_STAND_IN_LOG": str(stack.folder / "neuron.jsonl"),
    }
    return stack


def seen(stack: TestStack, event: str) -> list[dict]:
    """What the libraries were asked for, in the order in which they were."""
    log = stack.folder / "neuron.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [each for each in map(json.loads, lines) if each["event"] == event]
