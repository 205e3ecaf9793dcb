"""Models of sentence-transformers: served as the library answers, alone and in a batch; vectors of a text's spans.

Each case is assembled as `make models` does it, and runs in this process on the backends that serve it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling, StaticEmbedding, WeightedLayerPooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding

from export.check.served import ServedSystem
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from export.checkpoint.unsupported import check_task
from export.recipes.text.sentences import PROMPT_INPUTS, SentenceModel
from tests.support.checkpoints import encoders
from tests.support.served import assemble, request, systems_once
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")

TEXTS = ["a", "Rain in the VALLEY, and nobody goes out.", "word " * 100, "rain [PAD] rain [PAD][PAD]"]
ALL_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"prompts": encoders.PROMPTS, "default_prompt_name": "query"}
CHAT = "{% for m in messages %}<s>{{ m.role }} {{ m.content }} {% endfor %}</s> {{ tone }}<s>"
CHAT_OPTIONS = {
    "processor_kwargs": {"chat_template": CHAT, "truncation_side": "right"},
    "processing_kwargs": {"chat_template": {"tone": "calm"}, "text": {"max_length": 40}},
}
SPANS = {"layers": ["Dense", "Normalize"], "prompts": {"query": "ask: "}, "truncate_dim": 8}
WIDTH = encoders.WIDTH
slow = pytest.mark.slow


def save_chain(folder: Path, *others: torch.nn.Module, library: type = SentenceTransformer, **config: Any) -> Path:
    """Save BERT with these modules after it."""
    plain = encoders.save_bert(folder / "plain", "Model", **config)
    library(modules=[Transformer(str(plain)), *others], device="cpu").save(str(folder))
    return folder


def save_table(folder: Path, is_sparse: bool) -> Path:
    tokenizer = encoders.wordpiece()
    torch.manual_seed(3)
    if is_sparse:
        table = SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)))
        SparseEncoder(modules=[table], device="cpu", max_active_dims=5).save(str(folder))
    else:
        tokenizer.backend_tokenizer.no_truncation()
        table = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=24)
        SentenceTransformer(modules=[table], device="cpu").save(str(folder))
    return folder


def save_autoencoder(folder: Path) -> Path:
    return save_chain(
        folder, Pooling(WIDTH, "mean"), SparseAutoEncoder(WIDTH, 96, k=8, k_aux=16), library=SparseEncoder
    )


def save_mean_of_layers(folder: Path) -> Path:
    layers = WeightedLayerPooling(WIDTH, num_hidden_layers=2, layer_start=1)
    return save_chain(folder, layers, Pooling(WIDTH, "cls"), output_hidden_states=True)


def save_pooling_of_another_width(folder: Path) -> Path:
    weights = encoders.save_sentence_transformer(folder, pooling="mean")
    encoders.edit(weights / "1_Pooling/config.json", embedding_dimension=WIDTH + 8)
    return weights


pooled = partial(partial, encoders.save_sentence_transformer)
last_token = partial(pooled, pooling="lasttoken")
CASES: dict[str, Callable[[Path], Path]] = {
    "all_modes": pooled(pooling=ALL_MODES, layers=["Dense", "Normalize"], truncate_dim=8),
    "left_padded": last_token(save_plain=encoders.save_qwen3, **PROMPTS),
    "right_padded": last_token(save_plain=partial(encoders.save_qwen3, padding_side="right"), prompts=encoders.PROMPTS),
    "chat": last_token(save_plain=encoders.save_qwen3, transformer=CHAT_OPTIONS, **PROMPTS),
    "t5": pooled(save_plain=encoders.save_t5_encoder),
    "instructor": pooled(
        include_prompt=False,
        save_plain=encoders.save_roberta,
        transformer={"do_lower_case": True, "max_seq_length": 24},
        **PROMPTS,
    ),
    "router": partial(encoders.save_router, prompts={"query": "question: ", "passage": "passage: "}),
    "sparse_router": partial(encoders.save_router, is_sparse=True),
    "table": partial(save_table, is_sparse=False),
    "sparse_table": partial(save_table, is_sparse=True),
    "autoencoder": save_autoencoder,
    "convolution": lambda folder: save_chain(folder, CNN(WIDTH, 16), Pooling(48, "mean")),
    "layers": save_mean_of_layers,
    "other_width": save_pooling_of_another_width,
    "spans": pooled(transformer={"max_seq_length": 64}, **SPANS),
}
PROMPTED = ("left_padded", "right_padded", "chat", "instructor", "router", "sparse_router")
MEAN = ("t5", "instructor", "other_width")  # only the mean of a text's tokens has parts that are means of spans
CHOICES: list[dict[str, str]] = [
    {},
    {"prompt_name": "query"},
    {"prompt_name": "document"},
    {"prompt": "Find a city: "},
    {"prompt": ""},
    {"prompt_name": "query", "prompt": "x "},
]
QUICK = [
    ("all_modes", "onnx"), ("left_padded", "python"), ("chat", "onnx"),
    ("router", "onnx"), ("sparse_router", "onnx"), ("table", "onnx"),
    ("other_width", "onnx"),
]  # fmt: skip
SLOW = [
    ("all_modes", "python"), ("left_padded", "onnx"), ("right_padded", "python"), ("chat", "python"), ("t5", "onnx"),
    ("t5", "python"), ("instructor", "onnx"), ("instructor", "python"), ("sparse_table", "onnx"),
    ("autoencoder", "onnx"), ("convolution", "onnx"), ("layers", "onnx"),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda case: CASES[case](folder / case))


@pytest.fixture(scope="module")
def serve(checkpoint, tmp_path_factory) -> Iterator[Callable[[str, str], ServedSystem]]:
    with systems_once(tmp_path_factory) as served:
        yield lambda case, form: served(checkpoint(case), form)


def library(source: Path) -> Any:
    return (SparseEncoder if "sparse" in task_of(Checkpoint("m", source)) else SentenceTransformer)(
        str(source), device="cpu"
    )


def vectors(model: Any, texts: list[str], prompt_name: str = "", **options: Any) -> np.ndarray:
    """Return the library's vectors, one text at a time: in a batch, padding on the left changes them."""
    if isinstance(model, SparseEncoder):
        options["convert_to_sparse_tensor"] = False
    encode = {"query": model.encode_query, "document": model.encode_document}.get(prompt_name)
    encode = encode or partial(model.encode, prompt_name=prompt_name or None)
    return np.stack([np.asarray(encode(text, **options)) for text in texts])


def vector_of(answer: dict[str, np.ndarray]) -> np.ndarray:
    return answer["sparse_embedding" if "sparse_embedding" in answer else "sentence_embedding"]


@pytest.mark.parametrize(("case", "form"), [*QUICK, *(pytest.param(*run, marks=slow) for run in SLOW)])
def test_embeddings_equal_those_of_the_library(checkpoint, serve, case, form):
    original, served = library(checkpoint(case)), serve(case, form)
    names = {tensor["name"] for tensor in served.config["input"]} - {"input_text"}
    assert names == {*(PROMPT_INPUTS if case in PROMPTED else ()), *(["spans"] if case in MEAN else [])}
    texts = [*TEXTS, *([""] if case.endswith("table") else [])]  # a table has a vector for a text without tokens
    choices = CHOICES if case in PROMPTED else [{}]
    together = served.together([request(texts, **choice) for choice in choices])
    for choice, batch in zip(choices, together, strict=True):
        expected = vectors(original, texts, **choice)
        alone = np.concatenate([vector_of(served.together([request([text], **choice)])[0]) for text in texts])
        np.testing.assert_allclose(alone, expected, atol=1e-5)
        np.testing.assert_allclose(vector_of(batch), expected, atol=1e-5)


@pytest.mark.slow
def test_int8_keeps_prompts_and_interface(checkpoint, serve):
    (answer,) = serve("left_padded", "onnx-int8").together([request(TEXTS, prompt_name="document")])
    expected = vectors(library(checkpoint("left_padded")), TEXTS, "document")
    assert (answer["sentence_embedding"] * expected).sum(1).min() > 0.98


def test_rows_of_a_request_have_their_own_prompts(checkpoint, serve):
    names = ["query", "passage", ""]
    (answer,) = serve("left_padded", "python").together([request(TEXTS[:3], prompt_name=names)])
    original = library(checkpoint("left_padded"))
    expected = [vectors(original, [given], name)[0] for given, name in zip(TEXTS[:3], names, strict=True)]
    np.testing.assert_allclose(answer["sentence_embedding"], expected, atol=1e-5)


@pytest.mark.parametrize(("case", "form", "inputs", "error"), [
    ("left_padded", "python", request(["a"], prompt_name="secret"),
        "row 0 has an unknown name; this model's prompts: document, passage, query"),
    ("left_padded", "python", request(["a"]) | {"prompt": np.array([[b"x"]] * 2, np.object_)},
        "must have a row for each text: 1, not 2"),
    ("left_padded", "python", request([""], prompt=""), "text 0 has 0 tokens; it must have 1 to 48"),
    ("sparse_router", "onnx", request(["a", "b"], prompt_name=["query", "document"]),
        "input 'prompt_name': send queries and documents in requests of their own"),
    ("sparse_router", "onnx", request(["a"], prompt_name="secret"),
        "row 0 has an unknown name; this model's prompts: document, query"),
])  # fmt: skip
def test_wrong_prompts_are_refused(serve, case, form, inputs, error):
    with pytest.raises(UserError, match=re.escape(error)) as refusal:
        serve(case, form).together([inputs])
    assert "secret" not in str(refusal.value)


def test_lost_prompt_is_refused(checkpoint, tmp_path, anew, monkeypatch):
    """Parity is checked against encode() itself, not against the bare transformer."""

    def save_without_default(self: SentenceModel, version: Path) -> None:
        (version / "prompts.json").write_text(json.dumps({"prompts": self.original.prompts}))

    monkeypatch.setattr(SentenceModel, "save_prompts", save_without_default)
    with pytest.raises(UserError, match="the served model answers differently from the original"):
        assemble(checkpoint("left_padded"), tmp_path, "python")


@pytest.mark.parametrize(
    ("save", "error"),
    [
        (pooled(layers=["LayerNorm"]), r"FORMAT=python does not support .* \(Pooling, LayerNorm\): set FORMAT=onnx"),
        (CASES["sparse_router"], r"m: FORMAT=python serves .* Router.*: set FORMAT=onnx"),
        pytest.param(CASES["router"], r"m: FORMAT=python serves .* Router.*: set FORMAT=onnx", marks=slow),
    ],
)
def test_layers_that_only_a_graph_has_name_the_other_format(tmp_path, save, error):
    with pytest.raises(UserError, match=error):
        assemble(save(tmp_path / "source"), tmp_path / "models", "python")


def test_router_is_refused_for_another_task(checkpoint):
    with pytest.raises(UserError, match=r"m is for TASK=s.* and not for TASK=fill-mask"):
        check_task(Checkpoint("m", checkpoint("sparse_router")), "fill-mask")


def test_weights_in_bfloat16_are_served_in_float32_like_encode(tmp_path):
    source = encoders.save_sentence_transformer(tmp_path / "source")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assemble(source, tmp_path / "models", "python")  # raises if the answers differ
    config = (tmp_path / "models/m_encoder/config.pbtxt").read_text()
    assert re.search(r'"dtype"\s+value \{\s+string_value: "float32"', config)
    assert not (tmp_path / "models/m_encoder/1/prompts.json").exists()


# --- late chunking: a vector for each span of a text, the mean of its tokens' vectors in the whole text ---------------

CHUNKS = [
    ["Rain in the VALLEY. ", "Nobody goes", " out, ", "and bees sleep."],
    ["One chunk"],
    ["Milk. ", "It snowed. ", "No."],
]


def chunked(texts: list[list[str]], prompt_name: str = "") -> dict[str, np.ndarray]:
    """Return a request with the spans of each text's chunks."""
    spans = np.full((len(texts), max(map(len, texts)), 2), -1)
    for row, chunks in zip(spans, texts, strict=True):
        ends = np.cumsum([len(chunk) for chunk in chunks])
        row[: len(chunks)] = np.stack([[0, *ends[:-1]], ends], axis=1)
    names = {"prompt_name": prompt_name} if prompt_name else {}
    return request(["".join(chunks) for chunks in texts], **names) | {"spans": spans}


def pooled_spans(model: SentenceTransformer, chunks: list[str], prompt: str) -> np.ndarray:
    """Compute the vectors with sentence-transformers' modules: pool each span alone, instead of the whole text."""
    tokens = model.tokenizer(prompt + "".join(chunks), return_offsets_mapping=True, return_tensors="pt")
    offsets = tokens.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        hidden = model[0]({**tokens})["token_embeddings"]
        rows, start = [], len(prompt)
        for chunk in chunks:
            end = start + len(chunk)
            mask = torch.tensor([[int(first < last and start < last <= end) for first, last in offsets]])
            features = {"token_embeddings": hidden, "attention_mask": mask}
            for module in list(model)[1:]:
                features = module(features)
            rows.append(features["sentence_embedding"][0, :8].numpy())
            start = end
    return np.stack(rows)


@pytest.mark.parametrize("form", ["onnx", "python"])
@pytest.mark.parametrize("prompt_name", ["", "query"])
def test_each_span_has_the_mean_of_its_tokens(checkpoint, serve, form, prompt_name):
    original, served = library(checkpoint("spans")), serve("spans", form)
    expected = [pooled_spans(original, chunks, SPANS["prompts"].get(prompt_name, "")) for chunks in CHUNKS]
    requests = [chunked([chunks], prompt_name) for chunks in CHUNKS]
    requests += [request(["no spans"]), chunked(CHUNKS, prompt_name)]
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
def test_wrong_spans_are_refused(serve, spans, error):
    with pytest.raises(UserError, match=re.escape(error)):
        serve("spans", "onnx").together([request(["Rain falls."]) | {"spans": np.array(spans)}])
