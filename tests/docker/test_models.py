"""Models that need torch: the exporter makes them, and Triton's image can run them."""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints.language import save_gpt2
from tests.support.checkpoints.vision import save_vit

pytestmark = pytest.mark.timeout(1800)
TOKEN = "hf_a-secret-of-the-tests"


@pytest.fixture(scope="module")
def served(new_stack, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    stack = new_stack()
    for name, source in (("story", save_gpt2(folder / "story")), ("vit_ensemble", save_vit(folder / "vit"))):
        done = stack.make("models", timeout=1500, SYSTEMS=name, SOURCE=source, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
    stack.environment["SYSTEMS"] = "story vit_ensemble"
    done = stack.make("up", timeout=1500, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    yield stack
    stack.make("down")  # the test of `make clean` cannot remove an image in use


def test_image_with_transformers_is_chosen_and_serves(served):
    assert served.inspect("triton-cpu")["Config"]["Image"] == served.image("cpu-pypi-transformers")
    smoke = served.make("smoke")
    assert smoke.stdout.split() == ["ok", "story", "ok", "vit_ensemble"], smoke.stderr
    inputs = [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["I am going"]}]
    (text,) = served.triton.infer("story", {"inputs": inputs})["outputs"][0]["data"]
    assert text.startswith("I am going")
    assert len(text) > len("I am going")


def test_hub_token_stays_with_the_exporter(served):
    assert TOKEN not in json.dumps(served.inspect("triton-cpu"))
    assert TOKEN not in served.log
