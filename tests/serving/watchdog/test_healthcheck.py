"""A container of Triton: its health check, the wait for the models, and the order in which it unloads them."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter

import pytest

from export.record import Record
from serving.watchdog import drain, healthcheck
from serving.watchdog.wait_for_models import missing
from triton_transformers.triton import Triton, TritonError


class StandIn(Triton):
    """A Triton with an ensemble, a model of ONNX Runtime in C++, and two in Python with two processes each.

    `answers` has errors by the path. The model `unloads` goes after the first answer.
    """

    def __init__(self, unloaded: str = "", unloads: str = "", answers: dict[str, Exception] | None = None):
        self.backends = {"embedding": "", "encoder": "packed_onnx", "native": "onnxruntime_cpp", "tokenizer": "python"}
        self.unloaded, self.unloads, self.answers = unloaded, unloads, answers or {}

    def call(self, path: str, *arguments: object, **options: object) -> object:
        unloaded, self.unloaded = self.unloaded, self.unloaded or self.unloads
        if error := self.answers.get(path):
            raise error
        if path == "/v2/repository/index":
            return [{"name": name, "state": "UNAVAILABLE" if name == unloaded else "READY"} for name in self.backends]
        if path.endswith("/ready"):
            return None
        return {"backend": self.backends[path.split("/")[3]], "instance_group": [{"count": 2}]}


CONFIG, IS_READY = "/v2/models/encoder/config", "/v2/models/encoder/ready"
GONE = TritonError("Request for unknown model: 'encoder' has no available versions", 400)


@pytest.fixture
def short(tmp_path, monkeypatch):
    (tmp_path / "packed_onnx").mkdir()
    (tmp_path / "packed_onnx/model.py").touch()
    monkeypatch.setattr(healthcheck, "BACKENDS", tmp_path)
    return healthcheck.short_of_processes


@pytest.fixture
def check(short, monkeypatch):
    """Return a function that runs the check against a stand-in."""
    # pytest's own timeout needs the alarm.
    monkeypatch.setattr(signal, "alarm", lambda _: 0)
    before = signal.getsignal(signal.SIGALRM)

    def run(triton: StandIn) -> None:
        monkeypatch.setattr(healthcheck, "client", lambda: triton)
        healthcheck.main()

    yield run
    signal.signal(signal.SIGALRM, before)


def test_model_without_its_process_is_found(short):
    assert short(StandIn(), Counter(tokenizer=2, encoder=1)) == ["encoder"]
    assert short(StandIn(), Counter()) == ["encoder", "tokenizer"]


def test_models_with_all_processes_are_healthy(short):
    # A reload starts new processes beside the old ones.
    assert short(StandIn(), Counter(tokenizer=2, encoder=4)) == []


def test_model_that_is_not_loaded_needs_no_process(short):
    assert short(StandIn(unloaded="encoder"), Counter(tokenizer=2)) == []


def test_model_that_is_unloaded_during_the_check_needs_no_process(short):
    assert short(StandIn(unloads="encoder", answers={CONFIG: GONE}), Counter(tokenizer=2)) == []
    assert short(StandIn(unloads="encoder", answers={CONFIG: GONE}), Counter(tokenizer=1)) == ["tokenizer"]


def test_failed_request_is_named(check):
    with pytest.raises(SystemExit, match=r"^/v2/repository/index: encoder has no configuration"):
        check(StandIn(answers={CONFIG: TritonError("encoder has no configuration", 500)}))


def test_system_that_is_not_ready_is_named(check, monkeypatch):
    """Triton names no model about it."""
    monkeypatch.delenv("SYSTEMS_FILE", raising=False)
    monkeypatch.setenv("SYSTEMS", "embedding encoder")
    with pytest.raises(SystemExit, match=r"^/v2/models/encoder/ready: Model version not ready"):
        check(StandIn(answers={IS_READY: TritonError("Model version not ready", 400)}))


def test_timeout_is_reported(check, monkeypatch):
    monkeypatch.setattr(StandIn, "call", lambda *_: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(SystemExit, match=r"^not checked within 4 s"):
        check(StandIn())


def test_wait_ends_with_the_last_file_of_the_export(tmp_path):
    record = Record("embedding", (), "sentence-similarity", "onnx", "1", ("encoder/1/model.onnx",), "MiniLM", "1110a24")
    assert missing("embedding", tmp_path).endswith("embedding/1/assembled.json")
    record.unfinished(None).write(tmp_path)
    assert missing("embedding", tmp_path).endswith("embedding/1/assembled.json lists as unfinished")
    record.write(tmp_path)
    assert missing("embedding", tmp_path).endswith("encoder/1/model.onnx")
    (tmp_path / "encoder/1").mkdir(parents=True)
    (tmp_path / "encoder/1/model.onnx").touch()
    assert missing("embedding", tmp_path) == ""


def test_wait_reads_a_record_that_is_half_written(tmp_path):
    (tmp_path / "embedding/1").mkdir(parents=True)
    (tmp_path / "embedding/1/assembled.json").write_text(json.dumps({"recipe": "1"})[:-1])
    assert missing("embedding", tmp_path).endswith("assembled.json")


# --- the drain before SIGTERM ----------------------------------------------------------------------------------------


class UnloadedStandIn(Triton):
    """A Triton with loaded models. An unload takes three looks at the index."""

    def __init__(self, **configs: dict) -> None:
        self.configs = configs
        self.states = dict.fromkeys(configs, "READY")
        self.looks = dict.fromkeys(configs, 3)
        self.unloaded: list[str] = []

    def call(self, path: str, *arguments: object, **options: object) -> object:
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
    triton = UnloadedStandIn(
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
    triton = UnloadedStandIn(echo={"parameters": {"model": {"string_value": "echo"}}})
    drain.drain(triton)
    assert triton.unloaded == ["echo"]


def test_server_that_does_not_answer_is_one_sentence(monkeypatch):
    monkeypatch.setenv("BIND_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("TRITON_HTTP_PORT", "9")
    monkeypatch.setenv("TRITON_ADMIN_KEY", "a-key-of-the-tests")
    monkeypatch.setattr(sys, "argv", ["drain.py"])
    with pytest.raises(SystemExit, match=r"drain: http://127.0.0.1:9 does not answer: .*refused"):
        drain.main()


def test_drain_waits_until_the_last_model_is_unloaded():
    triton = UnloadedStandIn(step={}, outer=ensemble("step"))
    drain.drain(triton)
    assert set(triton.states.values()) == {"UNAVAILABLE"}
