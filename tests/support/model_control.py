"""Stand in for Triton's model control: systems with their steps, loads that fail, and the calls that came."""

from __future__ import annotations

from triton_transformers.triton import TritonError

READY = ("READY", "")


class ControlledModels:
    """A Triton with no model. The loads of a system fail with its `failures`, one after the other."""

    def __init__(self, steps: dict[str, list[str]] | None = None, **failures: list[Exception]) -> None:
        self.steps = steps or {}
        self.failures = failures
        self.states: dict[str, tuple[str, str]] = {}
        self.calls: list[tuple[str, str]] = []

    @property
    def loads(self) -> list[str]:
        return [name for call, name in self.calls if call == "load"]

    def live(self) -> bool:
        return True

    def index(self) -> dict[str, tuple[str, str]]:
        return self.states

    def composing(self, name: str) -> dict[str, dict]:
        if self.states.get(name) != READY:
            raise TritonError(f"unknown model {name}", 404)
        return {model: {} for model in [name, *self.steps.get(name, [])]}

    def load(self, name: str, timeout: int = 0) -> None:
        self.calls.append(("load", name))
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        self.states = {model: state for model, state in self.states.items() if state[0] != "LOADING"} | {name: READY}

    def unload(self, name: str) -> None:
        self.calls.append(("unload", name))
        self.states.pop(name, None)
