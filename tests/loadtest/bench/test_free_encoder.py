"""The model of `make bench BENCH=requests` reads the texts of requests as text encoders do, and answers zeros."""

from __future__ import annotations

import importlib

import numpy as np

from export.check import served
from loadtest.bench.request_costs import write_model

ANSWER = "sentence_embedding"


def test_free_encoder_answers_a_row_for_each_text_and_refuses_what_is_no_text(tmp_path):
    write_model(tmp_path / "minilm")
    requests = [
        served.InferenceRequest({"input_text": np.array([[text] for text in texts], object)}, [ANSWER])
        for texts in ([b"a cat"], [b"a cat", b"a longer text about dogs", b"two"], [b"\xfe"])
    ]
    with served.python_backend():
        backend = importlib.import_module("loadtest.bench.free_encoder").TritonPythonModel()
        config = served.backend_config(tmp_path / "minilm/config.pbtxt")
        backend.initialize(served.instance_args(tmp_path / "minilm", config, "CPU"))
        first, second, refused = backend.execute(requests)
        backend.finalize()
    assert first.tensors[ANSWER].tolist() == [[0.0] * 384]
    assert second.tensors[ANSWER].tolist() == [[0.0] * 384] * 3
    assert "not valid UTF-8" in str(refused.error)
