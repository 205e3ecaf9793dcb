"""SPLADE in every format: the served tokens and weights equal those of SparseEncoder.encode()."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checkpoints import encoders
from triton_transformers.corpus import MIXED
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system
from triton_transformers.models.tasks import task_of
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TASK = "sparse-embedding"
TEXTS = [*MIXED.texts[:8], "a", "", "word " * 100]


@pytest.mark.parametrize(
    ("form", "pooling", "activation"),
    [
        ("onnx", "max", "relu"),
        ("python", "sum", "log1p_relu"),
        pytest.param("python", "max", "relu", marks=pytest.mark.slow),
        pytest.param("onnx", "sum", "log1p_relu", marks=pytest.mark.slow),
    ],
)
def test_sparse_embeddings_equal_sparse_encoder(tmp_path, form, pooling, activation):
    from sentence_transformers import SparseEncoder

    weights = encoders.save_sparse_encoder(
        tmp_path / "weights", pooling_strategy=pooling, activation_function=activation
    )
    assert task_of(weights) == TASK
    job = Job("splade", TASK, form, weights, movable=False, folder=tmp_path)
    run_recipe(RECIPES[TASK], job, "splade")
    requests = [{"input_text": np.array([[text.encode()]], np.object_)} for text in TEXTS]
    with served_system("splade", tmp_path) as system:
        alone, together = system.alone(requests), system.together(requests)
    library = SparseEncoder(str(weights), device="cpu")
    for n, text in enumerate(TEXTS):
        expected = library.encode(text, convert_to_sparse_tensor=False).numpy()
        for answer in (alone[n], together[n]):
            weights_of_ids = np.zeros_like(expected)
            weights_of_ids[answer["token_id"][0]] = answer["weight"][0]
            np.testing.assert_allclose(weights_of_ids, expected, atol=1e-4)
            words = [token.decode() for token in answer["token"][0]]
            assert words == library.tokenizer.convert_ids_to_tokens(answer["token_id"][0].tolist())
            assert (np.diff(answer["weight"][0]) <= 0).all()


def test_prompt_is_chosen_by_name(tmp_path):
    from sentence_transformers import SparseEncoder

    weights = encoders.save_sparse_encoder(tmp_path / "weights", encoders.PROMPTS)
    run_recipe(RECIPES[TASK], Job("splade", TASK, "python", weights, movable=False, folder=tmp_path), "splade")
    row = {"input_text": b"rain in the valley", "prompt_name": b"query"}
    with served_system("splade", tmp_path) as system:
        (answer,) = system.alone([{name: np.array([[value]], np.object_) for name, value in row.items()}])
    library = SparseEncoder(str(weights), device="cpu")
    expected = library.encode("rain in the valley", prompt_name="query", convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(answer["weight"][0], expected[answer["token_id"][0]], atol=1e-4)
    assert not np.allclose(expected, library.encode("rain in the valley", convert_to_sparse_tensor=False).numpy())


def test_model_without_a_masked_language_head_is_refused(tmp_path):
    weights = encoders.save_bert(tmp_path / "weights", "Model")
    job = Job("splade", TASK, "onnx", weights, movable=False, folder=tmp_path)
    with pytest.raises(UserError, match="serves masked language models and sparse encoders that sentence-tr"):
        run_recipe(RECIPES[TASK], job, "splade")
