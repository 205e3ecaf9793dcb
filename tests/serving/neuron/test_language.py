"""Test language models compiled for Neuron: full batches of any rows, and the checks of a model and its config.

The libraries are stand-ins (tests/support/neuron_stand_in), which run a small model with the limits of a compiled one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from serving.generation.row import Options, Row
from serving.neuron.cores import Cores
from serving.neuron.decoding import NeuronDecoder, padding_side, with_generate
from serving.neuron.llm import CompiledLLM, load
from serving.triton.types import ConfigError
from tests.support.checkpoints import language
from triton_transformers.settings import ROOT

STAND_INS = ROOT / "tests/support/neuron_stand_in"
PACKAGES = ("neuronx_distributed_inference", "optimum.neuron", "transformers_neuronx")
LLAMA = "neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM"
OPTIMUM = "optimum.neuron.NeuronModelForCausalLM"
OPT = "transformers_neuronx.opt.model.OPTForSampling"
PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]
FOUR = Cores(4, 4, 1)


def options(**values) -> Options:
    return Options(**{"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 1, "stop": ()} | values)


@pytest.fixture(scope="module", autouse=True)
def stand_ins(tmp_path_factory):
    """Put the stand-ins on the path and claim four cores; undo both for the tests of other modules."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        patch.setenv("NEURON_STAND_IN_LOG", str(tmp_path_factory.mktemp("log") / "calls.jsonl"))
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
    """Return a function that creates the folder that a library makes of the checkpoint."""

    def compile_checkpoint(model_class: str, **config) -> Path:
        folder = tmp_path_factory.mktemp("compiled") / "model"
        config = {"batch_size": 4, "tp_degree": 4} | config
        if model_class == LLAMA:
            library = importlib.import_module(LLAMA.rpartition(".")[0])
            model = library.NeuronLlamaForCausalLM(
                str(checkpoint), {"neuron_config": {"seq_len": language.CONTEXT} | config}
            )
            model.compile(str(folder))
            for file in checkpoint.glob("*token*"):
                shutil.copy(file, folder)
        else:
            shutil.copytree(checkpoint, folder)
        if model_class == OPTIMUM:
            config = {"sequence_length": language.CONTEXT, "on_device_sampling": False} | config
            (folder / "neuron_config.json").write_text(json.dumps(config))
            (folder / "model.pt").touch()
        return folder

    return compile_checkpoint


def compiled(folder: Path, cores: Cores = FOUR, **parameters) -> CompiledLLM:
    values = {"COMPILED_MODEL": folder, **parameters}
    config = {"parameters": {name: {"string_value": str(value)} for name, value in values.items()}}
    return CompiledLLM.read(config, {"model_repository": "/models/llm"}, cores)


def decoder(model_class: str, shape: CompiledLLM) -> NeuronDecoder:
    model = with_generate(load(model_class, shape, FOUR), shape)
    return NeuronDecoder(model, AutoTokenizer.from_pretrained(shape.folder), shape)


@pytest.fixture(scope="module", params=[LLAMA, OPTIMUM, OPT])
def served(request, compile_) -> NeuronDecoder:
    parameters = {"BATCH_SIZE": 4, "N_POSITIONS": language.CONTEXT} if request.param == OPT else {}
    return decoder(request.param, compiled(compile_(request.param), **parameters))


@pytest.fixture(scope="module")
def llama(compile_) -> NeuronDecoder:
    return decoder(LLAMA, compiled(compile_(LLAMA)))


def make_rows(served: NeuronDecoder, prompts: list[str], *row_options: Options) -> list[Row]:
    row_options = row_options or (options(),) * len(prompts)
    return [Row(prompt, served.encode(prompt), how) for prompt, how in zip(prompts, row_options, strict=True)]


def generated(served: NeuronDecoder, rows: list[Row]) -> list[str]:
    for batch in served.batches(rows):
        served.generate(batch, lambda: None)
    return [row.text for row in rows]


def new_batches() -> list[dict]:
    """Return the stand-in's log of the batches since the last call."""
    path = Path(os.environ["NEURON_STAND_IN_LOG"])
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("")
    return [event for event in events if event["event"] == "generate"]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Return a function that continues one prompt with the reference library."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    @functools.cache
    def continue_alone(prompt: str, new_tokens: int = 12) -> str:
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(output[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.removeprefix(prompt)

    return continue_alone


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_in_full_batches_are_those_generated_alone(served, alone):
    new_batches()
    lengths = [12, 3, 9, 7, 1]
    rows = make_rows(served, PROMPTS, *(options(max_new_tokens=length) for length in lengths))
    expected = [alone(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    assert len(set(expected)) == len(expected)
    assert generated(served, rows) == expected
    assert [batch["rows"] for batch in new_batches()] == [4, 4]


def test_single_row_is_padded_with_its_own_prompt(served, alone):
    new_batches()
    (row,) = rows = make_rows(served, PROMPTS[:1])
    assert generated(served, rows) == [alone(PROMPTS[0])]
    (batch,) = new_batches()
    assert batch["real"] == [len(row.prompt_tokens)] * 4


def test_padding_rows_do_not_keep_a_batch_running(llama):
    """The only client goes away after four tokens."""
    (row,) = make_rows(llama, PROMPTS[:1])
    steps = []

    def after_token() -> None:
        steps.append(row.new_tokens)
        row.done = row.done or len(steps) == 4

    llama.generate([row], after_token)
    assert steps == [1, 2, 3, 4]


def test_long_prompt_and_long_answer_run_in_separate_batches(llama, alone):
    prompts = ["a 1 " * 80, "It"]
    rows = make_rows(llama, prompts, options(max_new_tokens=5), options(max_new_tokens=20))
    assert language.CONTEXT - 20 < len(rows[0].prompt_tokens) < language.CONTEXT - 5
    assert sorted(map(len, llama.batches(rows))) == [1, 1]
    assert generated(llama, rows) == [alone(*case) for case in zip(prompts, (5, 20), strict=True)]
    assert llama.batches([]) == []


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(LLAMA, {"on_device_sampling_config": {"top_k": 1}}), (OPTIMUM, {"on_device_sampling": True})],
)
def test_sampling_on_the_device_is_detected_on_load(compile_, alone, model_class, config):
    device = decoder(model_class, compiled(compile_(model_class, **config)))
    assert not device.samples
    assert generated(device, make_rows(device, PROMPTS[:1])) == [alone(PROMPTS[0])]


# --- the compiled model and its config --------------------------------------------------------------------------------


def test_unset_parameters_come_from_the_model(compile_):
    for model_class in (LLAMA, OPTIMUM):
        shape = compiled(compile_(model_class, batch_size=2, tp_degree=2, max_context_length=64))
        values = (shape.batch_size, shape.tp_degree, shape.n_positions, shape.max_prompt)
        assert values == (2, 2, language.CONTEXT, 64)


def test_unset_parameters_of_a_plain_checkpoint_use_defaults(checkpoint):
    shape = compiled(checkpoint)
    assert (shape.batch_size, shape.tp_degree, shape.n_positions, shape.amp, shape.unroll) == (1, 4, 2048, "bf16", None)
    assert compiled(checkpoint, UNROLL="None").unroll is None
    assert compiled(checkpoint, UNROLL=2).unroll == 2


@pytest.mark.parametrize(("parameters", "reason"), [
    ({"BATCH_SIZE": 8},
        r"parameter 'BATCH_SIZE' is 8, but the model was compiled for batch_size 4 \(.*/neuron_config.json\)"),
    ({"N_POSITIONS": 2048}, "parameter 'N_POSITIONS' is 2048, but the model was compiled for seq_len 256"),
    ({"TP_DEGREE": 2}, "parameter 'TP_DEGREE' is 2, but the model was compiled for tp_degree 4"),
    ({"BATCH_SIZE": 0}, "parameter 'BATCH_SIZE' must be at least 1, not 0"),
    ({"BATCH_SIZE": "many"}, "parameter 'BATCH_SIZE' must be a whole number, not 'many'"),
    ({"cores": Cores(0, 2, 1)}, r"the model needs 4 NeuronCores \(tp_degree\) and an instance has 2"),
    ({"AMP": "float16"}, "parameter 'AMP' must be one of f32, f16, bf16"),
    ({"UNROLL": "all"}, "parameter 'UNROLL' must be a whole number"),
    ({"COMPILED_MODEL": ""}, "parameter 'COMPILED_MODEL' is missing"),
    ({"COMPILED_MODEL": "nowhere"}, "there is no folder /models/llm/nowhere: put the compiled model there"),
])  # fmt: skip
def test_wrong_parameter_is_an_error(compile_, parameters, reason):
    with pytest.raises(ConfigError, match=reason):
        compiled(compile_(LLAMA), **parameters)


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        ("", "parameter 'MODEL_CLASS' is missing: set a class of neuronx_distributed_inference, optimum.neuron"),
        ("transformers.LlamaForCausalLM", "'MODEL_CLASS' is 'transformers.LlamaForCausalLM': set a class of"),
        (LLAMA.replace("NeuronLlama", "NeuronLama"), r"has no class NeuronLamaForCausalLM; is it of another release\?"),
        (LLAMA.replace("models.llama", "models.gamma"), "has no module neuronx_distributed_inference.models.gamma"),
        ("optimum.neuron.NeuronModel", "optimum.neuron has no class NeuronModel; is it of another release"),
    ],
)
def test_wrong_class_is_an_error(compile_, model_class, reason):
    with pytest.raises(ConfigError, match=reason):
        load(model_class, compiled(compile_(LLAMA)), FOUR)


@pytest.mark.parametrize("model_class", [LLAMA, OPTIMUM, OPT])
def test_missing_library_is_an_error(checkpoint, monkeypatch, model_class):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(STAND_INS)])
    forget((*PACKAGES, "optimum"))  # but not stand_in_log, which holds the cores
    package = next(name for name in PACKAGES if model_class.startswith(name))
    with pytest.raises(ConfigError, match=f"the Python package {package} is not installed where Triton runs"):
        load(model_class, compiled(checkpoint), FOUR)


def test_adapter_that_transformers_breaks_is_an_error(compile_, monkeypatch):
    shape = compiled(compile_(LLAMA))
    model = load(LLAMA, shape, FOUR)
    monkeypatch.setitem(sys.modules, "neuronx_distributed_inference.utils.hf_adapter", None)
    with pytest.raises(ConfigError, match=r"has no module neuronx_distributed_inference\.utils\.hf_adapter; is it"):
        with_generate(model, shape)


@pytest.mark.parametrize("model_class", [LLAMA, OPTIMUM, OPT])
def test_error_while_loading_is_one_line(compile_, model_class):
    eight = Cores(4, 8, 1)  # this process has four
    parameters = {"TP_DEGREE": 8} if model_class == OPT else {}
    shape = compiled(compile_(model_class, tp_degree=8), eight, **parameters)
    message = f"^{shape.folder} could not be loaded on NeuronCores 4 to 11: stand-in: 8 cores asked for, 4 visible$"
    with pytest.raises(ConfigError, match=message):
        load(model_class, shape, eight)


@pytest.mark.parametrize(
    ("model_class", "missing"),
    [(LLAMA, "neuron_config.json"), (LLAMA, "model.pt"), (OPTIMUM, "neuron_config.json"), (OPT, "config.json")],
)
def test_folder_without_a_file_is_an_error(compile_, model_class, missing):
    folder = compile_(model_class)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}: it must be"):
        load(model_class, compiled(folder), FOUR)


def test_unreadable_neuron_config_is_an_error(compile_):
    folder = compile_(LLAMA)
    (folder / "neuron_config.json").write_text("[1")
    with pytest.raises(ConfigError, match="is not what the compiler writes: copy the compiled folder again"):
        compiled(folder)


def test_model_of_an_overridden_load_needs_generate(checkpoint):
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    shape = compiled(checkpoint)
    assert with_generate(plain, shape) is plain
    assert padding_side(plain, shape) == "left"
    with pytest.raises(ConfigError, match=r"load\(\) returned a Linear, which lacks the generate\(\)"):
        with_generate(torch.nn.Linear(1, 1), shape)


def test_transformers_without_generate_for_the_old_library_is_an_error(compile_, monkeypatch):
    shape = compiled(compile_(OPT))
    model = load(OPT, shape, FOUR)
    adapters = importlib.import_module("transformers_neuronx.generation_utils")
    bare = type("HuggingFaceGenerationModelAdapter", (), {"__init__": lambda self, config, model: None})
    monkeypatch.setattr(adapters, "HuggingFaceGenerationModelAdapter", bare)
    with pytest.raises(ConfigError, match=f"transformers {transformers.__version__} has no generate"):
        with_generate(model, shape)


def test_relative_path_starts_at_the_model_folder(tmp_path, checkpoint):
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/opt").symlink_to(checkpoint)
    config = {"parameters": {"COMPILED_MODEL": {"string_value": "opt"}}}
    assert CompiledLLM.read(config, {"model_repository": str(tmp_path / "llm")}, FOUR).folder == tmp_path / "llm/opt"
