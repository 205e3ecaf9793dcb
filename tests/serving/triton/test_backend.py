"""The base class of all backends keeps one wrong request from the others, and reports its counters."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from types import ModuleType
from typing import ClassVar

import numpy as np
import psutil
import pytest

from serving.triton.types import BadRequest, Busy, ConfigError
from tests.support.python_backend import InferenceRequest, instance_args, parameters


@pytest.fixture(scope="module")
def backend(pb_utils) -> ModuleType:
    return importlib.import_module("serving.triton.backend")


@pytest.fixture
def doubler(backend):
    """Return a model that doubles `x`, refuses 13 when it reads it, fails on 0 and is busy at 99."""

    class Doubler(backend.BatchBackend):
        counters = ("runs",)

        def set_up(self, config, args):
            self.batches = []

        def prepare(self, request):
            x = int(backend.responses.input_tensor(request, "x"))
            if x == 13:
                raise BadRequest("input 'x' must not be 13")
            return x

        def run_batch(self, jobs):
            self.batches.append(jobs)
            self.metrics.add(runs=1)
            if 0 in jobs:
                raise ZeroDivisionError("x is 0")
            return [Busy("try again later") if x == 99 else {"twice": np.array(2 * x), "x": np.array(x)} for x in jobs]

    gc.set_threshold(*backend.LOADING_THRESHOLDS)
    model = Doubler()
    model.initialize(instance_args(""))
    yield model
    model.finalize()


def results(model, *numbers: int) -> list:
    responses = model.execute([InferenceRequest(["twice"], x=x) for x in numbers])
    return [response.error or response.outputs for response in responses]


def test_loaded_model_searches_for_unused_objects_as_python_does(doubler, backend):
    assert gc.get_threshold() == backend.SERVING_THRESHOLDS


def test_valid_requests_run_as_one_batch(doubler):
    assert results(doubler, 1, 2, 3) == [{"twice": 2}, {"twice": 4}, {"twice": 6}]
    assert doubler.batches == [[1, 2, 3]]


def test_refused_request_leaves_the_batch_before_it_runs(doubler):
    assert results(doubler, 1, 13, 3) == [{"twice": 2}, ("INVALID_ARG", "input 'x' must not be 13"), {"twice": 6}]
    assert doubler.batches == [[1, 3]]


def test_failed_batch_runs_each_request_alone(doubler):
    assert results(doubler, 1, 0, 3) == [{"twice": 2}, ("INTERNAL", "ZeroDivisionError: x is 0"), {"twice": 6}]
    assert doubler.batches == [[1, 0, 3], [1], [0], [3]]


def test_result_may_be_an_error(doubler):
    assert results(doubler, 99, 1) == [("UNAVAILABLE", "try again later"), {"twice": 2}]


def test_missing_input_is_a_bad_request(doubler):
    (response,) = doubler.execute([InferenceRequest(["twice"], y=1)])
    assert response.error == ("INVALID_ARG", "input 'x' is missing")


def test_last_counts_are_sent_when_the_model_is_unloaded(doubler, pb_utils):
    before = pb_utils.metrics.get("transformers_runs_total", 0)
    results(doubler, 1)
    doubler.finalize()
    assert pb_utils.metrics["transformers_runs_total"] == before + 1
    assert pb_utils.metrics["transformers_memory_limit_bytes"] == 0


def test_own_memory_is_that_of_the_process_and_of_the_server(doubler, pb_utils):
    pb_utils.metrics["transformers_server_memory_bytes"] = 0
    ended = time.monotonic() + 60
    while not pb_utils.metrics["transformers_server_memory_bytes"] and time.monotonic() < ended:
        time.sleep(0.05)
    assert 0 < pb_utils.metrics["transformers_server_memory_bytes"] < psutil.Process(os.getppid()).memory_info().rss
    doubler.finalize()
    assert pb_utils.metrics["transformers_server_memory_bytes"] == 0


def test_task_parameter_chooses_the_class(backend, doubler, monkeypatch):
    served = ModuleType("served")
    served.Doubler = type(doubler)
    monkeypatch.setitem(sys.modules, "served", served)

    class Tasks(backend.TaskBackend):
        tasks: ClassVar = {"double": ("served", "Doubler")}
        default_task = "double"

    model = Tasks()
    model.initialize(instance_args(""))
    assert results(model, 4) == [{"twice": 8}]
    model.finalize()
    with pytest.raises(ConfigError, match="parameter 'task' must be one of double, not 'triple'"):
        model.initialize(instance_args("", parameters(task="triple")))
