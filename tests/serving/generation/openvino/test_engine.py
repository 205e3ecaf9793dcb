"""OpenVINO GenAI continues texts like transformers, alone and among others, on tiny models of real architectures."""

from __future__ import annotations

import functools
import importlib
import json
import queue
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.assemble import assemble_all
from export.catalogue import FormatUnavailable, Job
from export.recipes.language import graph, openvino
from export.recipes.language.recipe import assemble
from export.record import DEFAULT, read_record
from serving.text.tokenizer import TextTokenizer
from serving.triton.types import ConfigError
from tests.support import python_backend
from tests.support import served as small
from tests.support.checkpoints import language
from tests.support.python_backend import Held, InferenceRequest, ResponseSender
from triton_transformers.settings import Settings, UserError

PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]
TOKENS = 24
NAMES = ("llama", "gpt2")
OLDER_NAMES = ("qwen2", "mistral", "falcon", "gpt_neox", "gemma", "persimmon")
# Models beyond paged attention: with softcaps, chunks, or states other than keys and values.
REFUSED = {
    "gemma2": "softcap",
    "llama4_text": "neither causal nor that of a sliding window",
    "qwen3_5_text": "states other than keys and values",
    "bloom": "does not know its attention",
}
MORE_NAMES = (*OLDER_NAMES, *(name for name in language.MODERN if name not in REFUSED))


@pytest.fixture(scope="module")
def served(stored, pb_utils, tmp_path_factory):
    """Return a function that serves an architecture in float32."""
    folder = tmp_path_factory.mktemp("models")
    models = {}

    def serve(name: str, streams: bool = False, **parameters: object):
        key = (name, streams, *parameters.items())
        if key not in models:
            weights, repository = folder / f"{name}-weights", folder / name
            if not weights.exists():
                save(weights, name)
                small.assemble(weights, repository, "openvino-fp32", system=name)
            models[key] = start(repository / name, streams, **parameters)
        return models[key]

    yield serve
    for model in models.values():
        model.finalize()


def save(folder, name: str):
    return language.save_decoder(folder, name) if name in language.MODERN else getattr(language, f"save_{name}")(folder)


def start(model, streams: bool = False, **parameters: object):
    config = {"model_transaction_policy": {"decoupled": streams}}
    config |= python_backend.parameters(**{"cache_gigabytes": 1} | parameters)
    backend = importlib.import_module("serving.generation.openvino.engine").GenAIGeneration()
    backend.initialize(python_backend.instance_args(model, config))
    return backend


def send(model, prompt: str, sender: ResponseSender | None = None, **options: object) -> InferenceRequest:
    options = {"max_new_tokens": TOKENS} | options
    request = InferenceRequest(["text", "text_output"], options, prompt=[prompt.encode()])
    request.sender = sender or request.sender
    model.execute([request])
    return request


def text(model, prompt: str, **options: object) -> str:
    request = send(model, prompt, **options)
    assert request.sender.finished.wait(60)
    (response,) = request.sender.responses
    assert response.error is None
    return response.outputs["text"][0].decode()


def together(model, prompts: list[str], **options: object) -> list[str]:
    requests = [send(model, prompt, **options) for prompt in prompts]
    assert all(request.sender.finished.wait(60) for request in requests)
    return [request.sender.responses[0].outputs["text"][0].decode() for request in requests]


def references(folder) -> list[str]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**encoded, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return texts


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)])
def test_greedy_text_equals_transformers_alone_and_together(served, tmp_path_factory, name):
    model = served(name)
    expected = references(next(tmp_path_factory.getbasetemp().glob(f"models*/{name}-weights")))
    assert len(set(expected)) == len(PROMPTS)
    assert [text(model, prompt) for prompt in PROMPTS] == expected
    assert together(model, PROMPTS * 6) == expected * 6


@pytest.mark.usefixtures("pb_utils")
@pytest.mark.parametrize(
    ("prompt", "new_tokens", "steps", "shares", "shares_with_draft"),
    [
        ([1, 2, 3], 1, 1, True, True),  # the engine has read the whole prompt of the running text, [1, 2], and no more
        ([1, 2, 3], 2, 2, False, False),
        ([1, 2], 1, 1, False, True),
        ([1, 2], 0, 0, False, True),
        ([1, 3], 1, 1, False, False),
        ([1, 3], 0, 1, True, True),  # it has read a part
        ([1, 3], 0, 0, False, False),  # or nothing
        ([2, 3], 0, 1, False, False),
    ],
)
def test_text_waits_while_it_would_share_a_block_that_is_not_full(prompt, new_tokens, steps, shares, shares_with_draft):
    from serving.generation.openvino.engine import may_share_block
    from serving.generation.row import Row

    running = Row("", [1, 2], None)
    running.tokens += range(new_tokens)
    running.steps = steps
    assert may_share_block(prompt, running, has_draft=False) is shares
    assert may_share_block(prompt, running, has_draft=True) is shares_with_draft


def test_prompts_that_begin_alike_are_answered_as_alone(served):
    model = served("llama", batched_tokens=8, max_batch=4)
    prompts = [("It is so late " * 3)[:length] for length in range(3, 40, 3)]
    alone = [text(model, prompt) for prompt in prompts]
    assert together(model, prompts) == alone


def test_request_is_timed_from_its_arrival_to_its_last_response(served, monkeypatch):
    """Triton's own time ends when execute() returns."""

    class Timed(ResponseSender):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def send(self, response, flags: int = 0) -> None:
            self.times.append(time.monotonic())
            super().send(response, flags)

    model, long, waiting, gone = served("llama", streams=True, max_batch=1), Held(), Timed(), Cancelled()
    counted: queue.Queue[dict[str, int]] = queue.Queue()
    monkeypatch.setattr(model.metrics, "add", lambda **counts: "requests" in counts and counted.put(counts))
    send(model, "It", long)
    assert long.holds.wait(60)
    arrived = time.monotonic()
    send(model, "I am going", waiting)
    executed = time.monotonic()
    gone.cancelled = True
    send(model, "I am", gone)
    began = time.monotonic()
    long.go.set()
    counted.get(timeout=60)
    times = counted.get(timeout=60)
    assert gone.finished.wait(60) and counted.empty()  # a cancelled request is not counted
    # It is counted between the last two responses.
    assert 1e6 * (waiting.times[-2] - executed) - 1 <= times["request_microseconds"]
    assert times["request_microseconds"] <= 1e6 * (waiting.times[-1] - arrived) + 1
    assert times["waiting_microseconds"] + 1 >= 1e6 * (began - executed)
    assert times["waiting_microseconds"] <= 1e6 * (waiting.times[0] - arrived) + 1
    assert len(waiting.times) > 2


class Cancelled(ResponseSender):
    cancelled = False

    def is_cancelled(self) -> bool:
        return self.cancelled


def test_engine_never_reads_the_prompt_of_a_client_that_left(served, monkeypatch):
    model, sender = served("llama"), Cancelled()
    sender.cancelled = True
    monkeypatch.setattr(model.engine, "add", None)
    send(model, "It", sender)
    assert sender.finished.wait(60)
    assert sender.responses[0].error == ("CANCELLED", "the client cancelled the request")


@pytest.mark.parametrize(("owner", "method"), [("tokenizer", "decode"), ("engine", "step")])
def test_engine_goes_on_after_a_text_that_failed(served, monkeypatch, owner, method):
    """If the text cannot be decoded, the engine has dropped it by then, so the backend must not cancel it."""
    model = served("llama")

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a broken part")

    monkeypatch.setattr(getattr(model, owner), method, fail)
    request = send(model, "It", max_new_tokens=1)
    assert request.sender.finished.wait(60)
    assert request.sender.responses[0].error == ("INTERNAL", "RuntimeError: a broken part")
    assert text(model, "It").startswith("It")


def test_refused_text_leaves_the_others_alone(served, monkeypatch):
    model = served("llama")
    expected = text(model, "It")
    add = model.engine.add

    def refuse(key: int, tokens: list[int], options: object) -> None:
        if len(tokens) > 5:
            raise RuntimeError("no room")
        add(key, tokens, options)

    monkeypatch.setattr(model.engine, "add", refuse)
    long, short = send(model, "Grüße aus München: schönes Wetter"), send(model, "It")
    assert long.sender.finished.wait(60) and short.sender.finished.wait(60)
    assert long.sender.responses[0].error == ("INTERNAL", "RuntimeError: no room")
    assert short.sender.responses[0].outputs["text"][0].decode() == expected


def test_parameters_that_are_no_text_fail_their_request_alone(served, monkeypatch):
    wrong, right = (InferenceRequest(["text"], {"max_new_tokens": 2}, prompt=[b"It"]) for _ in range(2))
    monkeypatch.setattr(wrong, "parameters", lambda: b"\xed\xa0\x80".decode())  # as Triton's bindings do
    served("llama").execute([wrong, right])
    assert wrong.sender.responses[0].error == ("INVALID_ARG", "parameters of the request must be valid UTF-8")
    assert right.sender.finished.wait(60)
    assert right.sender.responses[0].error is None


def test_counters_hold_times_and_prefix_hits(served, pb_utils):
    model = served("gpt2")
    text(model, "I am going to the market with my brother, and then we go home. It was raining when the train left")
    model.metrics.close()
    metrics = {name.removeprefix("transformers_"): value for name, value in pb_utils.metrics.items()}
    assert metrics["first_tokens_total"] >= 1
    assert metrics["first_token_microseconds_total"] > 0
    assert metrics["later_token_microseconds_total"] > 0
    assert metrics["generated_tokens_total"] >= TOKENS
    assert metrics["running_texts"] == metrics["waiting_texts"] == 0


def test_texts_go_on_while_the_engine_prepares_for_its_first_structure(served, monkeypatch):
    model = served("llama")
    asked, go = threading.Event(), threading.Event()
    load = model.engine.load_structured
    monkeypatch.setattr(model.engine, "structured", None)
    monkeypatch.setattr(model.engine, "load_structured", lambda: (asked.set(), go.wait(60), load())[-1])
    held = send(model, "It", structured_outputs={"choice": ["new"]}, exclude_input_in_output=True)
    assert asked.wait(60)
    assert text(model, "It")
    assert not held.sender.finished.is_set()
    go.set()
    assert held.sender.finished.wait(60)
    assert held.sender.responses[0].outputs["text"] == [b"new"]


# --- the export -------------------------------------------------------------------------------------------------------


def export(tmp_path, form: str, save=language.save_llama, **changes: object):
    weights = save(tmp_path / "weights")
    job = Job("mine", "text-generation", form, weights, False, tmp_path / "made")
    return assemble(replace(job, **changes)), tmp_path / "made/mine/1"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_stored_in_16_bits_are_exported(tmp_path, dtype):
    def save_half(folder: Path) -> Path:
        weights = language.save_decoder(folder, "mixtral")
        AutoModelForCausalLM.from_pretrained(weights, dtype=dtype).save_pretrained(weights)
        return weights

    outcome, _ = export(tmp_path, "openvino-fp16", save_half)
    assert outcome.facts["weights"] == "fp16"


@pytest.mark.slow
def test_int8_is_kept_only_if_perplexity_holds(tmp_path, monkeypatch):
    outcome, folder = export(tmp_path / "a", "openvino")
    assert outcome.facts["weights"] == "int8"
    assert "weights in int8: perplexity" in outcome.summary
    assert json.loads((folder / "limits.json").read_text())["weights"] == "int8"

    rises = iter([0.0, 0.02, 0.02])
    monkeypatch.setattr(openvino, "rise", lambda before, after: next(rises))
    outcome, _ = export(tmp_path / "b", "openvino")
    assert outcome.facts["weights"] == "fp16"
    assert "weights in fp16, because in int8 its perplexity" in outcome.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda patch: patch.setattr(openvino, "MEMORY", 1e9), "GB of memory"),
        (lambda patch: patch.setattr(openvino, "MAX_RISE", -1.0), "its perplexity is"),
        (lambda patch: patch.setattr(graph, "convert", lambda *_: 1 / 0), "cannot export a llama: division"),
    ],
)
def test_model_that_openvino_cannot_serve_is_refused(tmp_path, monkeypatch, spoil, reason):
    spoil(monkeypatch)
    with pytest.raises(FormatUnavailable, match=reason):
        export(tmp_path, "openvino")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_model_that_would_give_other_answers_is_refused(tmp_path, name, reason):
    with pytest.raises(FormatUnavailable, match=reason):
        export(tmp_path, "openvino", functools.partial(save, name=name))


@pytest.mark.slow
def test_rotary_positions_that_depend_on_other_texts_limit_the_context(tmp_path):
    outcome, folder = export(tmp_path, "openvino-fp16", language.save_longrope)
    assert "texts of at most 64 tokens instead of 256, which takes FORMAT=python" in outcome.summary
    assert json.loads((folder / "limits.json").read_text())["context"] == 64


@pytest.mark.slow
def test_model_with_own_code_is_refused_if_the_code_is_trusted(tmp_path):
    def save(folder):
        config = json.loads((language.save_llama(folder) / "config.json").read_text())
        own = {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
        (folder / "config.json").write_text(json.dumps(config | own))
        return folder

    with pytest.raises(FormatUnavailable, match="brings its own code"):
        export(tmp_path / "a", "openvino-fp16", save, trust_remote_code=True)
    export(tmp_path / "b", "openvino-fp16", save)
    export(tmp_path / "c", "openvino-fp16", trust_remote_code=True)


def test_transformers_replace_openvino_unless_the_user_chose_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(openvino, "MEMORY", 1e9)
    chosen = {"SYSTEMS": "mine", "SOURCE": str(language.save_llama(tmp_path / "weights"))}
    settings = Settings.load().replace(**{"MODEL_REPOSITORY": str(tmp_path / "models")} | chosen)
    refusal = r"weights cannot be served as text-generation, FORMAT=openvino: its export .* FORMAT=python serves it"
    with pytest.raises(UserError, match=refusal):
        assemble_all(settings.replace(FORMAT="openvino"))
    assert not any((tmp_path / "models").glob("*"))
    assemble_all(settings)
    message = " ".join(capsys.readouterr().err.split())
    assert "GB are free. It is served by transformers instead (FORMAT=python)" in message
    record = read_record("mine", tmp_path / "models")
    assert (record.format, record.facts[DEFAULT]) == ("python", "cpu")
    assert (tmp_path / "models/mine/1/model.safetensors").exists()


def test_full_disk_is_not_taken_for_an_unknown_architecture(tmp_path, monkeypatch):
    """OpenVINO reports a write that fails in these words."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr("openvino.save_model", fail)
    with pytest.raises(OSError, match="No space left on device"):
        export(tmp_path, "openvino-fp16")


@pytest.mark.parametrize("measured", [0.9, 1.1, float("nan")])
def test_export_that_changes_perplexity_is_refused(tmp_path, monkeypatch, measured):
    monkeypatch.setattr(openvino, "torch_perplexity", lambda *_: 1.0)
    monkeypatch.setattr(openvino, "served_losses", lambda *_: [np.log([measured])])
    monkeypatch.setattr(openvino, "convert", lambda _: None)
    monkeypatch.setattr(openvino, "save", lambda *_: None)
    with pytest.raises(FormatUnavailable, match="its perplexity is"):
        export(tmp_path, "openvino-fp16")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["openvino-fp16", "vllm"])
def test_server_gets_the_tokenizer_that_transformers_makes(tmp_path, form):
    """The checkpoint's tokenizer.json adds no token; its tokenizer_config.json asks for one."""

    def save(folder):
        language.save_llama(folder)
        content = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        changes = {"tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
        return folder

    _, folder = export(tmp_path, form, save)
    expected = AutoTokenizer.from_pretrained(tmp_path / "weights")("It").input_ids
    assert TextTokenizer(folder).encode("It") == expected
    assert expected[0] == 0


@pytest.mark.slow
def test_missing_files_and_wrong_parameters_stop_the_load(served, tmp_path, tmp_path_factory):
    served("llama")
    model = shutil.copytree(next(tmp_path_factory.getbasetemp().glob("models*/llama/llama")), tmp_path / "llama")
    folder = model / "1"
    for parameters, reason in (
        ({"cache_gigabytes": 0}, "must be at least 1"),
        ({"dtype": "float16"}, "must be one of auto, float32, bfloat16, not"),
        ({"device": "cuda"}, "must be one of auto, cpu"),
        ({"cache_gigabytes": 100_000}, "GB of memory are free here"),
    ):
        with pytest.raises(ConfigError, match=reason):
            start(model, **parameters)
    (folder / "openvino_model.xml").write_text("<net")
    with pytest.raises(ConfigError, match="OpenVINO GenAI cannot load"):
        start(model)
    (folder / "limits.json").unlink()
    with pytest.raises(ConfigError, match=r"has no limits\.json"):
        start(model)


@pytest.mark.slow
def test_int4_is_what_the_user_asked_for(tmp_path):
    outcome, folder = export(tmp_path, "openvino-int4")
    assert "weights in int4: perplexity" in outcome.summary
    assert not list(folder.glob("tmp*"))


@pytest.mark.parametrize("name", [pytest.param("bloom", marks=pytest.mark.slow), "xlnet"])
def test_model_without_a_limit_of_positions_is_served(tmp_path, name):
    """Bloom's configuration has no max_position_embeddings, and XLNet's is -1."""
    _, folder = export(tmp_path, "vllm", functools.partial(language.save_decoder, kind=name))
    assert json.loads((folder / "limits.json").read_text())["context"] is None


@pytest.mark.parametrize("outputs", [["text"], ["tokenized"]])
def test_long_prompt_does_not_hold_up_others(served, monkeypatch, outputs):
    """The long prompt is tokenized only after the short one is answered."""
    model = served("llama")
    answered, encode = threading.Event(), model.tokenizer.encode

    def wait(prompt: str, *options: bool, **more: bool) -> list[int]:
        assert len(prompt) < 200_000 or answered.wait(60)
        return encode(prompt, *options, **more)

    monkeypatch.setattr(model.tokenizer, "encode", wait)
    long = InferenceRequest(outputs, prompt=np.array([b"a b " * 50_000], np.object_))
    model.execute([long])
    text(model, "I am going")
    answered.set()
    assert long.sender.finished.wait(60)
    (response,) = long.sender.responses
    assert response.outputs if outputs == ["tokenized"] else "no room for new ones" in response.error[1]
