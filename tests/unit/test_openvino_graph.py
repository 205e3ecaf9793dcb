"""How the graph of an ONNX file is prepared for OpenVINO."""

from __future__ import annotations

import numpy as np
from onnx import helper

from shared.engines import OpenVinoGraph
from tests.support.onnx_models import save, value


def test_products_transpose_the_keys_of_attentions(tmp_path):
    path = save(
        tmp_path / "model.onnx",
        [
            helper.make_node("Transpose", ["query"], ["q"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["key"], ["k"], perm=[0, 2, 3, 1]),
            helper.make_node("MatMul", ["q", "k"], ["scores"]),
        ],
        [value("query", "FLOAT", ["rows", "tokens", 2, 8]), value("key", "FLOAT", ["rows", "tokens", 2, 8])],
        [value("scores", "FLOAT", ["rows", 2, "tokens", "tokens"])],
    )
    graph = OpenVinoGraph(path, ["scores"])
    steps = [node for node in graph.graph.get_ordered_ops() if node.get_type_name() in ("Transpose", "MatMul")]
    orders = [node.input_value(1).get_node().data.tolist() for node in steps if node.get_type_name() == "Transpose"]
    assert orders == [[0, 2, 1, 3]] * 2
    query, key = (np.random.default_rng(i).normal(size=(3, 5, 2, 8)).astype(np.float32) for i in range(2))
    (scores,) = graph.compile("f32", 1, 1).run(["scores"], {"query": query, "key": key})
    np.testing.assert_allclose(scores, np.einsum("rqhd,rkhd->rhqk", query, key), rtol=1e-5)
