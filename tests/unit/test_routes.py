"""Models of sentence-transformers with a Router, a table of vectors or layers of their own: equal to the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling, StaticEmbedding, WeightedLayerPooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding

from tests.support.checkpoints import encoders
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import ServedSystem, python_backend
from triton_transformers.models.sources import Folder
from triton_transformers.models.tasks import task_of
from triton_transformers.models.unsupported import check_model, check_task
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TEXTS = ["a", "Rain in the VALLEY, and nobody goes out.", "word " * 100, "rain [PAD] rain [PAD][PAD]"]
PROMPTS = {"prompts": {"query": "question: ", "passage": "passage: "}}


def save_static(folder: Path) -> Path:
    tokenizer = encoders.wordpiece().backend_tokenizer
    tokenizer.no_truncation()
    torch.manual_seed(3)
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=24)], device="cpu").save(str(folder))
    return folder


def save_weights(folder: Path) -> Path:
    tokenizer = encoders.wordpiece()
    torch.manual_seed(3)
    table = SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)))
    SparseEncoder(modules=[table], device="cpu", max_active_dims=5).save(str(folder))
    return folder


def save_autoencoder(folder: Path) -> Path:
    plain = encoders.save_bert(folder / "plain", "Model")
    width = encoders.SIZE["hidden_size"]
    chain = [Transformer(str(plain)), Pooling(width, "mean"), SparseAutoEncoder(width, 96, k=8, k_aux=16)]
    SparseEncoder(modules=chain, device="cpu").save(str(folder))
    return folder


def save_convolution(folder: Path) -> Path:
    plain = encoders.save_bert(folder / "plain", "Model")
    width = encoders.SIZE["hidden_size"]
    chain = [Transformer(str(plain)), CNN(width, 16), Pooling(48, "mean")]
    SentenceTransformer(modules=chain, device="cpu").save(str(folder))
    return folder


def save_mean_of_layers(folder: Path) -> Path:
    plain = encoders.save_bert(folder / "plain", "Model", output_hidden_states=True)
    width, layers = encoders.SIZE["hidden_size"], encoders.SIZE["num_hidden_layers"]
    mean = WeightedLayerPooling(width, num_hidden_layers=layers, layer_start=1)
    chain = [Transformer(str(plain)), mean, Pooling(width, "cls")]
    SentenceTransformer(modules=chain, device="cpu").save(str(folder))
    return folder


CASES = {
    "dense": lambda folder: encoders.save_router(folder, **PROMPTS),
    "sparse": lambda folder: encoders.save_router(folder, is_sparse=True),
    "static": save_static,
    "weights": save_weights,
    "autoencoder": save_autoencoder,
    "convolution": save_convolution,
    "layers": save_mean_of_layers,
}
SLOW = ("weights", "autoencoder", "convolution", "layers")


def assemble(source: Path, folder: Path, form: str = "onnx") -> None:
    Folder(source).verify()
    check_model("m", source, trust_remote_code=False)
    task = task_of(source)
    check_task("m", source, task, trust_remote_code=False)
    RECIPES[task].assemble(Job("m", task, form, source, movable=False, folder=folder))


def request(texts: list[str], **choice: str) -> dict[str, np.ndarray]:
    columns = {"input_text": texts} | {name: [value] * len(texts) for name, value in choice.items()}
    return {name: np.array([[value.encode()] for value in values], np.object_) for name, values in columns.items()}


def vectors(library: Any, texts: list[str], prompt_name: str = "", prompt: str | None = None) -> np.ndarray:
    """Return the library's vectors, one text at a time."""
    options = {"prompt": prompt} if prompt is not None else {}
    if isinstance(library, SparseEncoder):
        options["convert_to_sparse_tensor"] = False
    encode = {"query": library.encode_query, "document": library.encode_document}.get(prompt_name, library.encode)
    return np.stack([np.asarray(encode(text, **options)) for text in texts])


def answer_of(tensors: dict[str, np.ndarray]) -> np.ndarray:
    name = "sparse_embedding" if "sparse_embedding" in tensors else "sentence_embedding"
    return tensors[name]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_embeddings_equal_those_of_the_library(tmp_path, case):
    source = CASES[case](tmp_path / "source")
    assemble(source, tmp_path)
    library = (SparseEncoder if "sparse" in task_of(source) else SentenceTransformer)(str(source), device="cpu")
    with python_backend():
        served = ServedSystem("m", tmp_path)
        choices = [{}]
        if "prompt_name" in [tensor["name"] for tensor in served.config["input"]]:
            choices += [{"prompt_name": "query"}, {"prompt_name": "document"}, {"prompt": "x "}]
            choices += [{"prompt_name": "query", "prompt": "x "}]
        assert (len(choices) > 1) == (case in ("dense", "sparse"))
        together = served.together([request(TEXTS, **choice) for choice in choices])
        alone = [[served.together([request([text], **choice)])[0] for text in TEXTS] for choice in choices]
        served.close()
    for choice, batch, singles in zip(choices, together, alone, strict=True):
        expected = vectors(library, TEXTS, **choice)
        np.testing.assert_allclose(answer_of(batch), expected, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([answer_of(single) for single in singles]), expected, atol=1e-5)


def test_queries_and_documents_in_one_request_are_refused(tmp_path):
    assemble(encoders.save_router(tmp_path / "source", is_sparse=True), tmp_path)
    mixed = request(["a", "b"]) | {"prompt_name": np.array([[b"query"], [b"document"]], np.object_)}
    with python_backend():
        served = ServedSystem("m", tmp_path)
        with pytest.raises(UserError, match="input 'prompt_name': send queries and documents in requests of their own"):
            served.together([mixed])
        with pytest.raises(UserError, match="row 0 has an unknown name; this model's prompts: document, query"):
            served.together([request(["a"], prompt_name="secret")])
        served.close()


@pytest.mark.parametrize("is_sparse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_routes_need_a_graph(tmp_path, is_sparse):
    source = encoders.save_router(tmp_path / "source", is_sparse=is_sparse)
    with pytest.raises(UserError, match=r"m: FORMAT=python serves .* Router.*: set FORMAT=onnx"):
        assemble(source, tmp_path, "python")
    with pytest.raises(UserError, match=r"m is for TASK=s.* and not for TASK=fill-mask"):
        check_task("m", source, "fill-mask", trust_remote_code=False)
