"""Pipelines whose network runs as a graph on OpenVINO answer as those on PyTorch."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from export.assemble import assemble_all
from export.check.served import served_system
from export.recipes import pipeline
from export.recipes.pipeline import is_same
from loadtest.bench.speech_rates import RATE, save_whisper, sound, wav
from serving.pipelines.classes import open_pipeline
from serving.pipelines.outputs import plain
from tests.support.checkpoints.pipelines import find_pipeline
from tests.support.checkpoints.real import real_checkpoints
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.media import png, video

pytestmark = pytest.mark.usefixtures("stored")

WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
TOKENS = {"generate_kwargs": {"max_new_tokens": 6}}


def assemble(weights: Path) -> Path:
    repository = weights.parent / "models"
    assemble_all(Settings.load().replace(SYSTEMS="m", MODEL_REPOSITORY=str(repository), SOURCE=str(weights)))
    return repository


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that assembles a model that writes texts of any length, and its weights, each once."""

    @functools.cache
    def assembled(task: str, architecture: str = "") -> tuple[Path, Path]:
        weights = find_pipeline(task, architecture).save(tmp_path_factory.mktemp(task) / "weights")
        path = weights / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 10**30}))
        repository = assemble(weights)
        assert (repository / "m/1/graph/step").is_dir()
        return repository, weights

    return assembled


def request(data: bytes, parameters: dict[str, Any]) -> dict[str, np.ndarray]:
    values = {"inputs": data, "parameters": json.dumps(parameters).encode()}
    return {name: np.array([[value]], np.object_) for name, value in values.items()}


def answers(responses: list[dict[str, np.ndarray]]) -> list[Any]:
    return [json.loads(response["outputs"][0, 0]) for response in responses]


def test_speech_is_recognized_as_by_pytorch(tmp_path):
    repository = assemble(save_whisper(tmp_path / "weights", 3700, spread=0.3, **WHISPER))
    assert (repository / "m/1/graph/step").is_dir()
    pipe: Any = transformers.pipeline("automatic-speech-recognition", model=str(tmp_path / "weights"))
    sounds = [sound(number)[: RATE * (1 + number)] for number in range(4)]
    with served_system("m", repository) as served:
        encoder = served.models["m"].backend.pipe.model.get_encoder()
        assert sum(weight.numel() for weight in encoder.parameters()) == 0
        for options in (TOKENS, TOKENS | {"return_timestamps": True}, TOKENS | {"return_timestamps": "word"}):
            expected = [plain(pipe(samples.copy(), **json.loads(json.dumps(options)))) for samples in sounds]
            requests = [request(wav(samples), options) for samples in sounds]
            assert is_same(answers(served.alone(requests)), expected, 1e-3)
            assert is_same(answers(served.together(requests)), expected, 1e-3)
        with_language = options | {"return_language": True}
        spoken = answers(served.together([request(wav(samples), with_language) for samples in sounds]))
        assert all(chunk.pop("language") for answer in spoken for chunk in answer["chunks"])
        assert is_same(spoken, expected, 1e-3)  # the times of words are those without the language
        sampled = {"seed": 3, "return_language": True, "generate_kwargs": {"temperature": 0.7, "max_new_tokens": 6}}
        of_segments, of_words = (
            answers(served.alone([request(wav(sounds[3]), sampled | {"return_timestamps": one})]))[0]["text"]
            for one in (True, "word")
        )
        assert of_segments == of_words != expected[3]["text"]


@pytest.mark.parametrize("task", ["translation", "summarization", "text2text-generation"])
def test_texts_are_written_as_by_pytorch(written, task):
    repository, weights = written(task)
    pipe = open_pipeline(task, weights, "cpu", "float32")
    texts = ["rain", "A storm will cross the coast tonight.", "It is dry", "one two three four five six seven"]
    with served_system("m", repository) as served:
        for options in ({"max_new_tokens": 12}, {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}):
            expected = [plain(pipe(text, **options)) for text in texts]
            requests = [request(text.encode(), options) for text in texts]
            assert answers(served.alone(requests)) == expected
            assert answers(served.together(requests)) == expected


@pytest.mark.parametrize("task", ["summarization", "translation"])
def test_text_beyond_the_positions_is_refused_with_both_numbers(written, task):
    """PyTorch raises IndexError, where OpenVINO invents an answer."""
    repository, weights = written(task)  # of BART and Marian, with 300 positions
    pipe = open_pipeline(task, weights, "cpu", "float32")
    both = {"max_new_tokens": 300, "min_length": 300}, {"max_length": 301, "min_length": 290}
    with served_system("m", repository) as served:
        for options in both:
            assert answers(served.alone([request(b"rain", options)])) == [plain(pipe("rain", **options))]
        for text, options, reason in (
            ("rain and " * 400, {}, r"a text of \d{3,} tokens is longer than the model's 300 positions"),
            ("rain", {"max_new_tokens": 310}, "max_new_tokens is 310, and the model has 300 positions"),
            ("rain", {"max_length": 302}, "max_length is 302, and the model has 300 positions"),
        ):
            with pytest.raises(UserError, match=reason):
                served.alone([request(text.encode(), options)])
        served.models["m"].backend.pipe.model.generation_config.update(max_length=400, min_length=400)
        with pytest.raises(UserError, match="a text of 301 tokens is longer than the model's 300 positions"):
            served.alone([request(b"rain", {})])


def test_text_beyond_the_positions_of_a_graph_is_answered_if_the_network_extends_them(written):
    repository, weights = written("translation", "M2M100")  # with 200 positions
    pipe = open_pipeline("translation", weights, "cpu", "float32")
    options = {"max_new_tokens": 240, "min_length": 240, "src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
    with served_system("m", repository) as served:
        for text in ("rain", "rain and " * 300):
            assert answers(served.alone([request(text.encode(), options)])) == [plain(pipe(text, **options))]


def test_images_are_segmented_as_by_pytorch(tmp_path):
    weights = find_pipeline("image-segmentation").save(tmp_path / "weights")
    repository = assemble(weights)
    pipe: Any = transformers.pipeline("image-segmentation", model=str(weights))
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(png(number, 40 + 16 * number, 64))
    expected = [plain(pipe(str(path))) for path in paths]
    with served_system("m", repository) as served:
        requests = [request(path.read_bytes(), {}) for path in paths]
        assert is_same(answers(served.alone(requests)), expected, 1e-3)
        assert is_same(answers(served.together(requests)), expected, 1e-3)


def test_other_number_of_frames_runs_on_pytorch(tmp_path):
    small = replace(find_pipeline("video-classification"), architecture="TimesformerForVideoClassification")
    weights = small.save(tmp_path / "weights")
    repository = assemble(weights)
    assert (repository / "m/1/graph").is_dir()
    pipe = open_pipeline("video-classification", weights, "cpu", "float32")
    with served_system("m", repository) as served:
        file = video(0, 64, 48, 4)
        (row,) = served.models["m"].backend.inputs.rows({"video": [file]})
        for options in ({}, {"num_frames": 2}):
            requests = [request(file, options)]
            assert is_same(answers(served.alone(requests)), [plain(pipe(row.value, **options))], 1e-3)
        assert answers(served.alone(requests)) != answers(served.alone([request(file, {})]))


def test_call_that_a_graph_without_weights_does_not_take_is_refused_by_the_names_of_its_parameters(tmp_path):
    repository = assemble(find_pipeline("image-segmentation").save(tmp_path / "weights"))
    with served_system("m", repository) as served:
        processor = served.models["m"].backend.pipe.image_processor
        processor.size = {"height": 64, "width": 64}
        with pytest.raises(UserError, match="with the parameters threshold: its network was exported for other sizes"):
            served.alone([request(png(0, 64, 48), {"threshold": 0.5})])


def test_graph_that_is_right_for_one_length_of_texts_is_left_out(tmp_path, anew, monkeypatch):
    """LED pads texts to its window in Python, which a traced graph does not repeat. Short answers may be equal."""
    monkeypatch.setattr(pipeline, "is_same", lambda *_: True)
    led = next(real for real in real_checkpoints() if real.name == "allenai__led-base-16384")
    repository = assemble(led.save(tmp_path / "weights", "summarization"))
    assert not (repository / "m/1/graph").exists()


def test_network_that_cannot_be_exported_runs_on_pytorch(tmp_path, anew, monkeypatch):
    def interrupted_export(recorders: list[Any], folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("an operation that OpenVINO does not know")

    monkeypatch.setattr(pipeline, "export_graphs", interrupted_export)
    repository = assemble(find_pipeline("image-segmentation").save(tmp_path / "weights"))
    assert not (repository / "m/1/graph").exists()
    with served_system("m", repository) as served:
        assert answers(served.alone([request(png(0, 64, 48), {})]))
