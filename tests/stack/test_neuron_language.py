"""Language models of every Neuron library on the real Triton, in folders that gen_triton_model.py writes.

The libraries are stand-ins (tests/support/neuron_stand_in): a real small model on the CPU that accepts only the shapes,
the side of the padding and the cores that it is compiled for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.batches import all_at_once
from tests.support.checkpoints import language
from tests.support.generation import PROMPTS, SECRET, counted, pieces, settled, text
from tests.support.neuron import logged, on_neuron
from tests.support.stacks import TestStack, bring_up
from triton_transformers.settings import ROOT
from triton_transformers.triton import TritonError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LLAMA = "neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM"
OPTIMUM = "optimum.neuron.NeuronModelForCausalLM"
OPT = "transformers_neuronx.opt.model.OPTForSampling"
CONTEXT = language.CONTEXT

# name -> (class, options of the compilation, flags of gen_triton_model.py)
MODELS: dict[str, tuple[str, dict, str]] = {
    "nxd": (LLAMA, {"batch_size": 4, "tp_degree": 4, "max_context_length": 200}, "--neuron_core_range 0:3"),
    "nxd_single": (LLAMA, {"batch_size": 1, "tp_degree": 1}, "--neuron_core_range 4:4 --batch_size 1"),
    "optimum": (OPTIMUM, {"batch_size": 4, "tp_degree": 2}, "--neuron_core_range 6:9 --tp_degree 2"),
    "opt": (
        OPT,
        {},
        "--neuron_core_range 10:13 --triton_model_instance_count 2 --batch_size 4 --tp_degree 2 "
        f"--n_positions {CONTEXT} --amp f32 --unroll 2",
    ),
}
# The user's own lines in model.py, as in the published guide.
OWN_LOAD = """
    def load(self):
        from transformers_neuronx.opt.model import OPTForSampling

        model = OPTForSampling.from_pretrained(
            str(self.compiled.folder), batch_size=2, tp_degree=1, amp="f16", n_positions=128, unroll=None
        )
        model.to_neuron()
        return model
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return language.save_mistral(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def served(new_stack, checkpoint) -> TestStack:
    """Serve on a stack whose profile is another."""
    stack = on_neuron(new_stack())
    for name, (model_class, options, flags) in MODELS.items():
        compile_(stack, model_class, checkpoint, stack.folder / "compiled" / name, options)
        generate(stack, name, model_class, flags)
    add_stream(stack)
    add_own_load(stack, checkpoint)
    stack.environment["SYSTEMS"] = " ".join([*MODELS, "nxd_stream", "own"])
    return bring_up(stack)


def compile_(stack: TestStack, model_class: str, checkpoint: Path, folder: Path, options: dict) -> None:
    """Write the compiled folder, by the stand-in's own compile() if its library has one."""
    if model_class == LLAMA:
        config = json.dumps({"neuron_config": {"seq_len": CONTEXT} | options})
        code = f"import {LLAMA.rpartition('.')[0]} as m, sys, json\n"
        code += "m.NeuronLlamaForCausalLM(sys.argv[1], json.loads(sys.argv[2])).compile(sys.argv[3])"
        arguments = [sys.executable, "-c", code, str(checkpoint), config, str(folder)]
        subprocess.run(arguments, env=stack.variables(NEURON_RT_VISIBLE_CORES="0-31"), check=True)
    else:
        AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    if model_class == OPTIMUM:
        config = {"sequence_length": CONTEXT, "on_device_sampling": False} | options
        (folder / "neuron_config.json").write_text(json.dumps(config))
        (folder / "model.pt").touch()
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def generate(stack: TestStack, name: str, model_class: str, flags: str) -> None:
    command = f"--inf2 --model_type transformers --model_class {model_class} {flags}".split()
    command += ["--compiled_model", stack.folder / "compiled" / name]
    command += ["--triton_model_dir", stack.folder / "models" / name]
    script = ROOT / "scripts/neuron/gen_triton_model.py"
    subprocess.run([sys.executable, script, *command], check=True, capture_output=True, cwd=stack.folder)


def add_stream(stack: TestStack) -> None:
    """Write the config of a streaming model by hand; with `backend: "neuron"` it needs no model.py."""
    config = (stack.folder / "models/nxd_single/config.pbtxt").read_text()
    config = config.replace('name: "nxd_single"', 'name: "nxd_stream"').replace("python", "neuron")
    config = config.replace('string_value: "4"', 'string_value: "15"')  # models share no core
    config += 'parameters { key: "task" value { string_value: "text-generation" } }\n'
    (stack.folder / "models/nxd_stream/1").mkdir(parents=True)
    path = stack.folder / "models/nxd_stream/config.pbtxt"
    path.write_text(config + "model_transaction_policy { decoupled: true }\n")


def add_own_load(stack: TestStack, checkpoint: Path) -> None:
    compile_(stack, OPT, checkpoint, stack.folder / "compiled/own", {})
    generate(stack, "own", OPT, "--neuron_core_range 14:14 --batch_size 2 --n_positions 128")
    path = stack.folder / "models/own/1/model.py"
    path.write_text(path.read_text() + OWN_LOAD)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """Return a function that generates greedily with transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    @cache
    def continued(prompt: str, new_tokens: int) -> str:
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        answer = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return tokenizer.decode(answer[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return continued


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_concurrent_requests_get_their_own_text(served, plain, model):
    before = len(logged(served, "generate"))
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} {n}" for n in range(8)]
    lengths = [3 + n * 7 % 12 for n in range(8)]
    expected = [plain(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert all_at_once(served, 8, lambda n: text(served, model, prompts[n], max_new_tokens=lengths[n])) == expected
    batches = logged(served, "generate")[before:]
    assert {batch["rows"] for batch in batches} == {1 if model == "nxd_single" else 4}
    assert len(batches) == 8 if model == "nxd_single" else len(batches) < 8


def test_streamed_pieces_join_to_the_same_text(served, plain):
    parts = pieces(served, "nxd_stream", "I am going", max_new_tokens=20)
    assert "".join(parts) == plain("I am going", 20)
    assert len(parts) > 5


def test_rows_that_fill_a_batch_count_only_as_padding(served, plain):
    before = settled(served, "own")
    assert text(served, "own", "I am going", max_new_tokens=4) == plain("I am going", 4)
    now = served.wait(lambda: counts(served, "own", "later_tokens", before["later_tokens"] + 3), "the text's tokens")
    width = logged(served, "generate")[-1]["width"]
    added = {name: now[name] - before[name] for name in now if not name.endswith("microseconds")}
    tokens = {"tokens": width, "padding_tokens": width, "generated_tokens": 4, "first_tokens": 1, "later_tokens": 3}
    assert added == {"requests": 1, "texts": 1, "runs": 4} | tokens


def counts(stack: TestStack, model: str, name: str, reached: int) -> dict[str, float] | None:
    """Return the counters once one of them has reached a value."""
    now = counted(stack, model)
    return now if now.get(name, 0) == reached else None


# --- cores ------------------------------------------------------------------------------------------------------------


def test_every_model_loads_its_options_on_its_own_cores(served):
    loads = logged(served, "load")
    places = {(load["visible"], load["library"], load["batch_size"], load["tp_degree"]) for load in loads}
    assert places == {
        ("0-3", "nxd-inference", 4, 4),
        ("4", "nxd-inference", 1, 1),
        ("6-9", "optimum-neuron", 4, 2),
        ("10-11", "transformers-neuronx", 4, 2),
        ("12-13", "transformers-neuronx", 4, 2),
        ("14", "transformers-neuronx", 2, 1),
        ("15", "nxd-inference", 1, 1),  # nxd_stream
    }
    options = {(call["visible"], call["amp"], call["unroll"]) for call in logged(served, "from_pretrained")}
    assert options == {("10-11", "f32", 2), ("12-13", "f32", 2), ("14", "f16", None)}


# --- wrong requests and wrong configs ---------------------------------------------------------------------------------


def test_wrong_option_is_refused(served):
    """tests/serving/neuron/test_language.py and tests/serving/text/test_prompts.py have the others."""
    for model, prompt, options, reason in (
        ("nxd", SECRET, {"max_new_tokens": 250}, r"context of 256 that leaves room for \d+ new ones"),
        (
            "nxd",
            "a 1 " * 72,
            {"max_new_tokens": 1},
            r"has 2\d\d tokens; the model is compiled for prompts of up",
        ),
    ):
        with pytest.raises(TritonError, match=reason) as error:
            text(served, model, prompt, **options)
        assert error.value.status == 400


def test_wrong_config_keeps_the_old_model(served, plain):
    config = served.triton.config("nxd")
    with pytest.raises(TritonError, match="parameter 'TP_DEGREE' is 2, but the model was compiled for tp_degree 4"):
        served.triton.load("nxd", config | {"parameters": config["parameters"] | {"TP_DEGREE": {"string_value": "2"}}})
    assert text(served, "nxd", "It", max_new_tokens=3) == plain("It", 3)
