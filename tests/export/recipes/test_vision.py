"""Models of images, and of texts and images, in every format: what is served equals transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import TEXT_IMAGE, task_of
from tests.support.checkpoints import encoders, vision
from tests.support.served import assemble, check, request
from triton_transformers.corpus import MIXED
from triton_transformers.model_config import read_config, with_steps
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")

TEXTS = [*MIXED.texts[:6], "a", "", "word " * 100, "<|endoftext|> after the end"]
SIZES = ((40, 30), (32, 32), (7, 5), (64, 96))
PADDED = {"padding": "max_length", "max_length": encoders.POSITIONS}
VECTOR = "sentence_embedding"
slow = pytest.mark.slow


@cache
def images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


@pytest.fixture(autouse=True)
def check_environment():
    """Fail if an image processor that ran in this process left it USE_TORCH=0."""
    yield
    assert "USE_TORCH" not in os.environ


def check_images(folder: Path, expected: list[np.ndarray], output: str = VECTOR, system: str = "m") -> None:
    check(folder, [{"image": image[None].astype(np.float32)} for image in images()], output, expected, system)


def check_texts(folder: Path, expected: list[np.ndarray], texts: Sequence[str] = TEXTS, system: str = "m_text") -> None:
    check(folder, [request([text]) for text in texts], VECTOR, expected, system)


@torch.inference_mode()
def text_features(weights: Path, texts: Sequence[str] = TEXTS, **options) -> list[np.ndarray]:
    model = transformers.AutoModel.from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokens = [tokenizer(text, truncation=True, return_tensors="pt", **options) for text in texts]
    return [model.get_text_features(**own).pooler_output.numpy() for own in tokens]


@torch.inference_mode()
def image_features(weights: Path, call: str = "get_image_features") -> list[np.ndarray]:
    model = transformers.AutoModel.from_pretrained(weights)
    processor = transformers.AutoImageProcessor.from_pretrained(weights, backend="pil")
    pixels = [processor(image, return_tensors="pt") for image in images()]
    return [getattr(model, call)(**own).pooler_output.numpy() for own in pixels]


@pytest.mark.parametrize(
    ("save", "call", "form"),
    [
        (vision.save_clip, "get_image_features", "onnx"),
        (vision.save_siglip, "get_image_features", "python"),
        pytest.param(vision.save_clip, "get_image_features", "python", marks=slow),
        pytest.param(vision.save_siglip, "get_image_features", "onnx", marks=slow),
        *(pytest.param(vision.save_vit, "forward", form, marks=slow) for form in ("onnx", "python")),
        *(pytest.param(vision.save_dinov2, "forward", form, marks=slow) for form in ("onnx", "python")),
    ],
)
def test_image_features_equal_transformers(tmp_path, save, call, form):
    weights = save(tmp_path / "weights")
    folder = assemble(weights, tmp_path / "models", form, "image-feature-extraction")
    check_images(folder, image_features(weights, call), "pooler_output")


@pytest.mark.parametrize(
    ("save", "option", "form", "options"),
    [
        (vision.save_clip, False, "onnx", {}),
        (vision.save_siglip, False, "python", PADDED),  # reads the padding of texts
        pytest.param(vision.save_clip, True, "onnx", {}, marks=slow),  # as earlier releases saved it
        pytest.param(vision.save_clip, True, "python", {}, marks=slow),
        pytest.param(vision.save_siglip, False, "onnx", PADDED, marks=slow),
        pytest.param(vision.save_siglip, True, "onnx", PADDED, marks=slow),  # with a mask
    ],
)
def test_texts_and_images_equal_transformers(tmp_path, save, option, form, options):
    weights = save(tmp_path / "weights", option)
    assert task_of(Checkpoint("m", weights)) == TEXT_IMAGE
    folder = assemble(weights, tmp_path / "models", form)
    check_texts(folder, text_features(weights, **options))
    check_images(folder, expected := image_features(weights), system="m_image")
    assert with_steps("m", folder)[:3] == ["m", "m_text", "m_image"]
    front = read_config(folder / "m/config.pbtxt")
    assert front.backend == "text_or_image"
    outputs = {output.name: output.dims for output in front.outputs}
    assert outputs == {"token_count": (1,), VECTOR: expected[0].shape[1:]}


def test_own_tokenizer_of_siglip_is_converted(tmp_path):
    weights = vision.save_siglip(tmp_path / "weights", own_tokenizer=True)
    assert not transformers.AutoTokenizer.from_pretrained(weights).is_fast
    folder = assemble(weights, tmp_path / "models", "python")
    texts = [*MIXED.texts[:40], "  A Cat, on a  SOFA!", "'quoted'", "tab\tnew\nline", "漢字 漢", "", "word " * 100]
    check_texts(folder, text_features(weights, texts, **PADDED), texts)


def test_sentence_transformer_of_texts_and_images_equals_its_library(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    vision.save_clip(tmp_path / "plain")
    modules = [Transformer(str(tmp_path / "plain")), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "weights"))
    library = SentenceTransformer(str(tmp_path / "weights"), device="cpu")
    folder = assemble(tmp_path / "weights", tmp_path / "models")
    check_texts(folder, [library.encode([text]) for text in TEXTS])
    check_images(folder, [library.encode([Image.fromarray(image)]) for image in images()], system="m_image")


@torch.inference_mode()
def test_text_half_alone_equals_transformers(tmp_path):
    tokenizer = encoders.clip_bpe()
    options = {"positions": encoders.POSITIONS, "projection_dim": 24, "initializer_range": 0.1}
    weights = encoders.save(tmp_path / "weights", "CLIPTextModelWithProjection", tokenizer, **options)
    model = transformers.CLIPTextModelWithProjection.from_pretrained(weights)
    expected = [model(**tokenizer(text, truncation=True, return_tensors="pt")).text_embeds.numpy() for text in TEXTS]
    check_texts(assemble(weights, tmp_path / "models"), expected, system="m")


def test_name_of_the_catalogue_is_refused(tmp_path):
    weights = vision.save_clip(tmp_path / "weights")
    with pytest.raises(UserError, match="embedding has a configuration in git, for another task"):
        assemble(weights, tmp_path / "models", system="embedding")
