"""PROFILE=cuda: the same models and requests on a GPU give the answers of plain transformers on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.docker.conftest import docker
from tests.support import generation
from tests.support.checkpoints import encoders
from tests.support.checkpoints.language import save_gpt2
from tests.support.checkpoints.vision import save_vit
from triton_transformers.triton import engines

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        "nvidia" not in docker("info", "--format", "{{json .Runtimes}}"),
        reason="this Docker engine has no NVIDIA runtime, so there is no GPU to run on",
    ),
]
# System -> its model that computes.
COMPUTES = {"story": "story_stream", "gpt2_ensemble": "gpt2", "vit_ensemble": "vit", "mood": "mood_encoder"}
PROMPT = "I am going"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    gpt2 = save_gpt2(folder / "gpt2", width=128)  # in float32, vLLM's attention takes heads of at least 32
    mood = encoders.save_bert(folder / "mood", "ForSequenceClassification", **encoders.labels(encoders.MOODS))
    return {"story": gpt2, "gpt2_ensemble": gpt2, "vit_ensemble": save_vit(folder / "vit"), "mood": mood}


@pytest.fixture(scope="module")
def served(new_stack, checkpoints):
    stack = new_stack()
    stack.environment["PROFILE"] = "cuda"
    for name, source in checkpoints.items():
        done = stack.make("models", timeout=1500, SYSTEMS=name, SOURCE=source)
        assert done.returncode == 0, done.stdout + done.stderr
    stack.environment["SYSTEMS"] = " ".join([*checkpoints, "gpt2_generate"])
    done = stack.make("up", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return stack


def ask(stack, model: str, name: str, data: list, shape: list[int], kind: str = "BYTES") -> dict[str, np.ndarray]:
    inputs = [{"name": name, "shape": shape, "datatype": kind, "data": data}]
    answer = stack.triton.infer(model, {"inputs": inputs}, timeout=120)
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}


@pytest.mark.parametrize("system", COMPUTES)
def test_computing_model_is_on_the_gpu(served, system):
    assert served.triton.config(COMPUTES[system])["instance_group"][0]["kind"] == "KIND_GPU"
    assert served.make("smoke", SYSTEMS=system).returncode == 0


def test_vllm_generates_beside_the_other_systems(served):
    """One container, which has vLLM, serves all systems."""
    assert served.inspect("triton-cuda")["Config"]["Image"] == served.image("cuda-vllm")
    used = engines(f"http://127.0.0.1:{served.environment['TRITON_METRICS_PORT']}")
    assert used["story_stream"] == "vllm float32"
    assert "story" not in used


def test_text_is_the_same_alone_streamed_and_among_others(served):
    options = {"max_new_tokens": 40}
    alone = generation.text(served, "story", PROMPT, **options)
    prompts = [PROMPT, *generation.PROMPTS * 4]
    texts = generation.send_concurrently(
        len(prompts), lambda number: generation.text(served, "story", prompts[number], **options)
    )
    assert texts[0] == alone == "".join(generation.pieces(served, "story_stream", PROMPT, **options))


def test_generated_texts_are_those_of_the_cpu(served, checkpoints):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints["story"])
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["story"])
    tokens = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert expected.startswith(ask(served, "gpt2_ensemble", "TEXT", [PROMPT], [1])["out"][0], len(PROMPT))
    assert (PROMPT + ask(served, "gpt2_generate", "TEXT", [PROMPT], [1])["out"][0]) == expected
    assert ask(served, "story", "prompt", [PROMPT], [1])["text"][0].startswith(expected)


def test_numbers_are_those_of_the_cpu(served, checkpoints):
    classify = transformers.pipeline("text-classification", model=str(checkpoints["mood"]), device="cpu", top_k=None)
    scores = {score["label"]: score["score"] for score in classify("It was raining")}
    answer = ask(served, "mood", "input_text", ["It was raining"], [1, 1])
    np.testing.assert_allclose(answer["scores"][0], [scores[name] for name in encoders.MOODS], atol=1e-3)
    pixels = np.full((1, 40, 30, 3), 200, np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoints["vit_ensemble"], backend="pil")
    with torch.inference_mode():
        model = transformers.AutoModel.from_pretrained(checkpoints["vit_ensemble"])
        expected = model(**processor(list(pixels), return_tensors="pt")).last_hidden_state.numpy()
    answer = ask(served, "vit_ensemble", "image", pixels.ravel().tolist(), list(pixels.shape), "FP32")
    np.testing.assert_allclose(answer["last_hidden_state"], expected, atol=1e-2)
