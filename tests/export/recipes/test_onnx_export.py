"""One exporter for every network: what it writes answers other shapes as the network does, or it raises."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
import transformers

from export.assemble import assemble_all
from export.catalogue import FormatUnavailable
from export.check.served import ServedSystem, Tensors
from export.recipes import onnx_export
from export.recipes.onnx_export import PLAIN_ATTENTION, export
from export.record import read_record
from tests.support.checkpoints import encoders
from triton_transformers.settings import Settings, UserError

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LENGTH = 40  # longer than each sliding window below
# Networks that no test of a task exports.
TEXT_MODELS = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "eurobert": {"num_key_value_heads": 2},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 8, **GROUPED},
    "gte": {},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "mpnet": {},
    "nomic_bert": {},
    "ultrabert": {},
}
IMAGE_MODELS = {
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "dinov3_vit": IMAGE,
    "swin": {**IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
}
QUICK = ("gemma3_text", "modernbert", "swin")


def kinds(models: dict[str, dict]) -> list:
    return [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in models]


class Features(torch.nn.Module):
    """A model from tensors by position to its features."""

    def __init__(self, kind: str, inputs: tuple[str, ...], **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[kind](**settings, initializer_range=0.3)
        config._attn_implementation = PLAIN_ATTENTION
        self.model, self.inputs = transformers.MODEL_MAPPING[type(config)](config).eval(), inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model(**dict(zip(self.inputs, tensors, strict=True))).last_hidden_state,)


def tokens(*lengths: int) -> Tensors:
    """Return a run of rows of these lengths."""
    ids = np.random.default_rng(0).integers(5, 100, (len(lengths), max(lengths)))
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)}


@pytest.fixture
def written(tmp_path, monkeypatch) -> Callable[..., list[bool]]:
    """Return a function that exports, and returns for each attempt whether torch.export made it."""
    attempts: list[bool] = []
    real = torch.onnx.export

    def attempt(*args, **settings):
        attempts.append(settings["dynamo"])
        return real(*args, **settings)

    monkeypatch.setattr(torch.onnx, "export", attempt)

    def write(network: torch.nn.Module, inputs, outputs, examples) -> list[bool]:
        export(network, inputs, outputs, examples, tmp_path / "model.onnx")
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
        return attempts

    return write


def run(folder: Path, feed: Tensors) -> np.ndarray:
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


@pytest.mark.parametrize("kind", kinds(TEXT_MODELS))
def test_text_encoders_need_no_code_of_their_own(tmp_path, written, kind):
    names = ("input_ids", "attention_mask")
    network = Features(kind, names, vocab_size=100, pad_token_id=0, **SIZE, **TEXT_MODELS[kind])
    axes = {0: "texts", 1: "tokens"}
    inputs, outputs = dict.fromkeys(names, axes), {"features": axes}
    examples = [tokens(9, 4), tokens(1), tokens(LENGTH, 3, 20)]
    assert written(network, inputs, outputs, examples) == [False]  # traced
    alone, together = run(tmp_path, tokens(LENGTH)), run(tmp_path, tokens(LENGTH, 3, 20))
    np.testing.assert_allclose(together[:1], alone, atol=1e-4)


@pytest.mark.parametrize("kind", kinds(IMAGE_MODELS))
def test_image_encoders_need_no_code_of_their_own(tmp_path, written, kind):
    settings = {} if kind in ("convnextv2", "swin") else SIZE
    network = Features(kind, ("pixel_values",), **settings, **IMAGE_MODELS[kind])
    images = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)
    examples = [{"pixel_values": images[:2]}, {"pixel_values": images}]
    assert written(network, {"pixel_values": {0: "images"}}, {"features": {0: "images"}}, examples) == [False]
    each = [run(tmp_path, {"pixel_values": images[n : n + 1]}) for n in range(3)]
    np.testing.assert_allclose(run(tmp_path, {"pixel_values": images}), np.concatenate(each), atol=1e-4)


class Repeats(torch.nn.Module):
    """Adds its numbers in a loop that torch.jit.trace unrolls for its example."""

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor]:
        total = torch.zeros_like(numbers[:, 0])
        for column in numbers.unbind(1):
            total = total + column
        return (total,)


class Doubles(torch.nn.Module):
    """Doubles numbers by a rule on the count of rows, which torch.jit.trace reads as a constant."""

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor]:
        return (numbers * torch.full_like(numbers, len(numbers)) + 0 * numbers.sum(),)


def examples(*shapes: tuple[int, int]) -> list[Tensors]:
    return [{"numbers": np.ones(shape, np.float32)} for shape in shapes]


AXES = {0: "rows", 1: "columns"}


def test_graph_that_answers_only_the_traced_shape_gives_way_to_torch_export(tmp_path, written):
    attempts = written(Doubles(), {"numbers": AXES}, {"doubled": AXES}, examples((2, 3), (5, 4)))
    assert attempts == [False, True]
    np.testing.assert_array_equal(run(tmp_path, {"numbers": np.ones((7, 2), np.float32)}), np.full((7, 2), 7))


def test_network_that_neither_exporter_writes_is_refused_in_one_sentence(tmp_path, written, capfd):
    error = r"its export to ONNX failed \(traced: .*; with torch.export: .*\)"
    with pytest.raises(FormatUnavailable, match=error):
        written(Repeats(), {"numbers": AXES}, {"sum": {0: "rows"}}, examples((2, 3), (5, 4)))
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_full_disk_is_no_failure_of_the_model(tmp_path, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(OSError, match="No space left"):
        export(Doubles(), {"numbers": AXES}, {"doubled": AXES}, examples((2, 3)), tmp_path / "model.onnx")


def test_weights_too_large_for_one_file_lie_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "ONE_FILE", 0)
    network = torch.nn.Sequential(torch.nn.Linear(300, 300), Doubles())  # which only torch.export gets right
    sizes = (2, 300), (3, 300)
    export(
        network.eval(), {"numbers": {0: "rows"}}, {"doubled": {0: "rows"}}, examples(*sizes), tmp_path / "model.onnx"
    )
    assert not any(module.training for module in network.modules())
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert (tmp_path / "model.onnx").stat().st_size < 300 * 300
    assert run(tmp_path, {"numbers": np.ones((5, 300), np.float32)}).shape == (5, 300)


def test_transformers_serve_a_model_whose_graph_fails_after_the_export(tmp_path, monkeypatch, capsys):
    run = ServedSystem.run

    def fail(system: ServedSystem, model: str, inputs: list[Tensors]) -> list[Tensors]:
        if system.configs[model]["backend"] == "packed_onnx":
            raise UserError(f"{model} fails on an example: [ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Split node")
        return run(system, model, inputs)

    monkeypatch.setattr(ServedSystem, "run", fail)
    weights = encoders.save_distilbert(tmp_path / "weights", "Model")
    chosen = {"MODEL_REPOSITORY": str(tmp_path / "models"), "SOURCE": str(weights), "TASK": "feature-extraction"}
    assemble_all(Settings.load().replace(SYSTEMS="mine", **chosen))
    printed = " ".join(capsys.readouterr().err.split())
    assert "exported to ONNX, mine_encoder fails on an example. It is served by transformers instead" in printed
    assert read_record("mine", tmp_path / "models").format == "python"


def test_transformers_serve_what_cannot_be_exported_unless_the_user_chose_onnx(tmp_path, monkeypatch, capsys):
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("this network has a loop")

    monkeypatch.setattr(torch.onnx, "export", fail)
    weights = encoders.save_distilbert(tmp_path / "weights", "Model")
    chosen = {"SYSTEMS": "mine", "SOURCE": str(weights), "TASK": "feature-extraction"}
    settings = Settings.load().replace(**{"MODEL_REPOSITORY": str(tmp_path / "models")} | chosen)
    refusal = r"weights cannot be served as feature-extraction, FORMAT=onnx: its export .* FORMAT=python serves it"
    with pytest.raises(UserError, match=refusal):
        assemble_all(settings.replace(FORMAT="onnx"))
    assemble_all(settings)
    assert "It is served by transformers instead (FORMAT=python)" in " ".join(capsys.readouterr().err.split())
    assert read_record("mine", tmp_path / "models").format == "python"
