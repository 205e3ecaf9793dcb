"""Run test stacks on AWS Neuron, with the stand-ins of its libraries in tests/support/neuron_stand_in."""

from __future__ import annotations

import json

from tests.support.stacks import TestStack
from triton_transformers.settings import ROOT


def on_neuron(stack: TestStack) -> TestStack:
    """Configure the stack as if its machine had NeuronCores."""
    stack.environment |= {
        "PROFILE": "neuron",
        "NEURON_DEVICES": "8",
        "PYTHONPATH": str(ROOT / "tests/support/neuron_stand_in"),
        "NEURON_STAND_IN_LOG": str(stack.folder / "neuron.jsonl"),
    }
    return stack


def logged(stack: TestStack, event: str) -> list[dict]:
    """Return the calls of one kind that the stand-ins of the libraries logged, in their order."""
    log = stack.folder / "neuron.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [call for call in map(json.loads, lines) if call["event"] == event]
