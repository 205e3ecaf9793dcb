"""Models from a stand-in of the Hub, served by Triton: downloads, their errors, and the package."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from tests.support.checkpoints import encoders
from tests.support.hub_stand_in import TOKEN, HubStandIn, Published, hub_stand_in
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED

pytestmark = pytest.mark.slow

TEXTS = MIXED.texts[:8]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, Published]:
    folder = tmp_path_factory.mktemp("published")
    model = encoders.save_bert(folder, "ForSequenceClassification", **encoders.labels(encoders.MOODS))
    return {
        "tests/mood": Published(model, refs=("main", "v1")),
        "tests/gated": Published(model, gated=True),
        "tests/private": Published(model, private=True),
    }


@pytest.fixture(scope="module")
def hub(published) -> Iterator[HubStandIn]:
    with hub_stand_in(published) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def served(new_stack, hub) -> TestStack:
    """Assemble and start with the two documented commands."""
    stack = new_stack()
    stack.environment["HF_ENDPOINT"] = hub.url
    for target, settings in (("models", {"HF_MODEL": "tests/mood"}), ("up", {})):
        done = stack.make(target, SYSTEMS="mood", **settings)
        assert done.returncode == 0, done.stdout + done.stderr
    return stack


def scores(stack: TestStack) -> np.ndarray:
    request = {"inputs": [{"name": "input_text", "shape": [len(TEXTS), 1], "datatype": "BYTES", "data": TEXTS}]}
    answer = {output["name"]: output for output in stack.triton.infer("mood", request)["outputs"]}
    assert set(answer["label"]["data"]) <= set(encoders.MOODS)
    return np.array(answer["scores"]["data"])


def contents(repository: Path) -> dict[str, str]:
    """Return the hash of every file, except those of unfinished downloads."""
    files = [path for path in repository.rglob("*") if path.is_file() and ".downloads" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def models_of(stack: TestStack) -> Path:
    return Path(stack.environment["MODEL_REPOSITORY"])


def downloads_of(stack: TestStack, name: str) -> list[Path]:
    return list(models_of(stack).glob(f".downloads/{name}@*"))


def test_hub_model_is_served(served, published):
    assert scores(served).shape == (len(TEXTS) * len(encoders.MOODS),)
    record = json.loads((models_of(served) / "mood/1/assembled.json").read_text())
    assert record["identity"] == f"tests/mood@{published['tests/mood'].commit}"
    assert not (models_of(served) / ".downloads").exists()


def test_assembled_system_sends_the_hub_no_request(served, hub):
    before = hub.requests
    for settings in ({}, {"HF_MODEL": "tests/mood"}):
        done = served.make("models", SYSTEMS="mood", **settings)
        assert (done.returncode, done.stdout) == (0, "mood: in place\n"), done.stdout + done.stderr
    assert hub.requests == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HF_MODEL": "tests/gated"}, "tests/gated is gated: accept its licence on"),
        ({"HF_MODEL": "tests/private"}, "the Hub has no such model, or it is private: then set HF_TOKEN in .env"),
        ({"HF_MODEL": "tests/private", "HF_TOKEN": "hf_secret"}, "the Hub does not accept HF_TOKEN"),
        ({"HF_MODEL": "tests/mood", "HF_REVISION": "v9"}, "tests/mood has no revision v9"),
        ({"HF_MODEL": "tests/other", "HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_hub_error_is_one_sentence_and_changes_nothing(served, settings, message):
    before = contents(models_of(served))
    done = served.make("models", SYSTEMS="mood", **settings)
    assert done.returncode != 0
    sentences = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(sentences) == 1 and sentences[0].startswith("error: ") and message in sentences[0], done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    assert contents(models_of(served)) == before


def test_killed_download_changes_nothing_and_is_resumed(served, hub):
    before = contents(models_of(served))
    hub.served.clear()
    hub.held = ".safetensors"
    # The same commit under another name and in another format is assembled again.
    process = served.start_make("models", SYSTEMS="mood", HF_MODEL="tests/mood", HF_REVISION="v1", FORMAT="python")
    deadline = time.monotonic() + 300
    while not any(name.endswith(".safetensors") for name, _ in hub.served):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert contents(models_of(served)) == before
    assert downloads_of(served, "tests--mood")

    hub.served.clear()
    hub.held = ""
    settings = {"HF_MODEL": "tests/mood", "HF_REVISION": "v1", "FORMAT": "python"}
    done = served.make("models", SYSTEMS="mood", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "config.json" not in dict(hub.served)
    assert not downloads_of(served, "tests--mood")
    assert served.make("models", SYSTEMS="mood", **settings).stdout == "mood: in place\n"


def test_private_model_needs_its_token(served):
    done = served.make("models", SYSTEMS="mine", HF_MODEL="tests/private", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    written = [path.read_bytes() for path in served.folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*written, done.stdout.encode(), done.stderr.encode()])


def test_package_serves_the_same_answers(served, new_stack, tmp_path):
    assert served.make("models", SYSTEMS="mood", HF_MODEL="tests/mood", FORMAT="onnx").returncode == 0
    assert served.make("up", SYSTEMS="mood").returncode == 0
    done = served.make("package", SYSTEMS="mood", PACKAGE=tmp_path / "mood.zip")
    assert done.returncode == 0, done.stdout + done.stderr
    with ZipFile(tmp_path / "mood.zip") as archive:
        archive.extractall(tmp_path)
    other = new_stack()
    other.environment["MODEL_REPOSITORY"] = str(tmp_path / "model_repository")
    done = other.make("up", SYSTEMS="mood")
    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_array_equal(scores(other), scores(served))


def test_list_shows_the_model(served):
    done = served.make("models", LIST=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/mood@c0ffeec0ffee" in done.stdout
    assert "tiiuae/falcon-7b" in done.stdout
