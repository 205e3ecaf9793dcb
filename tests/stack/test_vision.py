"""The published vision systems on the real server: sizes of images, every wrong request, and the comparison."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import tritonclient.http as httpclient
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.support.batches import batches_of
from tests.support.checkpoints import vision
from tests.support.stacks import SHORT, TestStack
from triton_transformers.settings import ROOT, UserError

pytestmark = pytest.mark.slow

BOTH_SYSTEMS = ("vit_ensemble", "python_vit")
SIZES = ((40, 30), (7, 5), (180, 320))  # tests/conformance/tasks has more


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "vit": vision.save_vit(folder / "vit"),
        "classifier": vision.save_vit_classifier(folder / "classifier"),
        "dinov2": vision.save_dinov2(folder / "dinov2"),
    }


@pytest.fixture(scope="module")
def served(stack, checkpoints) -> TestStack:
    stack.assemble(
        {"SYSTEMS": "vit_ensemble", "SOURCE": checkpoints["vit"]},
        {"SYSTEMS": "python_vit", "SOURCE": checkpoints["vit"]},
    )
    return stack.serve("vit_ensemble", "ensemble_model", "python_vit")


# --- images -----------------------------------------------------------------------------------------------------------


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return a smooth image, so that a resize matters, different for each seed."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, kind, **options)
    return file.getvalue()


def header_only(side: int) -> bytes:
    """Return a PNG whose header promises side x side pixels. Decoding it fails."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT"


# --- any image size ---------------------------------------------------------------------------------------------------


def ask(served, model: str, image: np.ndarray | None = None, image_bytes: list[bytes] | None = None):
    inputs = []
    if image is not None:
        inputs.append(httpclient.InferInput("image", list(image.shape), "FP32"))
        inputs[-1].set_data_from_numpy(image.astype(np.float32))
    if image_bytes is not None:
        inputs.append(httpclient.InferInput("image_bytes", [len(image_bytes), 1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array(image_bytes, np.object_).reshape(-1, 1))
    return httpclient.InferenceServerClient(served.http.removeprefix("http://")).infer(model, inputs)


@torch.inference_mode()
def plain(folder: Path, images: list):
    """Return the answer of transformers without a server."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images, return_tensors="pt", input_data_format="channels_last")
    return transformers.AutoModel.from_pretrained(folder)(**inputs)


def check_features(answer, expected) -> None:
    for name in ("last_hidden_state", "pooler_output"):
        np.testing.assert_allclose(answer.as_numpy(name), expected[name].numpy(), atol=1e-4)


@pytest.mark.parametrize("model", BOTH_SYSTEMS)
@pytest.mark.parametrize("size", SIZES)
def test_any_image_size_equals_transformers(served, checkpoints, model, size):
    image = pixels(*size)
    expected = plain(checkpoints["vit"], [Image.fromarray(image)])
    check_features(ask(served, model, image=image[None]), expected)
    check_features(ask(served, model, image_bytes=[encoded(image)]), expected)


@pytest.mark.parametrize("model", [*BOTH_SYSTEMS, "ensemble_model"])
def test_one_request_may_mix_image_sizes(served, checkpoints, model):
    images = [pixels(*size, seed) for seed, size in enumerate(SIZES)]
    expected = plain(checkpoints["vit"], [Image.fromarray(image) for image in images])
    check_features(ask(served, model, image_bytes=[encoded(image) for image in images]), expected)
    same = np.stack([pixels(40, 30, seed) for seed in range(4)])
    check_features(ask(served, model, image=same), plain(checkpoints["vit"], list(same)))


def test_vit_without_config_is_completed(served):
    assert not (served.folder / "models/vit/config.pbtxt").exists()
    config = served.triton.config("vit")
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config


# --- concurrent requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "batches"), [("python_vit", "python_vit"), ("vit_ensemble", "preprocessing")])
def test_mixed_sizes_share_a_batch_and_errors_stay_apart(served, checkpoints, model, batches):
    images = [pixels(20 + 9 * n, 90 - 7 * n, n) for n in range(8)]
    expected = plain(checkpoints["vit"], [Image.fromarray(image) for image in images])
    damaged = (3, 7)
    requests_by_input = {
        "image": [image[None] - 1000.0 * (n in damaged) for n, image in enumerate(images)],
        "image_bytes": [[encoded(image)[: 300 if n in damaged else None]] for n, image in enumerate(images)],
    }

    def answer(name: str, image):
        try:
            return ask(served, model, **{name: image})
        except InferenceServerException as error:
            return error

    with batches_of(served, batches, len(images)), ThreadPoolExecutor(len(images)) as clients:
        for name, requests in requests_by_input.items():
            before = served.triton.statistics()[batches]
            answers = list(clients.map(partial(answer, name), requests))
            assert served.executions(batches, len(images) - len(damaged), before) == 1
            for n, result in enumerate(answers):
                if n in damaged:
                    assert result.status() == "400"
                    assert f"input '{name}'" in result.message()
                else:
                    check_features(result, {name: value[n : n + 1] for name, value in expected.items()})


# --- wrong images -----------------------------------------------------------------------------------------------------

GOOD = pixels(20, 20)
# tests/serving/vision/test_processor.py has the others. Triton checks some of these, and the backend the rest.
REFUSED = {
    "half a file": ({"image_bytes": [encoded(GOOD, "JPEG")[:-100]]}, "input 'image_bytes': row 0 is not a whole"),
    "too large": ({"image_bytes": [header_only(60_000)]}, "60000 x 60000 pixels, too many for max_pixels=50000000"),
    "below 0": ({"image": GOOD[None] - 1000.0}, "input 'image' must hold numbers from 0 to 255"),
    "four channels": ({"image": np.zeros((1, 20, 20, 4))}, "input 'image'"),
    "no channel": ({"image": np.zeros((1, 20, 20))}, "input 'image'"),
    "no image": ({"image": np.zeros((0, 20, 20, 3))}, "image"),
    "both inputs": ({"image": GOOD[None], "image_bytes": [encoded(GOOD)]}, "'image' and 'image_bytes'"),
    "neither input": ({}, ""),
}


@pytest.mark.parametrize("model", BOTH_SYSTEMS)
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_image_gets_400_with_the_reason(served, model, case):
    inputs, reason = REFUSED[case]
    with pytest.raises(InferenceServerException) as error:
        ask(served, model, **inputs)
    assert error.value.status() == "400", error.value.message()
    assert reason in error.value.message()


def test_smoke_sends_images(served):
    done = served.make("smoke")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dino(served, checkpoints) -> str:
    output = served.assemble({"SYSTEMS": "dino", "SOURCE": checkpoints["dinov2"], "FORMAT": "onnx-int8"})
    served.triton.load("dino")
    return output


def test_int8_reports_its_gain_and_stays_close(served, checkpoints, dino):
    image = pixels(180, 320)
    expected = plain(checkpoints["dinov2"], [Image.fromarray(image)]).pooler_output.numpy().ravel()
    vector = ask(served, "dino", image=image[None]).as_numpy("pooler_output").ravel()
    assert not np.allclose(vector, expected, atol=1e-6)
    assert vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected) > 0.95
    for word in ("int8: ", "times as fast", "cosine with fp32 at least"):
        assert word in dino


def test_extreme_aspect_ratio_is_refused(served, dino):
    """This processor enlarges the shorter edge to 36 pixels, and the longer one in proportion."""
    with pytest.raises(InferenceServerException, match="50000 x 1 pixels, too many for max_pixels"):
        ask(served, "dino", image_bytes=[encoded(np.zeros((1, 50_000, 3), np.uint8))])


def test_unfit_weights_are_refused(served, checkpoints):
    with pytest.raises(UserError, match="has no pooler"):
        served.assemble({"SYSTEMS": "vit_ensemble", "SOURCE": checkpoints["classifier"]})
    check_features(ask(served, "vit_ensemble", image=GOOD[None]), plain(checkpoints["vit"], [GOOD]))


def test_own_config_allows_larger_batches(served, checkpoints):
    (config,) = blocks("protobuf")
    (served.folder / "models/vit/config.pbtxt").write_text(config)
    ensemble = served.folder / "models/vit_ensemble/config.pbtxt"
    ensemble.write_text(ensemble.read_text().replace("max_batch_size: 4", "max_batch_size: 32"))
    done = served.make("up")
    assert done.returncode == 0, done.stdout + done.stderr
    images = np.stack([pixels(40, 30, seed) for seed in range(7)])
    check_features(ask(served, "vit_ensemble", image=images), plain(checkpoints["vit"], list(images)))


# --- docs/models.md ---------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    section = (ROOT / "docs/models.md").read_text().split("\n## Images\n")[1].split("\n### ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", [block for block in blocks("sh") if "curl" in block])
def test_documented_requests_work(served, tmp_path, block):
    (tmp_path / "picture.jpg").write_bytes(encoded(pixels(200, 300), "JPEG"))
    command = ["bash", "-euo", "pipefail", "-c", block.replace("http://localhost:8000", served.http)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert '"name":"pooler_output"' in done.stdout, done.stdout + done.stderr


def test_documented_program_works(served, tmp_path):
    (tmp_path / "picture.jpg").write_bytes(encoded(pixels(200, 300), "JPEG"))
    (program,) = blocks("python")
    command = [sys.executable, "-c", program.replace("localhost:8000", served.http.removeprefix("http://"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "(1, 32)\n", done.stderr


@pytest.mark.slowest
def test_comparison_runs_on_images(served):
    # Over gRPC and with workers, because images are larger than texts.
    done = served.make("loadtest", SYSTEM="vit_ensemble", PROTOCOL="grpc", WORKERS=2, **SHORT)
    assert "images per batch (" in done.stdout, done.stdout + done.stderr
    results = served.results()
    # Compare the means of all windows: on a busy machine, Triton may run no batch of a tiny model in one of them.
    batches = {mode: figures["mean_batch"] for mode, figures in results["modes"].items()}
    assert batches["dynamic"] > batches["none"] == pytest.approx(1, abs=0.02), done.stdout + done.stderr
    assert results["settings"]["images"]["count"] >= 24
    assert results["modes"]["dynamic"]["failures"] == results["modes"]["none"]["failures"] == 0
