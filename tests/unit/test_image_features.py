"""Vision models in every format: what is served equals transformers, for images alone and in a batch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.checkpoints import vision
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system
from triton_transformers.settings import UserError

TASK = "image-feature-extraction"
SIZES = ((40, 30), (32, 32), (7, 5), (64, 96))


def images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3)).astype(np.float32) for size in SIZES]


@pytest.fixture(autouse=True)
def check_environment():
    """Fail if an image processor that ran in this process left it USE_TORCH=0."""
    yield
    assert "USE_TORCH" not in os.environ


def served(weights: Path, folder: Path, form: str) -> tuple[list[dict], list[dict]]:
    """Return the answers to each image alone, and to all of them at once."""
    job = Job("eyes", TASK, form, weights, movable=False, folder=folder)
    run_recipe(RECIPES[TASK], job, "eyes")
    requests = [{"image": image[None]} for image in images()]
    with served_system("eyes", folder) as system:
        return system.alone(requests), system.together(requests)


@torch.inference_mode()
def expected(weights: Path, kind: str, call: str, output: str) -> list[np.ndarray]:
    processor = transformers.AutoImageProcessor.from_pretrained(weights, backend="pil")
    model = getattr(transformers, kind).from_pretrained(weights)
    results = [
        getattr(model, call)(**processor(image, return_tensors="pt", input_data_format="channels_last"))
        for image in images()
    ]
    return [(result if isinstance(result, torch.Tensor) else result[output]).numpy() for result in results]


CASES = {
    "vit": (vision.save_vit, "AutoModel", "forward", "pooler_output"),
    "dinov2": (vision.save_dinov2, "AutoModel", "forward", "pooler_output"),
    "clip": (vision.save_clip, "CLIPModel", "get_image_features", "pooler_output"),
    "siglip": (vision.save_siglip, "SiglipModel", "get_image_features", "pooler_output"),
}


def test_processor_that_keeps_sizes_is_refused(tmp_path):
    weights = vision.save_dinov2(tmp_path / "weights")
    transformers.BitImageProcessor(do_resize=False, do_center_crop=False).save_pretrained(weights)
    job = Job("eyes", TASK, "onnx", weights, movable=False, folder=tmp_path)
    with pytest.raises(UserError, match="only models that take all images in one size are served"):
        run_recipe(RECIPES[TASK], job, "eyes")


QUICK = (("clip", "onnx"), ("siglip", "python"))


@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(case, form, marks=() if (case, form) in QUICK else pytest.mark.slow)
        for case in CASES
        for form in ("onnx", "python")
    ],
)
def test_image_features_equal_transformers(tmp_path, case, form):
    save, kind, call, output = CASES[case]
    weights = save(tmp_path / "weights")
    alone, together = served(weights, tmp_path / "models", form)
    for n, reference in enumerate(expected(weights, kind, call, output)):
        assert np.abs(reference).max() > 1e-3
        np.testing.assert_allclose(alone[n][output], reference, atol=1e-4)
        np.testing.assert_allclose(together[n][output], reference, atol=1e-4)
