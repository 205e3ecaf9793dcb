"""Models of texts and images, and their text half alone: what is served equals transformers, in every format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.support.checkpoints import encoders, vision
from triton_transformers.corpus import MIXED
from triton_transformers.model_config import read_config, with_steps
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system
from triton_transformers.models.tasks import TEXT_IMAGE, task_of
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TEXTS = [*MIXED.texts[:6], "a", "", "word " * 100, "<|endoftext|> after the end"]
SIZES = ((40, 30), (32, 32), (7, 5), (64, 96))


@cache
def images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


def assembled(weights: Path, folder: Path, form: str = "onnx", task: str = TEXT_IMAGE) -> Path:
    run_recipe(RECIPES[task], Job("eyes", task, form, weights, movable=False, folder=folder), "eyes")
    return folder


def check_texts(system: str, folder: Path, expected: list[np.ndarray], texts: Sequence[str] = TEXTS) -> None:
    check(system, folder, [{"input_text": np.array([[text.encode()]], np.object_)} for text in texts], expected)


def check_images(system: str, folder: Path, expected: list[np.ndarray]) -> None:
    check(system, folder, [{"image": image[None].astype(np.float32)} for image in images()], expected)


def check(system: str, folder: Path, requests: list[dict], expected: list[np.ndarray]) -> None:
    with served_system(system, folder) as served:
        alone, together = served.alone(requests), served.together(requests)
    for n, vector in enumerate(expected):
        assert np.abs(vector).max() > 1e-3
        for answers in (alone, together):
            np.testing.assert_allclose(answers[n]["sentence_embedding"], vector, atol=1e-4)


@torch.inference_mode()
def text_features(weights: Path, texts: Sequence[str] = TEXTS, **options) -> list[np.ndarray]:
    model = transformers.AutoModel.from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokens = [tokenizer(text, truncation=True, return_tensors="pt", **options) for text in texts]
    return [model.get_text_features(**own).pooler_output.numpy() for own in tokens]


@torch.inference_mode()
def image_features(weights: Path) -> list[np.ndarray]:
    model = transformers.AutoModel.from_pretrained(weights)
    processor = transformers.AutoImageProcessor.from_pretrained(weights, backend="pil")
    pixels = [processor(image, return_tensors="pt") for image in images()]
    return [model.get_image_features(**own).pooler_output.numpy() for own in pixels]


@pytest.mark.parametrize(
    ("form", "legacy"),
    [
        ("onnx", False),
        pytest.param("onnx", True, marks=pytest.mark.slow),
        pytest.param("python", True, marks=pytest.mark.slow),
    ],
)
def test_clip_equals_transformers(tmp_path, form, legacy):
    weights = vision.save_clip(tmp_path / "weights", legacy)
    assert task_of(weights) == TEXT_IMAGE
    folder = assembled(weights, tmp_path / "models", form)
    check_texts("eyes_text", folder, text_features(weights))
    check_images("eyes_image", folder, image_features(weights))
    assert with_steps("eyes", folder)[:3] == ["eyes", "eyes_text", "eyes_image"]
    front = read_config(folder / "eyes/config.pbtxt")
    assert front.backend == "text_or_image"
    outputs = {output.name: output.dims for output in front.outputs}
    assert outputs == {"token_count": (1,), "sentence_embedding": (24,)}


@pytest.mark.parametrize(
    ("form", "has_mask"),
    [
        ("python", False),
        pytest.param("onnx", False, marks=pytest.mark.slow),
        pytest.param("onnx", True, marks=pytest.mark.slow),
    ],
)
def test_siglip_reads_the_padding_of_texts(tmp_path, form, has_mask):
    weights = vision.save_siglip(tmp_path / "weights", has_mask)
    folder = assembled(weights, tmp_path / "models", form)
    check_texts("eyes_text", folder, text_features(weights, padding="max_length", max_length=encoders.POSITIONS))
    check_images("eyes_image", folder, image_features(weights))


def test_own_tokenizer_of_siglip_is_converted(tmp_path):
    weights = vision.save_siglip(tmp_path / "weights", own_tokenizer=True)
    assert not transformers.AutoTokenizer.from_pretrained(weights).is_fast
    folder = assembled(weights, tmp_path / "models", "python")
    texts = [*MIXED.texts[:40], "  A Cat, on a  SOFA!", "'quoted'", "tab\tnew\nline", "漢字 漢", "", "word " * 100]
    expected = text_features(weights, texts, padding="max_length", max_length=encoders.POSITIONS)
    check_texts("eyes_text", folder, expected, texts)


def test_sentence_transformer_of_texts_and_images_equals_its_library(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    vision.save_clip(tmp_path / "plain")
    modules = [Transformer(str(tmp_path / "plain")), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "weights"))
    library = SentenceTransformer(str(tmp_path / "weights"), device="cpu")
    assert task_of(tmp_path / "weights") == TEXT_IMAGE
    folder = assembled(tmp_path / "weights", tmp_path / "models")
    check_texts("eyes_text", folder, [library.encode([text]) for text in TEXTS])
    check_images("eyes_image", folder, [library.encode([Image.fromarray(image)]) for image in images()])


@torch.inference_mode()
def test_text_half_alone_equals_transformers(tmp_path):
    tokenizer = encoders.clip_bpe()
    size = {**encoders.SIZE, "vocab_size": len(tokenizer), "projection_dim": 24, "initializer_range": 0.1}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPTextConfig(**size, **tokens, max_position_embeddings=encoders.POSITIONS)
    weights = encoders.save(tmp_path / "weights", "CLIPTextModelWithProjection", config, tokenizer)
    task = task_of(weights)
    assert task == "sentence-similarity"
    folder = assembled(weights, tmp_path / "models", task=task)
    model = transformers.CLIPTextModelWithProjection.from_pretrained(weights)
    expected = [model(**tokenizer(text, truncation=True, return_tensors="pt")).text_embeds.numpy() for text in TEXTS]
    check_texts("eyes", folder, expected)


def test_name_of_the_catalogue_is_refused(tmp_path):
    weights = vision.save_clip(tmp_path / "weights")
    job = Job("embedding", TEXT_IMAGE, "onnx", weights, movable=False, folder=tmp_path)
    with pytest.raises(UserError, match="embedding has a configuration in git, for another task"):
        run_recipe(RECIPES[TEXT_IMAGE], job, "embedding")
