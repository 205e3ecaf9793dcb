"""The requests that the fuzzer makes: a seed repeats them, and none is one of those that crash Triton."""

from __future__ import annotations

from random import Random

import pytest

from tests.support import fuzz

CONFIG = {
    "name": "model",
    "max_batch_size": 8,
    "input": [{"name": "ids", "data_type": "TYPE_INT64", "dims": ["-1"]}],
    "output": [{"name": "row", "data_type": "TYPE_FP32"}, {"name": "label", "data_type": "TYPE_STRING"}],
}
CONFIGS = {"model": CONFIG}


@pytest.mark.parametrize("number", range(50))
def test_seed_repeats_its_request(number):
    def requests() -> list[fuzz.Request]:
        rng = Random(number)
        gateway = fuzz.gateway_http(rng, [("/v1/embeddings", {"model": "embedding", "input": fuzz.TEXTS})], 100)
        return [fuzz.triton_http(rng, CONFIGS, 100), fuzz.triton_grpc(rng, CONFIGS), gateway]

    assert requests() == requests()


@pytest.mark.parametrize("shape", [[2**62, 1], [2**64 - 1, 1], [2**31, 1], [2**32, 2**31], [2**21]])
def test_shape_of_numbers_that_crashes_triton_is_replaced(shape):
    tree = {"inputs": [{"name": "ids", "shape": shape, "datatype": "INT64", "data": [1]}]}
    assert fuzz.without_crash(tree)["inputs"][0]["shape"] == [fuzz.LARGEST_CLAIM]


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [
        ("BYTES", [2**62, 1]),
        ("INT64", [2**32, 2**32]),
        ("INT64", [0]),
        ("INT64", [-1, 1]),
        ("INT64", "x"),
        ("", [2**31]),
    ],
)
def test_other_shape_stays(datatype, shape):
    tree = {"inputs": [{"shape": shape, "datatype": datatype}, "x", None]}
    assert fuzz.without_crash(tree)["inputs"][0]["shape"] == shape


def test_no_class_of_texts_is_asked_for():
    parameters = [
        output.name
        for number in range(2000)
        for output in fuzz.infer_message(Random(number), CONFIG).outputs
        if "classification" in output.parameters
    ]
    assert parameters
    assert "label" not in parameters
