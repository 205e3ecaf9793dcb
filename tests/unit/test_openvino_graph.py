"""How the graph of an ONNX file is prepared for OpenVINO."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from shared.engines import OpenVinoGraph
from tests.support.checkpoints import encoders
from tests.support.onnx_models import save, value
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job


def test_matmul_transposes_the_keys_of_attention(tmp_path):
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


@pytest.mark.usefixtures("few_parity_texts")
def test_exported_attention_is_recognised(tmp_path):
    weights = encoders.save_bert(tmp_path / "weights", "ForSequenceClassification")
    job = Job("system", "text-classification", "onnx", weights, movable=False, folder=tmp_path)
    run_recipe(RECIPES["text-classification"], job, "system")
    graph = OpenVinoGraph(tmp_path / "system_encoder/1/model.onnx", ["logits"]).graph
    softmaxes = [node for node in graph.get_ordered_ops() if node.get_type_name() == "Softmax"]
    products = [node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"]
    of_heads = [node for node in products if node.get_output_partial_shape(0).rank.get_length() == 4]
    assert sum(node.get_attributes()["transpose_b"] for node in of_heads) == len(softmaxes) > 0
