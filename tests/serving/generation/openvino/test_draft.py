"""A draft model and lookup make a language model faster, and change none of its texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from export.catalogue import Job
from export.drafts import LOOKUP, check_draft, is_recorded, requested_draft
from export.recipes.language.recipe import assemble
from export.record import Record
from export.sources.source import Folder, Hub, Weights
from tests.serving.generation.openvino.test_engine import PROMPTS, send, start, text, together
from tests.support import served as small
from tests.support.checkpoints import language
from tests.support.checkpoints.lora import save_adapter
from triton_transformers.settings import Settings, UserError

KINDS = ("model", LOOKUP)
MANY = [*PROMPTS, "going home going home going", *(f"{number} trains left " * number for number in range(2, 14))]
OPTIONS = {
    "greedy": {},
    "seed": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "penalties of a seed": {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "top_k": 9},
    "stop": {"stop": ["e", "a"]},
    "end": {"stop_token_ids": [*range(40, 60)]},
    "ignore": {"ignore_eos": True},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "logprobs": {"logprobs": 0},
    "structure": {"structured_outputs": {"regex": "(yes|no|maybe)( and (yes|no|maybe))*"}},
    "adapter": {"lora_name": "tone"},
}


@pytest.fixture(scope="module")
def served(stored, pb_utils, tmp_path_factory):
    """Return the model without a draft, with a draft model that often proposes right tokens, and with lookup."""
    folder = tmp_path_factory.mktemp("drafts")
    base, draft = language.save_llama(folder / "base"), folder / "near"
    language.save_llama(draft)
    network = AutoModelForCausalLM.from_pretrained(draft)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in network.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    network.save_pretrained(draft)
    save_adapter(folder / "tone", base, layers="q_proj|v_proj")
    kinds = {"": None, "model": Weights(draft, "near", ""), LOOKUP: Weights(Path(), LOOKUP, LOOKUP)}
    models = {}
    for kind, proposes in kinds.items():
        small.assemble(base, folder / f"served{kind}", "openvino-fp32", system="x", draft=proposes)
        add_adapter(folder / "tone", folder / f"served{kind}/x/1")
        models[kind] = start(folder / f"served{kind}/x", batched_tokens=8, max_batch=8)
    yield models
    for model in models.values():
        model.finalize()


def add_adapter(source: Path, version: Path) -> None:
    from export.recipes.language import adapters

    adapters.write("x:tone", source, version / "adapters/tone", version)
    adapters.write_graph("x", version, version, [version / "adapters/tone"])


def written(options: dict) -> dict:
    return {
        name: json.dumps(value) if isinstance(value, (dict, list)) and name != "stop" else value
        for name, value in options.items()
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_change_no_text_alone_and_together(served, name):
    options = written(OPTIONS[name])
    expected = [text(served[""], prompt, **options) for prompt in MANY]
    for kind in KINDS:
        if (kind, name) != ("model", "structure"):
            assert together(served[kind], MANY * 2, **options) == expected * 2
            assert [text(served[kind], prompt, **options) for prompt in MANY] == expected


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("model", {"logprobs": 2}, "option 'logprobs'"),
        (LOOKUP, {"min_tokens": 2}, "option 'min_tokens'"),
        ("model", OPTIONS["structure"], "option 'structured_outputs'"),
    ],
)
def test_options_that_go_wrong_with_drafts_are_refused(served, kind, options, reason):
    request = send(served[kind], "It", **written(options))
    assert request.sender.finished.wait(60)
    (status, message) = request.sender.responses[0].error
    assert status == "INVALID_ARG" and reason in message and "together with a draft" in message


@pytest.mark.parametrize("kind", KINDS)
def test_texts_wait_until_the_cache_has_room_to_their_ends(served, kind, monkeypatch, tmp_path_factory):
    """The cache has 160 tokens, each text takes 64 or 96 of them, and no text may have more than all."""
    monkeypatch.setattr("serving.generation.openvino.draft.cache_width", lambda folder: 1e9 / (4 * 160))
    model = start(next(tmp_path_factory.getbasetemp().glob(f"drafts*/served{kind}/x")))
    expected = [text(served[""], prompt, max_new_tokens=50) for prompt in MANY[:8]]
    assert together(model, MANY[:8] * 3, max_new_tokens=50) == expected * 3
    request = send(model, "It", max_new_tokens=155)
    assert request.sender.finished.wait(60)
    assert "in the model's context of 155" in request.sender.responses[0].error[1]
    model.finalize()
    assert not model.engine.draft.begun


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_one_prompt_share_no_block_that_their_proposed_tokens_exceed(served, kind):
    prompts = [("It is so late " * 9)[:length] for length in range(20, 120)]
    near_end = [prompt for prompt in prompts if len(served[kind].tokenizer.encode(prompt)) % 32 in (29, 31)][:2]
    texts = [(prompt, seed) for prompt in near_end for seed in range(8)]
    expected = [text(served[""], prompt, temperature=1.0, seed=seed, max_new_tokens=8) for prompt, seed in texts]
    requests = [send(served[kind], prompt, temperature=1.0, seed=seed, max_new_tokens=8) for prompt, seed in texts]
    assert all(request.sender.finished.wait(60) for request in requests)
    assert [request.sender.responses[0].outputs["text"][0].decode() for request in requests] == expected


def test_draft_with_other_tokens_is_refused(tmp_path):
    base, other = language.save_llama(tmp_path / "base"), language.save_gpt2(tmp_path / "other")
    draft = Weights(other, "other", "")
    with pytest.raises(UserError, match="DRAFT: other has other tokens than x"):
        assemble(Job("x", "text-generation", "openvino-fp32", base, False, tmp_path, draft=draft))


@pytest.mark.parametrize(
    ("setting", "recorded", "expected"),
    [
        ("", "", ""),
        ("", LOOKUP, LOOKUP),
        ("", "some/name@abc main", Hub("some/name", "abc")),
        ("", "/a/folder 123", Folder(Path("/a/folder"))),
        ("none", LOOKUP, ""),
        ("lookup", "some/name@abc", LOOKUP),
        ("some/name@main", LOOKUP, Hub("some/name", "main")),
        ("/a/folder", "", Folder(Path("/a/folder"))),
    ],
)
def test_draft_is_the_one_of_the_setting_or_the_one_before(setting, recorded, expected):
    record = Record("x", (), "text-generation", "openvino", "2", (), "", "", facts={"draft": recorded})
    settings = Settings.load().replace(DRAFT=setting)
    assert requested_draft(settings, record) == expected
    assert is_recorded(expected, record) == (not setting and not isinstance(expected, Folder))


@pytest.mark.parametrize("task, form", [("text-generation", "python"), ("text-classification", "onnx")])
def test_formats_without_drafts_are_refused(task, form):
    with pytest.raises(UserError, match=f"DRAFT: x is {task} .{form}., .*: set DRAFT=none"):
        check_draft("x", task, form)
