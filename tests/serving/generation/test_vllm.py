"""Test continuous batching on vLLM: texts, arguments in model.json, and the reasons why a model does not load.

vLLM is a stand-in (tests/support/vllm_stand_in), which generates with transformers on the CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from export.catalogue import Job
from export.recipes.language import adapters
from export.recipes.language.recipe import CACHE_BYTES, assemble
from export.sources.source import Weights
from serving.generation.row import Options, Row
from serving.structure.worker import Structure
from serving.triton.types import BadRequest, ConfigError
from tests.serving.vision.test_chat import CHATS, Loaded
from tests.support.checkpoints import language
from tests.support.checkpoints.lora import merged, save_adapter
from tests.support.checkpoints.vision_language import CONTEXT, save_vision_language
from tests.support.python_backend import instance_args, parameters
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

STAND_IN = ROOT / "tests/support/vllm_stand_in"
PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]
GPU = {"free": 80e9, "total": 80e9}


def options(**values) -> Options:
    return Options(**{"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 1, "stop": ()} | values)


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm":
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def gpu(monkeypatch, module):
    """Put the stand-in on the path, and pretend that there is a GPU."""
    forget()
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(GPU["free"]), int(GPU["total"])))
    for name in ("CUDA_VISIBLE_DEVICES", *module.ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes it afterwards
        monkeypatch.delenv(name)
    yield
    forget()


@pytest.fixture(scope="module")
def module(pb_utils) -> ModuleType:
    return importlib.import_module("serving.generation.vllm")


@pytest.fixture(scope="module")
def assembled(tmp_path_factory) -> Path:
    """Return the folder that `make models FORMAT=vllm` assembles."""
    weights, folder = language.save_mistral(tmp_path_factory.mktemp("weights")), tmp_path_factory.mktemp("assembled")
    assemble(Job("mistral", "text-generation", "vllm", weights, False, folder))
    return folder / "mistral/1"


@pytest.fixture
def own(assembled, tmp_path) -> Path:
    """Return a folder that a test may change."""
    shutil.copytree(assembled, tmp_path / "mistral/1")
    return tmp_path / "mistral/1"


def edit(folder: Path, **settings) -> None:
    path = folder / "model.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if settings.get(name, "") is not None}
    path.write_text(json.dumps(kept | {name: value for name, value in settings.items() if value is not None}))


def instance(folder: Path, config: dict | None = None, **changes) -> dict[str, str]:
    return instance_args(folder.parent, config, folder.parent.name, **{"model_instance_kind": "GPU", **changes})


def load(module, folder: Path, config: dict | None = None, max_batch: int = 32, **changes):
    backend = module.VllmGeneration()
    backend.max_batch = max_batch
    tokenizer = backend.load_model(config or {}, instance(folder, **changes))
    return backend.engine, tokenizer


def finish(engine, texts: dict[int, list[int]], steps: int = 1000) -> dict[int, list[int]]:
    """Step until all texts are finished; return their new tokens."""
    tokens: dict[int, list[int]] = {key: [] for key in texts}
    unfinished = set(texts)
    while unfinished:
        steps -= 1
        assert steps, unfinished
        for new in engine.step():
            assert not new.error
            tokens[new.key] += new.tokens
            if new.finished:
                unfinished.remove(new.key)
    return tokens


# --- texts ------------------------------------------------------------------------------------------------------------


def test_chat_with_images_is_answered_as_by_transformers(module, tmp_path):
    weights = save_vision_language(tmp_path / "weights/1", "llava")
    assemble(Job("eyes", "image-text-to-text", "vllm", weights, False, tmp_path / "assembled"))
    library = Loaded(weights)
    backend = module.VllmGeneration()
    backend.max_batch = 8
    config = {"input": [{"name": "images"}]}
    tokenizer = backend.load_model(config, instance(tmp_path / "assembled/eyes/1", config))
    rows = {}
    for key, chat in enumerate(CHATS.values()):
        messages, files = library.sent(chat)
        prompt = library.images.template.prompt(backend.chat_images.parts(messages, len(files)))
        row = rows[key] = Row(prompt, [1], options())
        read = SimpleNamespace(messages=messages, images=files)
        row.prompt_tokens, row.images = backend.encoded(read, prompt)
        backend.begin(key, row)
    expected = {key: library.reference(chat) for key, chat in enumerate(CHATS.values())}
    assert {key: row.prompt_tokens for key, row in rows.items()} == {key: own for key, (own, _) in expected.items()}
    assert finish(backend.engine, rows) == {key: new for key, (_, new) in expected.items()}
    assert tokenizer.context == CONTEXT


def test_cancelled_text_frees_its_place_at_once(module, assembled):
    engine, tokenizer = load(module, assembled, max_batch=1)
    tokens = tokenizer.encode(PROMPTS[0])
    for key in (1, 2):
        engine.add(key, tokens, options(max_new_tokens=100))
    assert {new.key for new in engine.step()} == {1}
    engine.cancel(1)
    assert {new.key for new in engine.step()} == {2}
    engine.cancel(1)  # which the engine no longer has
    engine.cancel(2)
    assert engine.step() == []


def test_stats_count_the_cache_and_the_prompts_found_in_it(module, assembled):
    engine, tokenizer = load(module, assembled)
    tokens = tokenizer.encode(" ".join(PROMPTS) * 2)
    engine.add(1, tokens, options())
    finish(engine, {1: tokens})
    assert engine.stats().prefix_tokens == 0
    engine.add(2, tokens, options())
    engine.step()
    assert engine.stats().cache_usage > 0
    prefix_tokens = engine.stats().prefix_tokens
    assert 0 < prefix_tokens < len(tokens)
    finish(engine, {2: tokens})
    assert engine.stats().prefix_tokens == prefix_tokens


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (None, "vLLM ended the text: error"),
        (Structure("grammar", 'root ::= "a"'), "no token of this model can continue"),
    ],
)
def test_text_that_the_engine_ends_early_has_the_reason(module, assembled, monkeypatch, structure, reason):
    engine, _ = load(module, assembled)
    ended = SimpleNamespace(token_ids=[], finish_reason="error", logprobs=None)
    output = SimpleNamespace(
        request_id="1",
        finished=True,
        num_cached_tokens=None,
        outputs=[ended],
        prompt_token_ids=[1, 5],
        prompt_logprobs=None,
    )
    engine.add(1, [1, 5], options(structured_outputs=structure))
    monkeypatch.setattr(engine.engine, "step", lambda: [output])
    (new,) = engine.step()
    assert new.finished
    assert reason in str(new.error)


def test_adapters_are_those_of_merged_weights_and_change_without_a_reload(module, own, tmp_path):
    saved = {
        name: save_adapter(tmp_path / name, own, **more)
        for name, more in (("tone", {}), ("legal", {"r": 8, "seed": 2}))
    }
    adapters.write("mistral:tone", saved["tone"], own / "adapters/tone", own)
    assert module.adapter_arguments(own)["max_lora_rank"] == 8
    backend = module.VllmGeneration()
    backend.max_batch = 8
    tokenizer = backend.load_model({}, instance(own))
    adapters.write("mistral:legal", saved["legal"], own / "adapters/legal", own)
    names, tokens = ["", "tone", "legal"], tokenizer.encode(PROMPTS[0])
    for key, name in enumerate(names):
        backend.engine.add(key, tokens, options(adapter=backend.find_adapter(name) if name else None))
    texts = finish(backend.engine, dict.fromkeys(range(3), tokens))
    for key, name in enumerate(names):
        model = merged(own, saved.get(name))
        whole = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0]
        assert texts[key] == whole[len(tokens) :].tolist(), name
    assert len({tuple(text) for text in texts.values()}) == 3
    before = backend.find_adapter("tone")
    assert backend.find_adapter("tone") is before
    os.utime(own / "adapters/tone/adapter_model.safetensors", (1, 1))
    assert backend.find_adapter("tone").lora_name != before.lora_name  # the prefix cache has the old one's
    wide = save_adapter(tmp_path / "wide", own, r=16)
    adapters.write("mistral:wide", wide, own / "adapters/wide", own)
    with pytest.raises(RuntimeError, match="the adapter 'wide': LoRA rank 16 is greater than max_lora_rank 8"):
        backend.find_adapter("wide")
    backend.engine.close()


# --- the backend ------------------------------------------------------------------------------------------------------


def test_failed_engine_ends_the_process_after_the_answers(module, pb_utils, assembled, monkeypatch):
    """The watchdog then loads the model again; a new process has a new engine and all of the GPU's memory."""
    ended = threading.Event()

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("os._exit", lambda code: ended.set())
    monkeypatch.setattr(pb_utils.Logger, "log_warn", lambda message: None)
    backend = module.VllmGeneration()
    backend.initialize(instance(assembled, parameters(max_batch=1)))
    monkeypatch.setattr(backend.engine.engine, "step", fail)
    requests = [pb_utils.InferenceRequest(["text"], prompt=[prompt.encode()]) for prompt in PROMPTS]
    backend.execute(requests)
    for request in requests:
        assert request.sender.finished.wait(60)
        assert "vLLM failed: CUDA error: out of memory" in request.sender.responses[0].error[1]
    assert ended.wait(60)
    backend.finalize()


def test_draft_is_next_to_the_weights_and_refuses_what_vllm_refuses(module, tmp_path):
    weights = language.save_mistral(tmp_path / "weights")
    near = Weights(language.save_mistral(tmp_path / "near"), "near", "")
    assemble(Job("fast", "text-generation", "vllm", weights, False, tmp_path, draft=near))
    own = tmp_path / "fast/1"
    draft = module.engine_arguments(own, {})["speculative_config"]
    assert draft == {"method": "draft_model", "model": str(own / "draft"), "num_speculative_tokens": 4}
    engine, tokenizer = load(module, own)
    tokens, plain = tokenizer.encode("It"), Options(4, 1.0, 1.0, 0, ())
    for wrong in ({"min_p": 0.1}, {"logit_bias": {7: 1.0}}):
        with pytest.raises(
            BadRequest, match=f"option '{next(iter(wrong))}': .* does not have it together with a draft"
        ):
            engine.add(0, tokens, replace(plain, **wrong))
    engine.add(0, tokens, replace(plain, temperature=0.0, min_p=0.1))
    finish(engine, {0: tokens})


# --- model.json -------------------------------------------------------------------------------------------------------


def test_context_is_the_engines(module, own):
    edit(own, max_model_len=64)
    assert load(module, own)[1].context == 64
    edit(own, max_model_len=-1)
    assert load(module, own)[1].context == language.CONTEXT


def test_assembled_settings_share_the_gpu(module, own):
    settings = json.loads((own / "model.json").read_text())
    assert settings == {
        "model": ".",
        "dtype": "float32",
        "max_model_len": -1,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "trust_remote_code": False,
    }
    assert module.DEFAULTS[module.CACHE] == CACHE_BYTES  # of a model.json without it
    arguments = load(module, own)[0].engine.args
    weights = (own / "model.safetensors").stat().st_size
    assert arguments.gpu_memory_utilization == pytest.approx((weights * 1.1 + CACHE_BYTES) / GPU["total"], rel=1e-3)
    assert (arguments.model, arguments.skip_tokenizer_init) == (str(own), False)  # for structured output


def test_edited_settings_are_the_engines_arguments(module, own):
    edit(own, kv_cache_memory_bytes=None, gpu_memory_utilization=0.9, enforce_eager=True, dtype=None)
    arguments = load(module, own)[0].engine.args
    assert (arguments.gpu_memory_utilization, arguments.kv_cache_memory_bytes) == (0.9, None)
    assert (arguments.enforce_eager, arguments.dtype) == (True, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 4}, r"model.json sets 'max_num_seq', which vLLM 0\.27\.1 does not know"),
        ({"max_num_seqs": 4}, r"sets 'max_num_seqs': remove it there, and set the parameter 'max_batch' in config"),
        ({"gpu_memory_utilization": 0.9}, "sets both gpu_memory_utilization and kv_cache_memory_bytes: remove one"),
        ({"kv_cache_memory_bytes": "4G"}, "sets kv_cache_memory_bytes to '4G': it must be a whole number"),
        ({"model": "organisation/name"}, "sets model 'organisation/name', and there is no .*/config.json: name a"),
        ({"dtype": "float16"}, "model.json sets dtype 'float16', and config.pbtxt 'bfloat16': remove one of the two"),
        ({"tensor_parallel_size": 2}, "spreads the model over 2 GPUs: set KIND_MODEL in instance_group"),
    ],
)
def test_wrong_setting_is_one_sentence(module, own, settings, message):
    edit(own, dtype=None)
    edit(own, **settings)
    with pytest.raises(ConfigError, match=message):
        load(module, own, parameters(dtype="bfloat16"))


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON: Expecting"), ("[]", "must hold one JSON obj")])
def test_settings_that_are_no_object_are_an_error(module, own, text, message):
    (own / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(module, own)


# --- reasons why a model does not load --------------------------------------------------------------------------------


def test_dtype_of_the_config_is_used_if_the_settings_have_none(module, own):
    edit(own, dtype=None)
    assert load(module, own, parameters(dtype="bfloat16"))[0].precision == "bfloat16"


@pytest.mark.parametrize("place", [{"model_instance_kind": "CPU"}, {}])
def test_cpu_is_an_error(module, assembled, place):
    config = {} if place else parameters(device="cpu")
    with pytest.raises(ConfigError, match=r"this instance was placed on a CPU\. `make models FORMAT=python`"):
        load(module, assembled, config, **place)


def test_missing_vllm_is_an_error(module, assembled, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"this server has no vLLM \(.*\). `make up PROFILE=cuda` builds and starts"):
        load(module, assembled)


def test_model_that_does_not_fit_is_an_error_before_loading(module, assembled, monkeypatch):
    monkeypatch.setitem(GPU, "free", 3e9)
    message = (
        "mistral takes about 4.3 GB, and 3.0 of the GPU's 80.0 GB of memory are free: unload another model, or lower "
        "kv_cache_memory_bytes in .*/model.json"
    )
    with pytest.raises(ConfigError, match=message):
        load(module, assembled)


def test_memory_of_quantized_weights_is_that_of_their_files(module, own):
    weights = {"model.weight": torch.zeros(1000, 1000, dtype=torch.int32), "model.scale": torch.zeros(10)}
    save_file(weights, own / "model.safetensors")
    share = module.memory_share("mistral", own, {"model": str(own), "dtype": "float32", module.CACHE: 0})
    assert share * GPU["total"] == pytest.approx(4e6 * 1.1, rel=0.01)


def test_unsupported_architecture_is_one_sentence(module, own):
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"architectures": ["OddForCausalLM"]}))
    with pytest.raises(ConfigError) as caught:
        load(module, own)
    assert str(caught.value) == (
        f"vLLM 0.27.1 cannot serve {own}: Model architectures ['OddForCausalLM'] are not supported for now. "
        "Change model.json there, or assemble the model with FORMAT=python"
    )


def test_model_on_several_gpus_sees_all_of_them(module, own, monkeypatch):
    edit(own, tensor_parallel_size=2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)  # it would start CUDA, and vLLM's processes then cannot
    arguments = load(module, own, model_instance_kind="MODEL")[0].engine.args
    assert (arguments.tensor_parallel_size, arguments.gpu_memory_utilization) == (2, 0.92)
    assert "CUDA_VISIBLE_DEVICES" not in module.os.environ


def test_instance_sees_its_own_gpu_only(module, assembled, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert module.visible_gpu(1) == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert module.visible_gpu(1) == "1"
    load(module, assembled, model_instance_device_id="3")
    assert module.os.environ["CUDA_VISIBLE_DEVICES"] == "3"
