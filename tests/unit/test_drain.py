"""The order in which drain.py unloads models, and how long it waits; a stand-in for Triton's model control."""

from __future__ import annotations

import sys

import drain
import pytest
from watchdog.tritonserver import Triton


class StandIn(Triton):
    """A Triton with loaded models. An unload takes three looks at the index."""

    def __init__(self, **configs: dict) -> None:
        self.configs = configs
        self.states = dict.fromkeys(configs, "READY")
        self.looks = dict.fromkeys(configs, 3)
        self.unloaded: list[str] = []

    def call(self, path: str, body: object = None) -> object:
        *_, model, action = path.split("/")
        if action == "config":
            return self.configs[model]
        if action == "unload":
            assert "UNLOADING" not in {self.states[caller] for caller in self.callers(model)}
            self.states[model] = "UNLOADING"
            self.unloaded.append(model)
        for name, state in self.states.items():
            self.looks[name] -= state == "UNLOADING"
            if self.looks[name] < 0:
                self.states[name] = "UNAVAILABLE"
        return [{"name": name, "state": state} for name, state in self.states.items()]

    def callers(self, model: str) -> list[str]:
        return [name for name, config in self.configs.items() if model in str(config)]


def ensemble(*steps: str) -> dict:
    return {"ensemble_scheduling": {"step": [{"model_name": step} for step in steps]}}


def test_caller_is_unloaded_before_the_models_that_it_calls():
    triton = StandIn(
        step=ensemble(),
        inner=ensemble("step"),
        outer=ensemble("inner", "other"),
        other={},
        generate={"parameters": {"model": {"string_value": "step"}}},
        free={"parameters": {"model": {"string_value": "/a/folder"}}},
    )
    drain.drain(triton)
    assert sorted(triton.unloaded) == sorted(triton.configs)
    order = triton.unloaded.index
    assert order("outer") < order("inner") < order("step")
    assert order("outer") < order("other")
    assert order("generate") < order("step")


def test_model_that_names_itself_is_unloaded():
    triton = StandIn(echo={"parameters": {"model": {"string_value": "echo"}}})
    drain.drain(triton)
    assert triton.unloaded == ["echo"]


def test_server_that_does_not_answer_is_one_sentence(monkeypatch):
    monkeypatch.setenv("BIND_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("TRITON_HTTP_PORT", "9")
    monkeypatch.setenv("TRITON_ADMIN_KEY", "a-key-of-the-tests")
    monkeypatch.setattr(sys, "argv", ["drain.py"])
    with pytest.raises(SystemExit, match=r"drain: Triton does not answer: .*refused"):
        drain.main()
