"""OpenVINO's graphs whose padding only attention computes."""

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

WIDTH = 8
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # without it, OpenVINO takes bfloat16 where the CPU has it
RANDOM = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> np.ndarray:
    return RANDOM.normal(size=(rows, columns)).astype(np.float32)


def encoder() -> openvino.Model:
    """Return an encoder with a gate, attention, an output for each token, and two ways to pool."""
    ids, mask = (ops.parameter([-1, -1], np.int64, name) for name in ("ids", "mask"))
    for tensor, name in ((ids, "ids"), (mask, "mask")):
        tensor.output(0).set_names({name})
    present = ops.unsqueeze(ops.convert(mask, "f32"), np.int64(2))
    hidden = ops.gather(matrix(50, WIDTH), ids, np.int64(0))
    gate = ops.split(ops.matmul(hidden, matrix(WIDTH, 2 * WIDTH), False, False), np.int64(-1), 2)
    states = ops.add(ops.multiply(ops.sigmoid(gate.output(0)), gate.output(1)), hidden)
    scaled = ops.multiply(states, matrix(1, WIDTH)[0])  # as in front of a matrix in 8 bits
    states = ops.add(ops.matmul(scaled, matrix(WIDTH, WIDTH), False, False), states)
    states = ops.mvn(states, np.array([-1]), True, 1e-6, "inside_sqrt")
    hides = ops.multiply(ops.subtract(present, np.float32(1)), np.float32(1e9))  # [rows, tokens, 1]
    scores = ops.add(ops.matmul(states, states, False, True), ops.transpose(hides, np.array([0, 2, 1])))
    states = ops.matmul(ops.matmul(ops.softmax(scores, 2), states, False, False), matrix(WIDTH, WIDTH), False, False)
    mean = ops.reduce_sum(ops.multiply(states, present), np.array([1]))
    weights = ops.softmax(ops.add(ops.matmul(states, matrix(WIDTH, 1), False, False), hides), 1)
    attended = ops.reduce_sum(ops.multiply(states, weights), np.array([1]))
    return openvino.Model([states, mean, attended], [ids, mask], "encoder")


def nodes(graph: openvino.Model, kind: str) -> list[openvino.Node]:
    return [node for node in graph.get_ordered_ops() if node.get_type_name() == kind]


def is_matrix(node: openvino.Node) -> bool:
    return node.get_type_name() == "Constant"


def rows(node: openvino.Node) -> int:
    """Return how many rows the node reads, -1 for any number."""
    size = node.input_value(0).get_partial_shape()[0]
    return -1 if size.is_dynamic else size.get_length()


@pytest.fixture
def without_padding():
    from serving.engines import unpadded

    return unpadded.without_padding


def test_only_attention_computes_the_padding(without_padding):
    for graph, number in ((encoder(), -1), (without_padding(encoder(), "mask"), 1)):
        products = [node for node in nodes(graph, "MatMul") if is_matrix(node.input_value(1).get_node())]
        assert [rows(node) for node in (*products, *nodes(graph, "MVN"))] == [number] * 5


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
        # The second row has no token, and the third has masked tokens between the others.
        [[2, 2, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]],
    ],
)
def test_answers_stay(without_padding, mask):
    original = encoder()
    values = np.array(mask)
    feed = {"ids": RANDOM.integers(0, 50, values.shape), "mask": values}
    expected, actual = (
        openvino.compile_model(g, "CPU", FLOAT32)(feed) for g in (original, without_padding(original, "mask"))
    )
    ends = [max(np.flatnonzero(row), default=len(row) - 1) + 1 for row in values]
    for number in range(3):
        for before, after, end in zip(expected[number], actual[number], ends, strict=True):
            known = slice(end if number == 0 else None)  # an answer for padding is nobody's
            np.testing.assert_allclose(after[known], before[known], rtol=1e-4, atol=1e-5)


def test_graph_without_products_stays(without_padding):
    ids, mask = (ops.parameter([-1, -1], np.int64, name) for name in ("ids", "mask"))
    mask.output(0).set_names({"mask"})
    graph = openvino.Model([ops.reduce_sum(ops.multiply(ids, mask), np.array([1]))], [ids, mask], "sums")
    feed = {0: np.array([[3, 4, 5]]), 1: np.array([[1, 1, 0]])}
    assert openvino.compile_model(without_padding(graph, "mask"), "CPU")(feed)[0].tolist() == [7]
