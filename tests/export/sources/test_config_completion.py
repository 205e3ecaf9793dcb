"""A config.json without the model's class, or with a name that transformers lacks, gets the class from the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file

from export.assemble import assemble_all, reason
from export.check.served import ServedSystem, python_backend
from export.record import read_record
from export.sources.config_completion import completed
from export.sources.source import Weights
from loadtest.bench.architectures.small_models import small_fields
from tests.support.checkpoints import encoders
from tests.support.checkpoints.pipelines import find_pipeline
from tests.support.served import request
from triton_transformers.settings import Settings, UserError


def save(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a small model, and change its config.json. A change to None removes the key."""
    network = getattr(transformers, architecture)
    sizes = {"vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0}
    network(network.config_class(**small_fields(network.config_class, sizes))).save_pretrained(folder)
    return change(folder, **changes)


def change(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def architecture_of(folder: Path, task: str = "", is_movable: bool = False) -> str:
    """Return the architecture in the config.json that the exporters see."""
    weights = Weights(folder, "m", "", movable=is_movable)
    with completed(weights, folder.parent / "assembling", task) as complete:
        config = json.loads((complete.folder / "config.json").read_text())
        assert load_file(complete.folder / "model.safetensors")
    return next(iter(config.get("architectures", [])), "")


UNNAMED = [
    ("BartForConditionalGeneration", "BartForConditionalGeneration"),
    ("BartForSequenceClassification", "BartForSequenceClassification"),
    ("BartModel", "BartForConditionalGeneration"),  # the head is tied: its family is published so
    ("BertModel", "BertModel"),
    ("BertForMaskedLM", "BertForMaskedLM"),
    ("BertForPreTraining", "BertForMaskedLM"),
    ("BertForSequenceClassification", "BertForSequenceClassification"),
    ("BertForTokenClassification", "BertForTokenClassification"),
    ("GPT2Model", "GPT2LMHeadModel"),
    ("LlamaForCausalLM", "LlamaForCausalLM"),
    ("LlamaModel", "LlamaModel"),  # the head is its own, and missing
    ("T5EncoderModel", "T5EncoderModel"),
    ("ViTForImageClassification", "ViTForImageClassification"),
    ("Wav2Vec2ForCTC", "Wav2Vec2ForCTC"),
]
RENAMED = [
    ("BartModel", "BartModel", "BartForConditionalGeneration"),
    ("BertModel", "BertModel", "BertModel"),
    ("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaForCausalLM"),
    ("MT5ForConditionalGeneration", "T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
    ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5ForConditionalGeneration"),
    ("VisionEncoderDecoderModel", "VisionEncoderDecoderModel", "VisionEncoderDecoderModel"),
    ("CLIPVisionModelWithProjection", "CLIPVisionModelWithProjection", "CLIPVisionModelWithProjection"),
]


@pytest.mark.parametrize(("saved", "expected"), UNNAMED)
def test_missing_architecture_is_found_by_the_weights(tmp_path, saved, expected):
    source = save(tmp_path / "source", saved, architectures=None)
    assert architecture_of(source) == expected
    assert "architectures" not in json.loads((source / "config.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_download_is_completed_in_place(tmp_path):
    source = save(tmp_path / "source", "BertForMaskedLM", architectures=None)
    assert architecture_of(source, is_movable=True) == "BertForMaskedLM"
    assert json.loads((source / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


@pytest.mark.parametrize(("saved", "named", "expected"), RENAMED)
def test_architecture_of_another_name_is_found(tmp_path, saved, named, expected):
    if saved == "VisionEncoderDecoderModel":
        source = find_pipeline("image-to-text").save(tmp_path / "source")
    else:
        source = save(tmp_path / "source", saved, architectures=[named])
    assert architecture_of(source) == expected


SPEECH = {"architectures": ["BertForSpeech"]}
REFUSED = [
    ({"architectures": ["BertModel", "BertForMaskedLM"], "model_type": None}, "", '("bert", the type of BertModel)'),
    (SPEECH, "", "has the architecture BertForSpeech in its config.json, which is not in transformers 5"),
    (SPEECH, "", "Its weights fit BertForMaskedLM: set TASK if it computes as that does, or choose another model"),
    (SPEECH, "text-classification", "Its weights are those of no bert in transformers: correct the file if it is wro"),
    ({"architectures": ["BertWithMore"], "vocab_size": 61}, "", "Its weights are those of no bert in transformers: c"),
    ({"architectures": ["MarianMTModel"], "model_type": "bart"}, "", "is of the type marian and not bart. Its weights"),
]


@pytest.mark.parametrize(("changes", "task", "sentence"), REFUSED)
def test_architecture_of_other_code_is_refused_in_one_sentence(tmp_path, changes, task, sentence):
    save(tmp_path / "source", "BertForMaskedLM", **changes)
    settings = Settings.load().replace(SYSTEMS="m", MODEL_REPOSITORY=str(tmp_path / "models"), TASK=task)
    with pytest.raises(UserError) as error:
        assemble_all(settings.replace(SOURCE=str(tmp_path / "source")))
    assert sentence in str(error.value)


@pytest.mark.parametrize(("task", "expected"), [("fill-mask", "BertForMaskedLM"), ("feature-extraction", "BertModel")])
def test_architecture_of_other_code_is_that_of_a_chosen_task(tmp_path, task, expected):
    source = save(tmp_path / "source", "BertForMaskedLM", architectures=["BertForSpeech"])
    assert architecture_of(source, task) == expected


@pytest.mark.parametrize("form", ["onnx", "pipeline"])
def test_labels_that_are_numbers_are_served_as_text(tmp_path, form):
    folder = encoders.save_bert(tmp_path / "source", "ForSequenceClassification", num_labels=3)
    labels = {"0": 0, "1": None, "2": 2.5}
    change(folder, id2label=labels, label2id=None, architectures=None)
    settings = {"SYSTEMS": "m", "MODEL_REPOSITORY": str(tmp_path / "models"), "SOURCE": str(folder), "FORMAT": form}
    with python_backend():
        assemble_all(Settings.load().replace(**settings))
        record = read_record("m", tmp_path / "models")
        assert record and record.task == "text-classification"
        system = ServedSystem("m", tmp_path / "models")
        if form == "onnx":
            answers = [str(row["label"][0, 0].decode()) for row in system.alone([request(["a"]), request(["b"])])]
        else:
            sent = {"inputs": np.array([[b"a"]], np.object_)}
            answers = [json.loads(system.alone([sent])[0]["outputs"][0, 0])[0]["label"]]
        system.close()
    assert set(answers) <= {"0", "None", "2.5"}


def test_sentence_of_a_backend_is_shown_as_it_is():
    from serving.triton.types import BadRequest

    assert reason(BadRequest("row 0 of 'image' is empty")) == "row 0 of 'image' is empty"
