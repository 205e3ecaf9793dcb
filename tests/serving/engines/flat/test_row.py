"""Text encoders on PyTorch run texts of unequal length as one row of tokens, or pad them, with the same answers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.catalogue import System
from export.decision import decide
from export.recipes.text.recipe import configs, text_model
from export.sources.source import Folder, Weights
from loadtest.bench.architectures.small_models import (
    BIDIRECTIONAL,
    ENCODER_OF_T5,
    LABELS,
    ONE_LABEL,
    POSITIONS,
    SmallModel,
    save_text,
)
from tests.support.python_backend import InferenceRequest, Logger, instance_args, parameters
from triton_transformers.settings import Settings

PER_TOKEN = ("last_hidden_state", "logits of tokens")
# The architecture, its output, and parameters of the backend.
FLAT = [
    ("BertModel", "sentence_embedding", {"pooling": "cls+max+mean+mean_sqrt_len_tokens+weightedmean+lasttoken"}),
    ("BertModel", "pooler_output", {}),
    ("RobertaModel", "sentence_embedding", {}),
    ("MPNetModel", "sentence_embedding", {}),
    ("DistilBertModel", "last_hidden_state", {}),
    ("ModernBertModel", "last_hidden_state", {}),
    ("NomicBertModel", "sentence_embedding", {}),
    ("GteModel", "sentence_embedding", {"pooling": "cls"}),
    ("Qwen3Model", "sentence_embedding", {"pooling": "lasttoken"}),
    ("Gemma3TextModel", "sentence_embedding", {}),
    ("BertForSequenceClassification", "logits", {}),
    ("XLMRobertaForSequenceClassification", "logits", {}),
    ("Qwen3ForSequenceClassification", "logits", {"pad_token_id": "2"}),
    ("BertForTokenClassification", "logits of tokens", {}),
    ("BertForMaskedLM", "sparse_embedding", {}),
]
# The architecture, its output, and why it needs padding.
PADDED = [
    ("T5EncoderModel", "last_hidden_state", "takes no position_ids"),
    ("MobileBertForSequenceClassification", "logits", "its answers differ"),
]
FIELDS = {"Gemma3TextModel": BIDIRECTIONAL, "T5EncoderModel": ENCODER_OF_T5} | {
    "XLMRobertaForSequenceClassification": ONE_LABEL
}
TOKENIZERS = {"Qwen3": "decoder", "Gemma3": "decoder", "MPNet": "byte-level", "T5": "byte-level", "Gte": "byte-level"}
TOKENIZERS |= {"Roberta": "byte-level", "XLMRoberta": "byte-level"}
LENGTHS = (7, 1, POSITIONS, 2, 7, 30, 31)


@pytest.fixture
def load(pb_utils, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that loads a small model of an architecture."""
    from serving.encoders import on_torch

    started = []

    def load(architecture: str, output: str, **values: str) -> Any:
        weights = tmp_path / architecture / "1"
        if not weights.exists():
            kind = next((TOKENIZERS[name] for name in TOKENIZERS if architecture.startswith(name)), "wordpiece")
            fields = FIELDS.get(architecture, LABELS if "Classification" in architecture else {})
            row = SmallModel(architecture, "", tokenizer=kind, fields=fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                save_text(row, weights)
        inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if architecture.startswith("Bert") else [])]
        dims = [-1, 8] if output in PER_TOKEN else [8]
        config = {
            "input": [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in inputs],
            "output": [{"name": output.partition(" ")[0], "data_type": "TYPE_FP32", "dims": dims}],
            "max_batch_size": 64,
            **parameters(model_class=architecture, **values),
        }
        model = on_torch.TextEncoder()
        model.initialize(instance_args(weights.parent, config))
        started.append(model)
        return model

    yield load
    for model in started:
        model.finalize()


def requests(model: Any, lengths: tuple[int, ...] = LENGTHS) -> list[InferenceRequest]:
    """Return a request for each text, whose second half has the other type. Padding tokens occur in the texts, too."""
    random = np.random.default_rng(1)
    rows = []
    for length in lengths:
        tensors = {
            "input_ids": random.integers(0, 300, (1, length)),
            "attention_mask": np.ones((1, length), np.int64),
            "token_type_ids": (np.arange(length) >= length // 2).astype(np.int64)[None],
        }
        rows.append(InferenceRequest(model.encoder.outputs, **{name: tensors[name] for name in model.inputs}))
    return rows


def answers(model: Any, sent: list[InferenceRequest]) -> list[np.ndarray]:
    (name,) = model.encoder.outputs
    responses = [answer or request.sender.response() for answer, request in zip(model.execute(sent), sent, strict=True)]
    assert not [response.error for response in responses if response.error]
    return [response.tensors[name] for response in responses]


@pytest.mark.parametrize(("architecture", "output", "values"), FLAT, ids=[f"{row[0]}-{row[1]}" for row in FLAT])
def test_flat_answers_equal_padded_ones(load, architecture, output, values):
    padded = load(architecture, output, engine="torch-padded", **values)
    flat = load(architecture, output, engine="torch-flat", **values)
    assert (padded.engine_labels["engine"], flat.engine_labels["engine"]) == ("torch-padded", "torch-flat")
    alone = [answer for request in requests(padded) for answer in answers(padded, [request])]
    together = answers(flat, requests(flat))
    for own, answer in zip(alone, together, strict=True):
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(answer, own, atol=1e-4)


@pytest.mark.parametrize(("architecture", "output", "reason"), PADDED, ids=[row[0] for row in PADDED])
def test_other_models_pad_their_texts_and_report_why(load, monkeypatch, architecture, output, reason):
    messages: list[str] = []
    monkeypatch.setattr(Logger, "log_info", messages.append)
    model = load(architecture, output, engine="torch-flat")
    assert model.engine_labels["engine"] == "torch-padded"
    assert any("runs its texts with padding" in message and reason in message for message in messages)
    expected = answers(load(architecture, output, engine="torch-padded"), requests(model))
    for own, answer in zip(expected, answers(model, requests(model)), strict=True):
        np.testing.assert_allclose(answer, own, atol=1e-4)


def test_masked_tokens_inside_a_text_are_padding(load):
    flat, padded = (load("BertModel", "sentence_embedding", engine=engine) for engine in ("torch-flat", "torch-padded"))
    sent = [requests(model, (9, 20)) for model in (flat, padded)]
    for first, _ in sent:
        mask = next(tensor for tensor in first.inputs() if tensor.name() == "attention_mask")
        mask.as_numpy()[0, :4] = 0
    np.testing.assert_allclose(answers(flat, sent[0]), answers(padded, sent[1]), atol=1e-4)


def test_flat_runs_have_at_most_the_measured_tokens(load):
    model = load("BertModel", "sentence_embedding", engine="torch-flat")
    runs = []

    def run(names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        runs.append(int(feed["attention_mask"].sum()))
        return model.forward(names, feed)

    model.plan.encoder, model.plan.tokens_of_run = replace(model.encoder, run=run), 40
    rows = [(model.prepare(request), 0) for request in requests(model)]
    assert len(model.runs.run_rows(rows)) == len(LENGTHS)
    assert runs == [POSITIONS, 31, 30 + 7, 7 + 2 + 1]


def test_text_vector_is_not_taken_for_a_token_if_the_row_has_as_many_tokens(load):
    """The vectors of this model have 8 numbers."""
    padded, flat = (load("BertModel", "pooler_output", engine=engine) for engine in ("torch-padded", "torch-flat"))
    width = padded.model.config.hidden_size
    sent = [requests(model, (1, 2, width - 3)) for model in (padded, flat)]
    for own, answer in zip(answers(padded, sent[0]), answers(flat, sent[1]), strict=True):
        np.testing.assert_allclose(answer, own, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "output"),
    [
        ("BertForSequenceClassification", "logits"),
        ("RobertaModel", "last_hidden_state"),
        ("ModernBertModel", "sentence_embedding"),
        ("Qwen3Model", "sentence_embedding"),
    ],
)
def test_runs_of_recorded_size_give_the_same_answers(load, monkeypatch, architecture, output):
    """On CUDA, such runs are graphs. Here, the model runs again on the same tensors."""
    from serving.encoders import on_torch
    from serving.engines.flat import graphs, run

    monkeypatch.setattr(run, "should_run_flat", lambda mask, device: True)  # texts of one length, too
    monkeypatch.setattr(graphs, "LADDER", (64, 128, 256))
    faster = iter(range(99, 0, -1))
    monkeypatch.setattr(on_torch, "fastest", lambda run: next(faster))
    model = load(architecture, output, engine="torch-flat")
    counts = range(1, len(LENGTHS) + 1)
    expected = [answers(model, requests(model, LENGTHS[:count])) for count in counts]
    assert model.record_runs(model.encoder).startswith("replays 3 CUDA graphs for runs of up to 256 tokens")
    ladder = model.flat_base.row_forward
    monkeypatch.setattr(ladder, "forward", None)  # all runs must fit
    for turn in (0, 1):  # the second one finds the texts of the first in the tensors
        for count, own in zip(counts, expected, strict=True):
            for answer, before in zip(answers(model, requests(model, LENGTHS[:count])), own, strict=True):
                np.testing.assert_allclose(answer, before, atol=1e-4, err_msg=f"{count} texts, turn {turn}")


def test_recorded_sizes_end_where_they_save_no_time(pb_utils):
    ladder = importlib.import_module("serving.engines.flat.graphs").Ladder(None)
    answered: list[list[int]] = []

    def run(lengths: list[int]) -> list[np.ndarray]:
        answered.append(lengths)
        return [np.ones((1, 20))]

    seconds = iter([5, 4, 5, 4, 5, 6])  # without and with a graph
    message = ladder.climb(512, run, lambda call: next(seconds))
    assert "(256 tokens take 6000.00 ms with it and 5000.00 without)" in message
    assert answered == [[48], [48], [96], [96], [128, 64], [128, 64]]


def test_attention_that_pads_is_not_recorded(load, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("serving.engines.flat.run"), "should_run_flat", lambda mask, device: True
    )
    model = load("MPNetModel", "sentence_embedding", engine="torch-flat")
    assert model.record_runs(model.encoder).endswith("(its attention pads the texts)")


@pytest.mark.parametrize("wrong", ["answer", "error"])
def test_wrong_graph_is_left_out(pb_utils, wrong):
    ladder = importlib.import_module("serving.engines.flat.graphs").Ladder(None)

    def run(lengths: list[int]) -> list[np.ndarray]:
        if ladder.shape and wrong == "error":
            raise RuntimeError("operation not permitted when stream is capturing")
        ladder.runs += ["graph"] if ladder.shape else []
        return [np.full((1, 20), np.nan if ladder.shape else 1)]

    message = ladder.climb(512, run, lambda call: 1)
    assert message.startswith("replays 0 CUDA graphs for runs of up to 0 tokens (")
    assert ("not permitted" if wrong == "error" else "not finite") in message
    assert ladder.shape is None


def test_precision_is_the_fastest_that_agrees(load, monkeypatch, tmp_path):
    """On CUDA, a checkpoint in float32 has all of these choices. The decision is remembered."""
    torch_choice = importlib.import_module("serving.engines.torch_choice")
    monkeypatch.setenv("TRITON_ENGINE_CACHE", str(tmp_path / "engines"))
    monkeypatch.setattr(torch_choice, "choices", lambda *_: (True, ("f32", "bf16", "f16")))
    messages: list[str] = []
    monkeypatch.setattr(Logger, "log_info", messages.append)
    model = load("BertModel", "sentence_embedding")
    figures = re.search(r"without padding in (\w+) \(.*; (torch-flat-f32 .*; torch-flat-bf16 .*)\)", messages[0])
    assert figures, messages
    cosine = float(re.search(r"torch-flat-f16 .*cosine ([\d.]+)", figures[2])[1])
    assert 0.9995 <= cosine <= 1
    precision = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[figures[1]]
    assert model.engine_labels == {"engine": "torch-flat", "precision": precision}
    monkeypatch.setattr(torch_choice, "measure", None)
    assert load("BertModel", "sentence_embedding").engine_labels == model.engine_labels
    assert figures[2] in messages[-2]


TRIALS = {
    # precision: seconds, and the angle to the right answer
    "fastest agrees": ({"f32": (9.0, 0.0), "bf16": (2.0, 0.02), "f16": (3.0, 0.001)}, "bf16"),
    "fastest differs": ({"f32": (9.0, 0.0), "bf16": (2.0, 0.1), "f16": (3.0, 0.001)}, "f16"),
    "equally fast": ({"f32": (9.0, 0.0), "bf16": (2.0, 0.02), "f16": (2.1, 0.001)}, "f16"),
    "nothing saved": ({"f32": (2.1, 0.0), "bf16": (2.0, 0.02), "f16": (2.0, 0.001)}, "f32"),
    "one fails": ({"f32": (9.0, 0.0), "bf16": None, "f16": (2.0, 0.001)}, "f16"),
}


@pytest.mark.parametrize(("trials", "chosen"), TRIALS.values(), ids=TRIALS)
def test_measured_precision(pb_utils, trials, chosen):
    torch_choice = importlib.import_module("serving.engines.torch_choice")

    def attempt(precision: str) -> Any:
        if not trials[precision]:
            raise RuntimeError(f"no kernel\nfor {precision}")
        seconds, angle = trials[precision]
        answer = np.zeros((1, 20))
        answer[0, :2] = np.cos(angle), np.sin(angle)
        return torch_choice.Trial("torch-flat", [answer], seconds)

    measured = torch_choice.measure(tuple(trials), attempt)
    assert measured["precision"] == chosen
    if not trials["bf16"]:
        assert "bf16: no kernel for bf16; torch-flat-f16 2000.0 ms, cosine 1.00000" in measured["reason"]


@pytest.mark.parametrize("trial", ["no memory", "not finite"])
def test_float32_stays_if_it_cannot_be_measured(pb_utils, monkeypatch, trial):
    torch_choice = importlib.import_module("serving.engines.torch_choice")
    monkeypatch.setattr(torch_choice, "choices", lambda *_: (True, ("f32", "bf16")))

    def attempt(precision: str) -> Any:
        if trial == "no memory":
            raise MemoryError(trial)
        return torch_choice.Trial("torch-flat", [np.full((1, 20), np.nan)], 1.0)

    precision, reason = torch_choice.choose("m-1", None, parameters(), attempt)
    assert precision == "f32"
    assert reason.startswith("not measured: ")
    assert reason.endswith(trial)


@pytest.mark.parametrize(
    ("setting", "values", "flat", "precisions"),
    [
        ("", {}, True, ("f32", "bf16", "f16")),
        ("openvino-bf16", {}, True, ("f32", "bf16", "f16")),
        ("torch-padded", {}, False, ("f32", "bf16", "f16")),
        ("torch-padded-f16", {}, False, ("f16",)),
        ("torch-padded", {"engine": "torch-flat-bf16"}, True, ("bf16",)),
        ("", {"dtype": "float32"}, True, ("f32",)),
    ],
)
def test_choices_on_cuda(pb_utils, monkeypatch, setting, values, flat, precisions):
    torch_choice, pretrained = (
        importlib.import_module(f"serving.engines.{name}") for name in ("torch_choice", "pretrained")
    )
    monkeypatch.setenv("TRITON_ENGINE", setting)
    planned = pretrained.Plan(Path(), torch.device("cuda"), torch.float32, 0)
    assert torch_choice.choices(parameters(**values), planned) == (flat, precisions)
    half = planned._replace(dtype=torch.bfloat16)
    assert torch_choice.choices(parameters(), half)[1] == (precisions if setting == "torch-padded-f16" else ("bf16",))


@pytest.mark.parametrize(
    ("profile", "form", "rows"), [("cuda", "python", 256), ("cuda", "onnx", 64), ("cpu", "python", 64)]
)
def test_batches_on_pytorch_and_cuda_have_more_texts(tmp_path, profile, form, rows):
    with torch.random.fork_rng(devices=[]):
        save_text(SmallModel("BertForSequenceClassification", "", fields=LABELS), tmp_path)
    system = System("m", "text-classification", Folder(tmp_path), format=form)
    job = decide(system, Weights(tmp_path, "m", ""), tmp_path / "made", Settings.load().replace(PROFILE=profile))
    parts = configs(text_model(job))
    assert {part: config["max_batch_size"] for part, (config, _) in parts.items()} == dict.fromkeys(parts, rows)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 2), (2, 0)])
def test_attention_on_cuda_gets_each_texts_own_tokens(pb_utils, monkeypatch, window):
    from serving.engines.flat import row, run

    def varlen_attn(query, key, value, starts, other_starts, longest, other_longest, *, scale, window_size):
        """Stand in for the kernel, which needs a GPU: compute what PyTorch documents of its arguments."""
        assert query.shape == key.shape == value.shape
        assert starts is other_starts
        assert starts.dtype == torch.int32
        assert longest == other_longest == starts.diff().max()
        rows = []
        for start, end in pairwise(starts.tolist()):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
            left, right = (len(query) if side == -1 else side for side in window_size)
            scores = torch.einsum("qhw,khw->hqk", query[start:end], key[start:end]) * scale
            scores = scores.masked_fill((distance > left) | (-distance > right), -torch.inf)
            rows.append(torch.einsum("hqk,khw->qhw", scores.softmax(-1), value[start:end]))
        return torch.cat(rows)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    mask = (np.arange(9) < np.array([[1], [4], [4], [9]])).astype(np.int64)
    _, lengths = run.on_device({"attention_mask": mask}, torch.device("cpu"), mask)
    torch.manual_seed(0)
    query, key, value = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    answered = [
        attend(lengths, query, key, value, 0.3, window) for attend in (row.attend_on_cuda, row.attend_by_length)
    ]
    torch.testing.assert_close(*answered)
