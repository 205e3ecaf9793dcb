"""OpenVINO GenAI computes in bfloat16 if the format or the parameter `dtype` asks for it and the CPU can."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.catalogue import FormatUnavailable, Job
from export.recipes.language.recipe import assemble
from export.sources.source import Weights
from serving.generation.openvino import trial
from serving.triton import parameters
from serving.triton.types import ConfigError
from tests.serving.generation.openvino.test_draft import add_adapter
from tests.serving.generation.openvino.test_engine import PROMPTS, export, start, text, together
from tests.support.checkpoints import language
from tests.support.checkpoints.lora import save_adapter
from tests.support.python_backend import InferenceRequest

needs_bf16 = pytest.mark.skipif(not parameters.has_bf16(), reason="this CPU has no bf16 instructions")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return language.save_llama(tmp_path_factory.mktemp("weights") / "base")


@pytest.fixture(scope="module", params=["", "draft model"])
def model(request, pb_utils, tmp_path_factory, weights):
    """Serve a Llama with an adapter in bfloat16, with and without a draft model."""
    folder = tmp_path_factory.mktemp("served")
    draft = Weights(weights, "near", "") if request.param else None
    outcome = assemble(Job("x", "text-generation", "openvino-bf16", weights, False, folder, draft=draft))
    assert re.search(r"computed in bfloat16: perplexity \S+ instead of", outcome.summary)
    assert (outcome.facts["weights"], outcome.facts["dtype"]) == ("fp16", "bfloat16")
    add_adapter(save_adapter(folder / "tone", weights, layers="q_proj|v_proj"), folder / "x/1")
    backend = start(folder / "x", max_batch=8)
    assert backend.engine.precision == ", ".join(filter(None, ["bfloat16", request.param]))
    yield backend
    backend.finalize()


@needs_bf16
def test_tokens_have_almost_the_probability_that_transformers_gives_them(model, weights):
    tokenizer, network = AutoTokenizer.from_pretrained(weights), AutoModelForCausalLM.from_pretrained(weights)
    differences: list[float] = []
    for prompt in PROMPTS:
        request = InferenceRequest(["logprobs"], {"logprobs": 0, "max_new_tokens": 8}, prompt=[prompt.encode()])
        model.execute([request])
        assert request.sender.finished.wait(60)
        (response,) = request.sender.responses
        new = json.loads(response.outputs["logprobs"][0])
        tokens = [*tokenizer(prompt).input_ids, *(token["id"] for token in new)]
        with torch.no_grad():
            scores = torch.log_softmax(network(torch.tensor([tokens])).logits[0, -len(new) - 1 : -1], -1)
        right = scores[range(len(new)), tokens[-len(new) :]]
        differences += (right - torch.tensor([token["logprob"] for token in new])).abs().tolist()
    assert 1e-3 < np.mean(differences) < 0.2  # float32: less than 1e-5


@needs_bf16
def test_structures_adapters_and_seeds_work_as_in_float32(model):
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    alone = text(model, "I am going", **sampling)
    assert text(model, "I am going", **sampling) == alone
    assert text(model, "I am going", **sampling | {"seed": 8}) != alone
    assert text(model, "I am going", lora_name="tone") != text(model, "I am going")
    assert len(set(together(model, PROMPTS * 2))) == len(PROMPTS)
    if not model.engine.draft.kind:
        structure = json.dumps({"regex": "(yes|no|maybe)( and (yes|no|maybe))*"})
        answer = text(model, "I am going", structured_outputs=structure, max_new_tokens=3)
        assert re.match("I am going(yes|no|maybe)", answer)


@needs_bf16
@pytest.mark.parametrize(
    ("form", "parameters", "precision"),
    [
        ("openvino", {"dtype": "bfloat16"}, "int8, bfloat16"),
        ("openvino-fp32", {"dtype": "bfloat16", "cache_precision": "u8"}, "bfloat16"),
        ("openvino-bf16", {"dtype": "float32"}, "fp16"),
    ],
)
def test_parameter_overrides_the_format(pb_utils, tmp_path, form, parameters, precision):
    _, folder = export(tmp_path, form)
    model = start(folder.parent, **parameters)
    assert model.engine.precision == precision
    assert text(model, "I am going").startswith("I am going")
    model.finalize()


def test_what_this_cpu_cannot_compute_is_refused(pb_utils, tmp_path, monkeypatch):
    _, folder = export(tmp_path, "openvino-fp16")
    monkeypatch.setattr(parameters, "has_bf16", lambda: True)
    with pytest.raises(ConfigError, match="'cache_precision' must be one of bf16, u8, not 'f32'"):
        start(folder.parent, dtype="bfloat16", cache_precision="f32")
    monkeypatch.setattr(trial, "start_module", lambda *_: crashing_process())
    with pytest.raises(ConfigError, match=r"cannot compute .* in bfloat16 on this CPU \(SIGFPE\): choose float32"):
        start(folder.parent, dtype="bfloat16")
    with pytest.raises(FormatUnavailable, match=r"cannot serve a model: .*SIGFPE"):
        export(tmp_path / "crashes", "openvino-bf16")
    monkeypatch.setattr(parameters, "has_bf16", lambda: False)
    with pytest.raises(ConfigError, match="dtype 'bfloat16' requires a CPU with amx_bf16 or avx512_bf16, which this"):
        start(folder.parent, dtype="bfloat16")
    with pytest.raises(FormatUnavailable, match="this CPU does not compute in bfloat16"):
        export(tmp_path / "refused", "openvino-bf16")


def crashing_process() -> subprocess.Popen[bytes]:
    program = f"import os; os.kill(os.getpid(), {signal.SIGFPE})"
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
