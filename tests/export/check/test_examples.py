"""An assembly keeps the answers that it sees, and `make smoke` finds a system that answers otherwise."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.assemble import assemble_all
from export.check.examples import elements, tensors
from export.check.served import ServedSystem, served_system
from export.record import read_record
from export.removal import remove
from scripts.stack.smoke import attempt
from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.pipelines import find_pipeline
from triton_transformers.settings import Settings
from triton_transformers.tasks.requests import TEXTS, Examples

pytestmark = pytest.mark.slow


class InProcess:
    """Stands in for Triton: a system of a repository that is served in this process."""

    def __init__(self, served: ServedSystem) -> None:
        self.served = served

    def composing(self, name: str) -> dict[str, Any]:
        return {name: self.served.config, **self.served.configs}

    def infer(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        config = {"max_batch_size": 0}  # the shapes have the axis of the batch
        (answer,) = self.served.alone([tensors(request["inputs"], config)])
        outputs = {tensor["name"]: answer.get(tensor["name"]) for tensor in self.served.config["output"]}
        return {
            "outputs": [
                {"name": name, "shape": list(array.shape), "data": elements(array)}
                for name, array in outputs.items()
                if array is not None
            ]
        }


def smoke(repository: Path, name: str) -> str:
    record = read_record(name, repository)
    assert record
    with served_system(name, repository) as served:
        return attempt(InProcess(served), name, record.precision, Examples.read(repository / name))


def assemble(repository: Path, name: str, source: Path, **settings: str) -> Examples:
    chosen = {"MODEL_REPOSITORY": str(repository), "SYSTEMS": name, "SOURCE": str(source), **settings}
    assemble_all(Settings.load().replace(**chosen))
    examples = Examples.read(repository / name)
    assert examples
    return examples


AFTER = {b"calm": b"cross", b"cross": b"glad", b"glad": b"calm"}
MOODS = encoders.labels(encoders.MOODS)
# A system of each kind -> its checkpoint, the settings of its assembly, and the engine and precision of its answers.
KINDS = {
    "labels": (lambda f: encoders.save_bert(f, "ForSequenceClassification", **MOODS), {}, "onnxruntime", "float32"),
    "words": (lambda f: encoders.save_bert(f, "ForMaskedLM"), {}, "onnxruntime", "float32"),
    "answers": (lambda f: encoders.save_bert(f, "ForQuestionAnswering"), {}, "onnxruntime", "float32"),
    "vectors": (encoders.save_sentence_transformer, {"FORMAT": "python"}, "pytorch", "float32"),
    "rounded": (encoders.save_sentence_transformer, {"FORMAT": "onnx-int8"}, "onnxruntime", "onnx-int8"),
    "sparse": (encoders.save_sparse_encoder, {}, "onnxruntime", "float32"),
    "colbert": (encoders.save_colbert, {}, "onnxruntime", "float32"),
    "images": (vision.save_vit_classifier, {}, "onnxruntime", "float32"),
    "finds": (find_pipeline("object-detection").save, {}, "pytorch", "exact"),
    "segments": (find_pipeline("image-segmentation").save, {}, "pytorch", "exact"),
}


@pytest.mark.parametrize("name", KINDS)
def test_assembly_keeps_answers_that_smoke_gets_again(tmp_path, name):
    save, settings, engine, precision = KINDS[name]
    examples = assemble(tmp_path / "models", name, save(tmp_path / "weights"), **settings)
    assert (examples.engine, examples.precision) == (engine, precision)
    assert len(examples.rows) == len(examples.outputs) == len(TEXTS)
    assert all(outputs for outputs in examples.outputs)
    assert (tmp_path / "models" / name / "1/examples.json").stat().st_size < 1_000_000
    assert smoke(tmp_path / "models", name) == ""
    spoiled = [{output: [moved(x) for x in values] for output, values in row.items()} for row in examples.outputs]
    Examples(examples.rows, spoiled, engine, precision).write(tmp_path / "models" / name)
    assert f"is answered differently than its assembly saw it ({engine}): " in smoke(tmp_path / "models", name)


def swapped(examples: Examples) -> Examples:
    return replace(examples, outputs=examples.outputs[::-1])


def moved(value: Any) -> Any:
    """Return another answer: of a number, what another row of weights would give."""
    return (
        value if value is None or isinstance(value, int) else f"other {value}" if isinstance(value, str) else 3 - value
    )


def test_smoke_finds_swapped_weights_and_swapped_labels(tmp_path):
    repository = tmp_path / "models"
    assemble(repository, "labels", encoders.save_bert(tmp_path / "weights", "ForSequenceClassification", **MOODS))
    folder = repository / "labels_answers/1"
    (labels,) = folder.iterdir()
    kept = labels.read_bytes()
    labels.write_bytes(re.sub(b"|".join(AFTER), lambda found: AFTER[found[0]], kept))
    assert "than its assembly saw it (onnxruntime): label is '" in smoke(repository, "labels")
    labels.write_bytes(kept)
    assert smoke(repository, "labels") == ""
    other = encoders.save_bert(tmp_path / "other", "ForSequenceClassification", hidden_act="relu", **MOODS)
    assemble(repository, "others", other)
    for part in ("encoder", "answers"):
        shutil.copytree(repository / f"others_{part}/1", repository / f"labels_{part}/1", dirs_exist_ok=True)
    assert "than its assembly saw it" in smoke(repository, "labels")


def test_halves_of_texts_and_images_keep_their_own(tmp_path):
    examples = assemble(tmp_path / "models", "clip", vision.save_clip(tmp_path / "clip"))
    halves = [Examples.read(tmp_path / "models" / f"clip_{half}") for half in ("text", "image")]
    assert examples == halves[0]
    assert [row[0]["name"] for row in halves[1].rows] == ["image_bytes"] * len(TEXTS)
    with served_system("clip_image", tmp_path / "models") as served:
        assert attempt(InProcess(served), "clip_image", "float32", halves[1]) == ""
        assert "differs by" in attempt(InProcess(served), "clip_image", "float32", swapped(halves[1]))


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (lambda folder: language.save_gpt2(folder), {"FORMAT": "python"}),
        (find_pipeline("text-to-audio").save, {}),
    ],
)
def test_systems_whose_answers_another_run_need_not_repeat_keep_requests_only(tmp_path, source, settings):
    examples = assemble(tmp_path / "models", "writes", source(tmp_path / "weights"), **settings)
    assert examples.outputs == []
    assert len(examples.rows) == len(TEXTS)


def test_removal_deletes_the_examples(tmp_path):
    assemble(tmp_path / "models", "words", encoders.save_bert(tmp_path / "weights", "ForMaskedLM"))
    record = read_record("words", tmp_path / "models")
    assert record and "words/1/examples.json" in record.files
    remove(record, tmp_path / "models")
    assert not (tmp_path / "models/words").exists()
