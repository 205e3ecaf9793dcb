"""Language models compiled for Neuron: batches of exactly the rows, whoever's; and what a config may say of one.

The libraries are stand-ins (tests/support/neuron_stand_in) that hold to a compiled model's shapes and run a small one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from neuron.cores import Cores
from neuron.decoding import NeuronDecoder, generating, padding_side
from neuron.llm import Compiled, load
from shared.decoding import Options, Row
from shared.errors import ConfigError
from tests.support.checkpoints import language

STAND_INS = Path(__file__).resolve().parents[1] / "support/neuron_stand_in"
PACKAGES = ("neuronx_distributed_inference", "optimum.neuron", "transformers_neuronx")
LLAMA = "neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM"
OPTIMUM = "optimum.neuron.NeuronModelForCausalLM"
OPT = "transformers_neuronx.opt.model.OPTForSampling"
PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]
FOUR = Cores(4, 4, 1)


def options(**said) -> Options:
    return Options(**{"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 1, "stop": ()} | said)


@pytest.fixture(scope="module", autouse=True)
def stand_ins(tmp_path_factory):
    """On the path, with four cores claimed; gone again for the tests of other files."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        patch.setenv("NEURON_STAND_IN_LOG", str(tmp_path_factory.mktemp("log") / "seen.jsonl"))
        patch.setenv("NEURON_RT_VISIBLE_CORES", "")
        FOUR.claim()
        yield
    forget()
    torch.set_num_threads(before)


def forget(names: tuple[str, ...] = ("stand_in_", *PACKAGES)) -> None:
    for name in list(sys.modules):
        if name.startswith(names):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return language.save_mistral(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def compile_(tmp_path_factory, checkpoint) -> Callable[..., Path]:
    """The folder that each library makes of the checkpoint."""

    def make(model_class: str, **said) -> Path:
        folder = tmp_path_factory.mktemp("compiled") / "model"
        compiled_with(model_class, checkpoint, folder, **said)
        return folder

    return make


def compiled_with(model_class: str, checkpoint: Path, folder: Path, **said) -> None:
    shapes = {"batch_size": 4, "tp_degree": 4}
    if model_class == LLAMA:
        library = importlib.import_module(LLAMA.rpartition(".")[0])
        config = {"neuron_config": shapes | {"seq_len": language.CONTEXT} | said}
        library.NeuronLlamaForCausalLM(str(checkpoint), config).compile(str(folder))
    else:
        AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    if model_class == OPTIMUM:
        config = shapes | {"sequence_length": language.CONTEXT, "on_device_sampling": False} | said
        (folder / "neuron_config.json").write_text(json.dumps(config))
        (folder / "model.pt").touch()
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def compiled(folder: Path, cores: Cores = FOUR, **parameters) -> Compiled:
    said = {"COMPILED_MODEL": folder, **parameters}
    config = {"parameters": {name: {"string_value": str(value)} for name, value in said.items()}}
    return Compiled.of(config, {"model_repository": "/models/llm"}, cores)


def decoder(model_class: str, shape: Compiled) -> NeuronDecoder:
    model = generating(load(model_class, shape, FOUR), shape)
    return NeuronDecoder(model, AutoTokenizer.from_pretrained(shape.folder), shape)


@pytest.fixture(scope="module", params=[LLAMA, OPTIMUM, OPT])
def served(request, compile_) -> NeuronDecoder:
    said = {"BATCH_SIZE": 4, "N_POSITIONS": language.CONTEXT} if request.param == OPT else {}
    return decoder(request.param, compiled(compile_(request.param), **said))


@pytest.fixture(scope="module")
def llama(compile_) -> NeuronDecoder:
    return decoder(LLAMA, compiled(compile_(LLAMA)))


def rows(served: NeuronDecoder, prompts: list[str], *each: Options) -> list[Row]:
    each = each or (options(),) * len(prompts)
    return [Row(prompt, served.encode(prompt), said) for prompt, said in zip(prompts, each, strict=True)]


def generated(served: NeuronDecoder, asked: list[Row]) -> list[str]:
    for part in served.batches(asked):
        served.generate(part, lambda: None)
    return [row.text for row in asked]


def seen() -> list[dict]:
    """Of the batches since the last call."""
    path = Path(os.environ["NEURON_STAND_IN_LOG"])
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("")
    return [event for event in events if event["event"] == "generate"]


@pytest.fixture(scope="module")
def alone(checkpoint):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    def say(prompt: str, new_tokens: int = 12) -> str:
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        answer = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(answer[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.removeprefix(prompt)

    return say


# --- texts ------------------------------------------------------------------------------------------------------------


def test_each_as_alone_in_batches_that_are_always_full(served, alone):
    seen()
    lengths = [12, 3, 9, 7, 1]
    asked = rows(served, PROMPTS, *(options(max_new_tokens=n) for n in lengths))
    expected = [alone(prompt, n) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    assert len(set(expected)) == len(expected)
    assert generated(served, asked) == expected
    assert [batch["rows"] for batch in seen()] == [4, 4]


def test_one_row_is_filled_up_with_its_own_prompt(served, alone):
    seen()
    (row,) = asked = rows(served, PROMPTS[:1])
    assert generated(served, asked) == [alone(PROMPTS[0])]
    (batch,) = seen()
    assert batch["real"] == [len(row.prompt_tokens)] * 4


def test_what_fills_a_batch_is_not_waited_for(llama):
    """Its one client goes away after four tokens."""
    (row,) = rows(llama, PROMPTS[:1])
    steps = []

    def tell() -> None:
        steps.append(row.new_tokens)
        row.done = row.done or len(steps) == 4

    llama.generate([row], tell)
    assert steps == [1, 2, 3, 4]


def test_sampling_does_not_hang_on_the_company(served):
    said = [options(temperature=1.5, seed=n, top_p=0.9 if n % 2 else 1.0) for n in range(len(PROMPTS))]
    together = generated(served, rows(served, PROMPTS, *said))
    apart = [generated(served, rows(served, [p], o))[0] for p, o in zip(PROMPTS, said, strict=True)]
    assert together == apart
    assert together != generated(served, rows(served, PROMPTS))


def test_a_stop_string_ends_its_row_only(served, alone):
    stop = alone("Which battery")[4:7]
    asked = rows(served, PROMPTS, *(options(stop=(stop,) if prompt == "Which battery" else ()) for prompt in PROMPTS))
    texts = dict(zip(PROMPTS, generated(served, asked), strict=True))
    assert texts.pop("Which battery") == alone("Which battery").partition(stop)[0]
    assert texts == {prompt: alone(prompt) for prompt in texts}


def test_the_end_token_is_the_checkpoints(compile_, llama):
    """generation_config.json may know of more ends than the model's config does."""
    (whole,) = rows(llama, ["I am going"])
    generated(llama, [whole])
    end = whole.tokens[-3]
    folder = compile_(LLAMA)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, llama.tokenizer.eos_token_id]}))
    ending = decoder(LLAMA, compiled(folder))
    (row,) = rows(ending, ["I am going"])
    generated(ending, [row])
    assert row.tokens == whole.tokens[: whole.tokens.index(end, len(whole.prompt_tokens)) + 1]
    assert row.new_tokens < whole.new_tokens


def test_a_batch_of_one(compile_, alone):
    single = decoder(LLAMA, compiled(compile_(LLAMA, batch_size=1)))
    seen()
    assert generated(single, rows(single, PROMPTS[:3])) == [alone(prompt) for prompt in PROMPTS[:3]]
    assert [batch["rows"] for batch in seen()] == [1, 1, 1]


def test_a_long_prompt_and_a_long_answer_go_apart(llama, alone):
    prompts = ["a 1 " * 65, "It"]
    asked = rows(llama, prompts, options(max_new_tokens=5), options(max_new_tokens=120))
    assert len(asked[0].prompt_tokens) > language.CONTEXT - 120
    assert sorted(map(len, llama.batches(asked))) == [1, 1]
    assert generated(llama, asked) == [alone(*each) for each in zip(prompts, (5, 120), strict=True)]
    assert llama.batches([]) == []


@pytest.mark.parametrize(
    ("model_class", "said"),
    [(LLAMA, {"on_device_sampling_config": {"top_k": 1}}), (OPTIMUM, {"on_device_sampling": True})],
)
def test_what_chooses_on_the_device_is_known_on_load(compile_, alone, model_class, said):
    device = decoder(model_class, compiled(compile_(model_class, **said)))
    assert not device.samples
    assert generated(device, rows(device, PROMPTS[:1])) == [alone(PROMPTS[0])]


def test_what_leaves_the_choice_to_us_is_known_on_load(served):
    assert served.samples


# --- what is compiled -------------------------------------------------------------------------------------------------


def test_what_the_config_does_not_say_is_the_models(compile_):
    for model_class in (LLAMA, OPTIMUM):
        shape = compiled(compile_(model_class, batch_size=2, tp_degree=2, max_context_length=64))
        found = (shape.batch_size, shape.tp_degree, shape.n_positions, shape.longest_prompt)
        assert found == (2, 2, language.CONTEXT, 64)


def test_what_nobody_says(checkpoint):
    shape = compiled(checkpoint)
    assert (shape.batch_size, shape.tp_degree, shape.n_positions, shape.amp, shape.unroll) == (1, 4, 2048, "bf16", None)
    assert compiled(checkpoint, UNROLL="None").unroll is None
    assert compiled(checkpoint, UNROLL=2).unroll == 2


def test_a_folder_beside_the_config(tmp_path, checkpoint):
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/opt").symlink_to(checkpoint)
    config = {"parameters": {"COMPILED_MODEL": {"string_value": "opt"}}}
    assert Compiled.of(config, {"model_repository": str(tmp_path / "llm")}, FOUR).folder == tmp_path / "llm/opt"


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (
            {"BATCH_SIZE": 8},
            r"parameter 'BATCH_SIZE' is 8, but the model was compiled for batch_size 4 \(.*/neuron_config.json\)",
        ),
        ({"N_POSITIONS": 2048}, "parameter 'N_POSITIONS' is 2048, but the model was compiled for seq_len 256"),
        ({"TP_DEGREE": 2}, "parameter 'TP_DEGREE' is 2, but the model was compiled for tp_degree 4"),
        ({"BATCH_SIZE": 0}, "parameter 'BATCH_SIZE' must be at least 1, not 0"),
        ({"BATCH_SIZE": "many"}, "parameter 'BATCH_SIZE' must be a whole number, not 'many'"),
        ({"cores": Cores(0, 2, 1)}, r"the model wants 4 NeuronCores \(tp_degree\) and an instance has 2"),
        ({"AMP": "float16"}, "parameter 'AMP' must be one of f32, f16, bf16"),
        ({"UNROLL": "all"}, "parameter 'UNROLL' must be a whole number"),
        ({"COMPILED_MODEL": ""}, "parameter 'COMPILED_MODEL' is missing"),
        ({"COMPILED_MODEL": "nowhere"}, "there is no folder /models/llm/nowhere: put the compiled model there"),
    ],
)
def test_wrong_parameters(compile_, parameters, reason):
    with pytest.raises(ConfigError, match=reason):
        compiled(compile_(LLAMA), **parameters)


def test_optimums_own_word_for_the_context(compile_):
    with pytest.raises(ConfigError, match="is 2048, but the model was compiled for sequence_length 256"):
        compiled(compile_(OPTIMUM), N_POSITIONS=2048)


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        ("", "parameter 'MODEL_CLASS' is missing: say a class of one of neuronx_distributed_inference, optimum.neuron"),
        ("transformers.LlamaForCausalLM", "is 'transformers.LlamaForCausalLM', of none of"),
        (LLAMA.replace("NeuronLlama", "NeuronLama"), r"has no class NeuronLamaForCausalLM; is it of another release\?"),
        (LLAMA.replace("models.llama", "models.lama"), "has no module neuronx_distributed_inference.models.lama"),
        ("optimum.neuron.NeuronModel", "optimum.neuron has no class NeuronModel; is it of another release"),
    ],
)
def test_wrong_classes(compile_, model_class, reason):
    with pytest.raises(ConfigError, match=reason):
        load(model_class, compiled(compile_(LLAMA)), FOUR)


@pytest.mark.parametrize("model_class", [LLAMA, OPTIMUM, OPT])
def test_a_library_that_is_not_installed(checkpoint, monkeypatch, model_class):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(STAND_INS)])
    forget(PACKAGES)  # not of the cores, which this process has
    package = next(name for name in PACKAGES if model_class.startswith(name))
    with pytest.raises(ConfigError, match=f"the Python package {package} is not installed where Triton runs"):
        load(model_class, compiled(checkpoint), FOUR)


def test_a_library_that_another_one_does_not_suit(compile_, monkeypatch):
    """As its adapter, with a transformers that is newer than it."""
    shape = compiled(compile_(LLAMA))
    model = load(LLAMA, shape, FOUR)
    monkeypatch.setitem(sys.modules, "neuronx_distributed_inference.utils.hf_adapter", None)
    with pytest.raises(ConfigError, match=r"has no module neuronx_distributed_inference\.utils\.hf_adapter; is it"):
        generating(model, shape)


@pytest.mark.parametrize("model_class", [LLAMA, OPTIMUM, OPT])
def test_what_a_library_raises_while_it_loads(compile_, model_class):
    eight = Cores(4, 8, 1)  # of which this process has four
    said = {"TP_DEGREE": 8, "cores": eight} if model_class == OPT else {"cores": eight}
    shape = compiled(compile_(model_class, tp_degree=8), **said)
    told = f"^{shape.folder} could not be loaded on NeuronCores 4 to 11: stand-in: 8 cores asked for, 4 visible$"
    with pytest.raises(ConfigError, match=told):
        load(model_class, shape, eight)


@pytest.mark.parametrize(
    ("model_class", "missing"),
    [(LLAMA, "neuron_config.json"), (LLAMA, "model.pt"), (OPTIMUM, "neuron_config.json"), (OPT, "config.json")],
)
def test_a_folder_of_something_else(compile_, model_class, missing):
    folder = compile_(model_class)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}: it is"):
        load(model_class, compiled(folder), FOUR)


def test_a_neuron_config_that_is_none(compile_):
    folder = compile_(LLAMA)
    (folder / "neuron_config.json").write_text("[1")
    with pytest.raises(ConfigError, match="is not what the compiler writes: copy the compiled folder again"):
        compiled(folder)


def test_models_of_ones_own(checkpoint):
    """What a model.py's own load() gives: with generate(), or nothing that could be served."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    shape = compiled(checkpoint)
    assert generating(plain, shape) is plain
    assert padding_side(plain, shape) == "left"
    with pytest.raises(ConfigError, match=r"load\(\) gave a Linear, which has no generate\(\)"):
        generating(torch.nn.Linear(1, 1), shape)


def test_a_transformers_without_generate_for_the_old_library(compile_, monkeypatch):
    shape = compiled(compile_(OPT))
    model = load(OPT, shape, FOUR)
    adapters = importlib.import_module("transformers_neuronx.generation_utils")
    bare = type("HuggingFaceGenerationModelAdapter", (), {"__init__": lambda self, config, model: None})
    monkeypatch.setattr(adapters, "HuggingFaceGenerationModelAdapter", bare)
    with pytest.raises(ConfigError, match=f"transformers {transformers.__version__} has no generate"):
        generating(model, shape)
