"""Test the knobs of a system, and the configurations that follow from them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loadtest.tune.knobs import Candidate, all_knobs, changed_fields, configure
from loadtest.tune.running_server import differs
from loadtest.tune.search import CandidateFailed, Log, Measured
from triton_transformers.settings import UserError

ENSEMBLE = {
    "name": "embedding",
    "max_batch_size": 64,
    "ensemble_scheduling": {"step": [{"model_name": "tokenizer"}, {"model_name": "encoder"}]},
}
TOKENIZER = {
    "name": "tokenizer",
    "backend": "tokenizer",
    "max_batch_size": 64,
    "input": [{"name": "input_text"}],
    "dynamic_batching": {},
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
}
ENCODER = {
    "name": "encoder",
    "backend": "packed_onnx",
    "max_batch_size": 64,
    "input": [{"name": "input_ids"}],
    "dynamic_batching": {"preferred_batch_size": [64]},
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
    "parameters": {"intra_op_thread_count": {"string_value": "0"}},
}
SYSTEM = {"embedding": ENSEMBLE, "tokenizer": TOKENIZER, "encoder": ENCODER}
COMPILED = {"parameters": {"NEURON_CORE_START_INDEX": {"string_value": "0"}}}
GENERATING = {
    "name": "gpt",
    "max_batch_size": 0,
    "input": [{"name": "prompt"}, {"name": "max_new_tokens"}],
    "parameters": {"max_batch": {"string_value": "16"}},
}


def knobs_of(configs, cores=2, engines=None):
    knobs = all_knobs(configs, cores, engines or {})
    return {(knob.model, knob.name): knob for knob in knobs}


def with_one(configs, model, name, value, **options):
    knobs = knobs_of(configs, **options)
    candidate = Candidate().with_value(knobs[model, name], value)
    return configure(configs, list(knobs.values()), candidate)


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({}, "max_batch_size", (64, 8, 16, 32, 128)),
        ({"max_batch_size": 1}, "max_batch_size", (1, 4, 8, 16, 32)),
        ({"max_batch_size": 128}, "max_batch_size", (128, 8, 16, 32, 64)),
        ({"max_batch_size": 20}, "max_batch_size", (20, 8, 16, 32, 64)),
        ({}, "instances", ("1 x 2 threads", "2 x 1 threads", "2 x 2 threads", "1 x 1 threads")),
        ({"instance_group": [{"kind": "KIND_GPU", "count": 1}]}, "instances", (1, 2, 4)),
        ({"backend": "tokenizer"}, "instances", (1, 2)),
        ({}, "dynamic_batching", ("on", "off")),
        (COMPILED, "dynamic_batching", ("on", "off")),
    ],
)
def test_present_value_comes_first_and_others_surround_it(changes, name, values):
    knobs = knobs_of({"embedding": ENSEMBLE, "encoder": ENCODER | changes})
    assert knobs["encoder", name].values == values
    assert {model for model, _ in knobs} == {"encoder"}
    assert changes is not COMPILED or len(knobs) == 2  # it keeps its cores and its batch


def test_smaller_step_limits_its_ensemble_and_a_larger_one_leaves_it():
    configs = with_one(SYSTEM, "encoder", "max_batch_size", 16)
    assert (configs["encoder"]["max_batch_size"], configs["embedding"]["max_batch_size"]) == (16, 16)
    assert configs["encoder"]["dynamic_batching"]["preferred_batch_size"] == []
    assert configs["tokenizer"] == TOKENIZER
    configs = with_one(SYSTEM, "encoder", "max_batch_size", 128)
    assert (configs["encoder"]["max_batch_size"], configs["embedding"]["max_batch_size"]) == (128, 64)


@pytest.mark.parametrize(("preferred", "kept"), [([4], []), ([2], [2]), ([2, 4], [2, 4])])
def test_larger_batches_do_not_end_at_the_former_maximum(preferred, kept):
    """Triton prefers batches of max_batch_size, here 4, if the file prefers nothing."""
    encoder = ENCODER | {"max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": preferred}}
    changed = with_one({"encoder": encoder}, "encoder", "max_batch_size", 32)["encoder"]
    assert changed["dynamic_batching"]["preferred_batch_size"] == kept


def test_knobs_change_only_their_fields():
    encoder = with_one(SYSTEM, "encoder", "instances", "2 x 1 threads")["encoder"]
    assert encoder["instance_group"] == [{"kind": "KIND_CPU", "count": 2}]
    assert encoder["parameters"] == {"intra_op_thread_count": {"string_value": "1"}}
    alone = {key: value for key, value in ENCODER.items() if key != "dynamic_batching"}
    assert with_one({"encoder": alone}, "encoder", "max_queue_delay_microseconds", 2000)["encoder"] == alone
    assert "dynamic_batching" in with_one({"encoder": alone}, "encoder", "dynamic_batching", "on")["encoder"]
    assert list(knobs_of({"gpt": GENERATING})) == [("gpt", "max_batch")]
    together = with_one({"gpt": GENERATING}, "gpt", "max_batch", 64)["gpt"]["parameters"]["max_batch"]
    assert together == {"string_value": "64"}


def test_engines_are_the_others_that_the_backend_knows():
    engines = {"encoder": "openvino bf16"}
    knob = knobs_of(SYSTEM, engines=engines)["encoder", "engine"]
    assert knob.values == ("openvino-bf16", "onnxruntime", "openvino-f32")
    changed = with_one(SYSTEM, "encoder", "engine", "onnxruntime", engines=engines)["encoder"]
    assert changed["parameters"]["engine"] == {"string_value": "onnxruntime"}
    assert ("encoder", "engine") not in knobs_of(SYSTEM)
    f32 = ENCODER | {"parameters": {"precision": {"string_value": "f32"}}}
    assert (
        "openvino-bf16"
        not in knobs_of({"encoder": f32}, engines={"encoder": "onnxruntime f32"})["encoder", "engine"].values
    )


def test_changed_fields_are_only_those():
    after = ENCODER | {"max_batch_size": 8, "parameters": {**ENCODER["parameters"], "engine": {"string_value": "x"}}}
    assert changed_fields(ENCODER, after) == {"max_batch_size": 8, "parameters": {"engine": {"string_value": "x"}}}
    without = {key: value for key, value in ENCODER.items() if key != "dynamic_batching"}
    assert changed_fields(ENCODER, without) == {"dynamic_batching": None}


def test_candidate_with_the_original_value_has_no_change():
    knobs = knobs_of(SYSTEM)
    knob = knobs["encoder", "max_batch_size"]
    candidate = Candidate().with_value(knob, 8)
    assert candidate.label == "encoder: max_batch_size 8"
    assert candidate.with_value(knob, 64) == Candidate()


ONE = Candidate((("encoder", "max_batch_size", 8),))


def measure_all(log, candidates):
    values = []
    for candidate in candidates:
        try:
            values.append(log.measure(candidate, None, 0).value)
        except CandidateFailed as error:
            values.append(str(error))
    return values


def test_stopped_search_is_replayed_and_goes_on(tmp_path):
    measured = []

    def measure(candidate, *_):
        measured.append(candidate)
        if candidate == ONE:
            raise CandidateFailed("no memory")
        return Measured(float(len(measured)), [(1.0, None)])

    path = tmp_path / "log.json"
    assert measure_all(Log(path, {"goal": 1}, measure), [Candidate(), ONE]) == [1.0, "no memory"]
    again = Log(path, {"goal": 1}, measure)
    again.resume()
    assert measure_all(again, [Candidate(), ONE, Candidate()]) == [1.0, "no memory", 3.0]
    assert len(measured) == 3
    assert len(json.loads(path.read_text())["measurements"]) == 3


def test_resumed_search_keeps_the_order_of_its_knobs(tmp_path):
    path, knobs = tmp_path / "log.json", list(knobs_of(SYSTEM).values())
    log = Log(path, {}, lambda *_: Measured(1.0, []), lambda knobs: knobs[::-1])
    assert log.order(knobs) == knobs[::-1]
    measure_all(log, [Candidate()])
    again = Log(path, {}, lambda *_: Measured(1.0, []))
    again.resume()
    assert again.order(knobs) == knobs[::-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"log\.json cannot be read; leave RESUME out") for text in ("{", "[]", "{}", '{"subject": {}}')),
        ('{"subject": {"goal": 2}, "knobs": [], "measurements": []}', "another goal"),
        (None, "no search was stopped"),
    ],
)
def test_log_of_no_such_search_is_an_error(tmp_path, text, message):
    path = tmp_path / "log.json"
    if text:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        Log(path, {"goal": 1}, None).resume()


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (np.eye(2), np.eye(2), ""),
        (np.array([[1.0, 0.001], [0.0, 1.0]]), np.eye(2), ""),
        (np.array([[1.0, 0.1], [0.0, 1.0]]), np.eye(2), "cosine"),
        (np.array([[1.0, 0.0], [0.0, 1.1]]), np.eye(2), "differs by 10.0%"),
        (np.array([[1.0, np.nan], [0.0, 1.0]]), np.eye(2), "cosine"),
        (np.array([[1.0, 0.0]]), np.eye(2), "shape"),
        (None, np.eye(2), "shape"),
        # Numbers in one row are one vector.
        (np.array([1.0, -1e-7]), np.array([1.0, 1e-7]), ""),
        (np.array([1.0, 0.1]), np.array([1.0, 0.0]), "cosine"),
        (np.array([b"a"], object), np.array([b"a"], object), ""),
        (np.array([b"b"], object), np.array([b"a"], object), "has another value"),
    ],
)
def test_answers_agree_within_the_limits(actual, expected, reason):
    assert reason in differs(actual, expected)
    assert bool(reason) == bool(differs(actual, expected))
