"""Late chunking: a vector for each span of a text, equal to the mean of its tokens' vectors in the whole text."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.support.checkpoints import encoders
from triton_transformers.models.catalogue import Job
from triton_transformers.models.exporters import text
from triton_transformers.models.exporters.served import ServedSystem, python_backend
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("few_parity_texts")

PROMPTS = {"query": "ask: "}
CHUNKS = [
    ["Rain in the VALLEY. ", "Nobody goes", " out, ", "and bees sleep."],
    ["One chunk"],
    ["Milk. ", "It snowed. ", "No."],
]


@pytest.fixture(scope="module", params=["onnx", "python"])
def served(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    layers = {"layers": ["Dense", "Normalize"], "prompts": PROMPTS, "truncate_dim": 8}
    weights = encoders.save_sentence_transformer(folder / "weights", transformer={"max_seq_length": 64}, **layers)
    text.assemble(Job("search", "sentence-similarity", request.param, weights, False, folder))
    with python_backend():
        system = ServedSystem("search", folder)
        yield system
        system.close()


def request(texts: list[list[str]], prompt_name: str = "") -> dict[str, np.ndarray]:
    """Return a request with the spans of each text's chunks."""
    spans = np.full((len(texts), max(map(len, texts)), 2), -1)
    for row, chunks in zip(spans, texts, strict=True):
        ends = np.cumsum([len(chunk) for chunk in chunks])
        row[: len(chunks)] = np.stack([[0, *ends[:-1]], ends], axis=1)
    inputs = {"input_text": np.array([["".join(chunks).encode()] for chunks in texts], np.object_), "spans": spans}
    names = {"prompt_name": np.array([[prompt_name.encode()]] * len(texts), np.object_)} if prompt_name else {}
    return inputs | names


def library(folder, chunks: list[str], prompt: str = "") -> np.ndarray:
    """Compute the vectors with sentence-transformers' modules: pool each span alone, instead of the whole text."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "weights"), device="cpu")
    tokens = model.tokenizer(prompt + "".join(chunks), return_offsets_mapping=True, return_tensors="pt")
    offsets = tokens.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        hidden = model[0]({**tokens})["token_embeddings"]
        vectors, start = [], len(prompt)
        for chunk in chunks:
            end = start + len(chunk)
            mask = torch.tensor([[int(first < last and start < last <= end) for first, last in offsets]])
            features = {"token_embeddings": hidden, "attention_mask": mask}
            for module in list(model)[1:]:
                features = module(features)
            vectors.append(features["sentence_embedding"][0, :8].numpy())
            start = end
    return np.stack(vectors)


@pytest.mark.parametrize("prompt_name", ["", "query"])
def test_each_span_has_the_mean_of_its_tokens(served, prompt_name):
    expected = [library(served.folder, chunks, PROMPTS.get(prompt_name, "")) for chunks in CHUNKS]
    others = {"input_text": np.array([[b"no spans"]], np.object_)}
    requests = [request([chunks], prompt_name) for chunks in CHUNKS] + [others, request(CHUNKS, prompt_name)]
    for answers in (served.together(requests), served.alone(requests)):
        *single, without, joined = (answer["span_embeddings"] for answer in answers)
        assert without.shape == (1, 0, 8)
        for row, answer, own in zip(joined, single, expected, strict=True):
            np.testing.assert_allclose(answer[0], own, atol=1e-5)
            np.testing.assert_allclose(row[: len(own)], own, atol=1e-5)
            assert not row[len(own) :].any()


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([[[0, 4], [90, 99]]], "span 1 of text 0 has no token: it is empty, has only spaces, or lies outside the text"),
        ([[[4, 5]]], "span 0 of text 0 has no token"),
        ([[[2, 2]]], "span 0 of text 0 has no token"),
        ([[[-3, 4]]], "span 0 of text 0 has no token"),
        ([[0, 4]], "must have shape [1, spans, 2]: the first character of each span"),
    ],
)
def test_wrong_spans_are_refused(served, spans, error):
    inputs = {"input_text": np.array([[b"Rain falls."]], np.object_), "spans": np.array(spans)}
    with pytest.raises(UserError, match=re.escape(error)):
        served.together([inputs])
