"""Models of sentence-transformers: served as SentenceTransformer.encode answers, alone and in a batch.

Each case is assembled as `make models` does it, and runs in this process on the backends that serve it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from tests.support.checkpoints import encoders
from tests.support.served import systems_once
from triton_transformers.models.catalogue import Job
from triton_transformers.models.exporters import text
from triton_transformers.models.exporters.sentence_model import SentenceModel
from triton_transformers.models.exporters.served import ServedSystem
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TEXTS = ["a", "Rain in the VALLEY, and nobody goes out.", "word " * 80]
ALL_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"prompts": encoders.PROMPTS, "default_prompt_name": "query"}
CHAT = "{% for m in messages %}<s>{{ m.role }} {{ m.content }} {% endfor %}</s> {{ tone }}<s>"
CASES: dict[str, dict[str, Any]] = {
    "all_modes": {"pooling": ALL_MODES, "layers": ["Dense", "Normalize"], "truncate_dim": 8},
    "left_padded": {"pooling": "lasttoken", "save_plain": encoders.save_qwen3, **PROMPTS},
    "right_padded": {
        "pooling": "lasttoken",
        "save_plain": functools.partial(encoders.save_qwen3, padding_side="right"),
        "prompts": encoders.PROMPTS,
    },
    "chat": {
        "pooling": "lasttoken",
        "save_plain": encoders.save_qwen3,
        "transformer": {
            "processor_kwargs": {"chat_template": CHAT, "truncation_side": "right"},
            "processing_kwargs": {"chat_template": {"tone": "calm"}, "text": {"max_length": 40}},
        },
        **PROMPTS,
    },
    "t5": {"save_plain": encoders.save_t5_encoder},
    "instructor": {
        "include_prompt": False,
        "save_plain": encoders.save_roberta,
        "transformer": {"do_lower_case": True, "max_seq_length": 24},
        **PROMPTS,
    },
}
# The graph of right_padded is that of left_padded.
RUNS = [(case, "python") for case in CASES] + [(case, "onnx") for case in CASES if case != "right_padded"]
QUICK = [("all_modes", "onnx"), ("left_padded", "python"), ("chat", "onnx")]
CHOICES = [{}, {"prompt_name": "query"}, {"prompt_name": "document"}, {"prompt": "Find a city: "}, {"prompt": ""}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda case: encoders.save_sentence_transformer(folder / case, **CASES[case]))


@pytest.fixture(scope="module")
def serve(checkpoint, tmp_path_factory) -> Iterator[Callable[[str, str], ServedSystem]]:
    with systems_once(assemble, tmp_path_factory) as served:
        yield lambda case, format: served(checkpoint(case), format)


def assemble(source: Path, folder: Path, format: str) -> None:
    text.assemble(Job("search", "sentence-similarity", format, source, False, folder))


def request(texts: list[str], **choice: str) -> dict[str, np.ndarray]:
    columns = {"input_text": texts} | {name: [value] * len(texts) for name, value in choice.items()}
    return {name: np.array([[value.encode()] for value in values], np.object_) for name, values in columns.items()}


def library(source: Path) -> SentenceTransformer:
    return SentenceTransformer(str(source), device="cpu")


@pytest.mark.parametrize(
    ("case", "format"), [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in RUNS]
)
def test_embeddings_equal_encode(checkpoint, serve, case, format):
    original, served = library(checkpoint(case)), serve(case, format)
    choices = CHOICES if "prompts" in CASES[case] else [{}]
    assert [tensor["name"] for tensor in served.config["input"] if tensor["name"] != "spans"][1:] == (
        ["prompt_name", "prompt"] if "prompts" in CASES[case] else []
    )
    together = served.together([request(TEXTS, **choice) for choice in choices])
    for choice, batch in zip(choices, together, strict=True):
        # One text at a time: the library itself answers differently to texts that are padded on the left.
        expected = original.encode(TEXTS, batch_size=1, **choice)
        alone = np.concatenate([served.together([request([t], **choice)])[0]["sentence_embedding"] for t in TEXTS])
        np.testing.assert_allclose(alone, expected, atol=1e-5)
        np.testing.assert_allclose(batch["sentence_embedding"], expected, atol=1e-5)


@pytest.mark.slow
def test_int8_keeps_prompts_and_interface(checkpoint, serve):
    (answer,) = serve("left_padded", "onnx-int8").together([request(TEXTS, prompt_name="document")])
    expected = library(checkpoint("left_padded")).encode(TEXTS, batch_size=1, prompt_name="document")
    assert (answer["sentence_embedding"] * expected).sum(1).min() > 0.98


def test_rows_of_a_request_have_their_own_prompts(checkpoint, serve):
    names = ["query", "passage", ""]
    inputs = request(TEXTS) | {"prompt_name": np.array([[name.encode()] for name in names], np.object_)}
    (answer,) = serve("left_padded", "python").together([inputs])
    original = library(checkpoint("left_padded"))
    for row, (given, name) in enumerate(zip(TEXTS, names, strict=True)):
        expected = original.encode([given], prompt_name=name or None)
        np.testing.assert_allclose(answer["sentence_embedding"][row : row + 1], expected, atol=1e-5)


@pytest.mark.parametrize(("inputs", "error"), [
    (request(["a"], prompt_name="secret"),
        "row 0 has an unknown name; this model's prompts: document, passage, query"),
    (request(["a"]) | {"prompt": np.array([[b"x"]] * 2, np.object_)}, "must have a row for each text: 1, not 2"),
    (request([""], prompt=""), "text 0 has 0 tokens; it must have 1 to 48"),
])  # fmt: skip
def test_wrong_prompts_are_refused(serve, inputs, error):
    with pytest.raises(UserError, match=re.escape(error)) as refusal:
        serve("left_padded", "python").together([inputs])
    assert "secret" not in str(refusal.value)


def test_lost_prompt_is_refused(checkpoint, tmp_path, monkeypatch):
    """Parity is checked against encode() itself, not against the bare transformer."""

    def save_without_default(self: SentenceModel, version: Path) -> None:
        (version / "prompts.json").write_text(json.dumps({"prompts": self.original.prompts}))

    monkeypatch.setattr(SentenceModel, "save_prompts", save_without_default)
    with pytest.raises(UserError, match="the served model answers differently from the original"):
        assemble(checkpoint("left_padded"), tmp_path, "python")


def test_unsupported_layer_names_the_other_format(tmp_path):
    source = encoders.save_sentence_transformer(tmp_path / "source", layers=["LayerNorm"])
    with pytest.raises(UserError, match=r"FORMAT=python does not support .* \(Pooling, LayerNorm\): set FORMAT=onnx"):
        assemble(source, tmp_path, "python")


def test_missing_weights_are_refused(tmp_path):
    """If the check is missing, transformers draws the same random weights for both sides."""
    source = encoders.save_sentence_transformer(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the weights 'encoder.layer.1.output.dense.weight'"):
        assemble(source, tmp_path, "onnx")


def test_weights_in_bfloat16_are_served_in_float32_like_encode(tmp_path):
    source = encoders.save_sentence_transformer(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, source / "model.safetensors", {"format": "pt"}
    )
    assemble(source, tmp_path, "python")  # raises if the answers differ
    config = (tmp_path / "search_encoder/config.pbtxt").read_text()
    assert re.search(r'"dtype"\s+value \{\s+string_value: "float32"', config)


def test_chat_without_a_template_is_refused(tmp_path):
    source = encoders.save_sentence_transformer(tmp_path / "source")
    path = source / "sentence_bert_config.json"
    config = json.loads(path.read_text())
    config["modality_config"]["message"] = config["modality_config"]["text"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="search: its texts pass through a chat template, and its tokenizer has none"):
        assemble(source, tmp_path, "onnx")


def test_system_without_prompts_has_no_prompt_inputs(tmp_path):
    assemble(encoders.save_sentence_transformer(tmp_path / "source"), tmp_path, "python")
    assert "prompt" not in (tmp_path / "search/config.pbtxt").read_text()
    assert not (tmp_path / "search_tokenizer/1/prompts.json").exists()
