"""The ONNX backends on small graphs: types, batching, auto-completion, and errors per request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.support.batches import one_batch
from tests.support.stacks import TYPES
from triton_transformers.triton import TritonError, engines


@pytest.fixture(scope="module")
def loaded(stack):
    for model in ("alltypes", "fixed", "lookup", "tokens"):
        stack.triton.load(model)
    return stack


def infer(stack, model: str, tensors: dict[str, tuple[str, np.ndarray]], outputs: list[str] | None = None):
    inputs = []
    for name, (dtype, array) in tensors.items():
        inputs.append(httpclient.InferInput(name, list(array.shape), dtype))
        inputs[-1].set_data_from_numpy(array)
    client = httpclient.InferenceServerClient(stack.http.removeprefix("http://"))
    requested = outputs and [httpclient.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, inputs, outputs=requested)


def example(dtype: str, rows: int = 3) -> np.ndarray:
    if dtype == "BYTES":
        return np.array([["한국".encode(), b""], [b"x", b"tail\x00"], [b"1", b"2"]], np.object_)[:rows]
    return np.arange(rows * 2).reshape(rows, 2).astype(triton_to_np_dtype(dtype))


def test_every_type_survives_a_round_trip(loaded):
    tensors = {t.lower(): (t, example(t)) for t in TYPES}
    result = infer(loaded, "alltypes", tensors)
    for name, (_, array) in tensors.items():
        np.testing.assert_array_equal(result.as_numpy(f"{name}_out"), array)


def test_model_without_batching_answers(loaded):
    config = loaded.triton.config("fixed")
    assert config["max_batch_size"] == 0
    assert [(i["name"], i["dims"]) for i in config["input"]] == [("x", [2, -1]), ("scale", [1])]
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    result = infer(loaded, "fixed", {"x": ("INT64", array), "scale": ("FP32", np.array([0.5], np.float32))})
    np.testing.assert_array_equal(result.as_numpy("x_out"), array)
    np.testing.assert_array_equal(result.as_numpy("scale_out"), [0.5])


def test_accelerator_of_the_config_chooses_openvino(stack):
    stack.triton.load("accelerated")
    ids = np.arange(5).reshape(5, 1)
    np.testing.assert_array_equal(infer(stack, "accelerated", {"ids": ("INT64", ids)}).as_numpy("row"), ids)
    with pytest.raises(
        InferenceServerException, match="the model refused the values of the inputs: 'ids' must be"
    ) as e:
        infer(stack, "accelerated", {"ids": ("INT64", ids + 96)})
    assert e.value.status() == "400"
    metrics = f"http://127.0.0.1:{stack.environment['TRITON_METRICS_PORT']}"
    assert stack.wait(lambda: engines(metrics).get("accelerated"), "the metric of the engine") == "openvino f32"
    stack.triton.unload("accelerated")
    stack.wait(lambda: "accelerated" not in engines(metrics), "the metric to become 0")


def test_only_requested_outputs_are_returned(loaded):
    tensors = {t.lower(): (t, example(t)) for t in TYPES}
    response = infer(loaded, "alltypes", tensors, outputs=["fp32_out", "bytes_out"]).get_response()
    assert {output["name"] for output in response["outputs"]} == {"fp32_out", "bytes_out"}


def test_each_request_of_a_batch_gets_its_own_error(loaded):
    """The graph refuses the values of some requests, and one text is not UTF-8."""

    def ask(n: int):
        value = 10**6 if n % 8 == 5 else n
        try:
            return infer(loaded, "lookup", {"ids": ("INT64", np.array([[value]]))}).as_numpy("row").item()
        except InferenceServerException as error:
            return error

    with one_batch(loaded, "lookup", rows=32, refused=4), ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(ask, range(32)))
    for n, answer in enumerate(answers):
        if n % 8 == 5:
            assert answer.status() == "400"
            assert "the model refused the values" in answer.message()
        else:
            assert answer == n

    broken = example("BYTES")
    broken[2, 1] = b"\xff"
    tensors = {t.lower(): (t, example(t) if t != "BYTES" else broken) for t in TYPES}
    with pytest.raises(InferenceServerException, match="input 'bytes': element 5 is not valid UTF-8"):
        infer(loaded, "alltypes", tensors)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("wrongtype", "input 'ids' is TYPE_INT64, not TYPE_FP32"),
        ("ongpu", "GPU"),
    ],
)
def test_unservable_model_fails_with_the_reason(loaded, model, reason):
    with pytest.raises(TritonError) as error:
        loaded.triton.load(model)
    assert error.value.status == 400
    assert reason in str(error.value)


def tokens(rows: list[list[int]], width: int | None = None) -> dict:
    width = width or max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return {"input_ids": ("INT64", ids), "attention_mask": ("INT64", mask)}


def test_ragged_requests_share_an_execution(loaded):
    rng = np.random.default_rng(5)
    requests = [
        [rng.integers(1, 1000, rng.integers(1, 90)).tolist() for _ in range(rng.integers(1, 5))] for _ in range(24)
    ]

    def ask(rows):
        # Wider than the longest row, as clients that pad send it.
        return infer(loaded, "tokens", tokens(rows, width=95))

    with one_batch(loaded, "tokens", rows=sum(map(len, requests))), ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(ask, requests))
    for rows, answer in zip(requests, answers, strict=True):
        assert answer.as_numpy("pooled").ravel().tolist() == [sum(row) for row in rows]
        per_token = answer.as_numpy("per_token")
        assert per_token.shape == (len(rows), 95, 1)
        for row, values in zip(rows, per_token, strict=True):
            assert values.ravel().tolist() == row + [0] * (95 - len(row))


def test_masked_rows_get_an_answer(loaded):
    tensors = tokens([[5, 6]])
    tensors["attention_mask"] = ("INT64", np.zeros((1, 2), np.int64))
    assert infer(loaded, "tokens", tensors).as_numpy("pooled").item() == 0
