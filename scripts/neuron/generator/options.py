"""Every option there is: what it takes, what it is for, which models it goes with."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from generator.values import DATA_TYPES, INT64, cores, like, one_of, tensor, whole

PYTORCH, TENSORFLOW, TRANSFORMERS = KINDS = ("pytorch", "tensorflow", "transformers")
AMPS = ("f32", "f16", "bf16", "s8", "f8e4m3fn")
MANY = sys.maxsize
CLASS = "transformers_neuronx.opt.model.OPTForSampling"
EXAMPLES = {"triton_input": "INPUT__0,INT64,4x384", "triton_output": "OUTPUT__0,FP32,4x384"}


@dataclass(frozen=True)
class Option:
    name: str
    takes: str  # nothing: a switch; with ... several, and again
    about: str
    read: Callable[[str], object] = str
    default: object = None
    must: bool = False

    @property
    def room(self) -> int:
        """How many values it takes at a time."""
        return MANY if self.takes.endswith("...") else min(len(self.takes), 1)


@dataclass(frozen=True)
class Group:
    title: str
    kinds: tuple[str, ...]
    elsewhere: str  # what is said of them with other kinds; nothing: they do no harm there
    options: tuple[Option, ...]


GROUPS = (
    Group("the model", KINDS, "", (
        Option("model_type", "KIND", "pytorch, tensorflow, or transformers (a large language model)", one_of(KINDS),
               must=True),
        Option("inf2", "", "for Inf2 and Trn1 (torch-neuronx); without it for Inf1 (torch-neuron)"),
        Option("compiled_model", "PATH", "what was compiled: a TorchScript file, the folder of a SavedModel or of a "
               "language model, such as /compiled/bert.pt. Best in the model folder, which can then be moved. With "
               "--inf2 it is copied there from the working directory, and again where it has changed", must=True),
        Option("triton_model_dir", "FOLDER", "the model folder, to be written, such as bert; the model is named like "
               "it", must=True),
        Option("model_version", "N", "the version whose model.py is written", whole(1, INT64), 1),
    )),
    Group("its tensors (a SavedModel tells them itself)", (PYTORCH, TENSORFLOW),
          "a large language model takes prompts and answers texts: leave it out", (
        Option("triton_input", "NAME,TYPE,SHAPE...", f"inputs, such as {EXAMPLES['triton_input']}: for pytorch named "
               "<name>__<index>, by their place among the model's arguments; -1 for any size; where --max_batch_size "
               f"is above 0, without the dimension of the batch. Types: {', '.join(DATA_TYPES)}", tensor),
        Option("triton_output", "NAME,TYPE,SHAPE...", f"outputs, such as {EXAMPLES['triton_output']}, in the form of "
               "inputs", tensor),
    )),
    Group("NeuronCores", KINDS, "", (
        Option("neuron_core_range", "FIRST:LAST", "the cores it is loaded on, such as 0:3, which are four", cores,
               must=True),
        Option("triton_model_instance_count", "N", "instances, among which the cores are shared out equally: of 0:3 "
               "the first of two has 0:1", whole(1), 1),
        Option("threads_per_core", "N", "threads that feed a core", whole(1), 1),
    )),
    Group("batching", (PYTORCH, TENSORFLOW),
          "the backend puts prompts together by itself, --batch_size at a time: leave it out", (
        Option("max_batch_size", "ROWS", "rows in a batch at most, such as 16; 0: requests have no batch dimension",
               whole(0), 0),
        Option("enable_dynamic_batching", "", "Triton puts requests together, up to --max_batch_size rows"),
        Option("preferred_batch_size", "ROWS...", "with --enable_dynamic_batching: rows that are sent off without "
               "waiting for more, such as 4 8; best multiples of an instance's cores", whole(1)),
        Option("max_queue_delay_microseconds", "MICROSECONDS", "with --enable_dynamic_batching: how long a request "
               "waits for others at most, such as 100", whole(0, INT64)),
        Option("disable_batch_requests_to_neuron", "", "each request goes to Neuron by itself, even where Triton put "
               "it together with others"),
        Option("compiled_batch_size", "ROWS", "rows the model was compiled for, such as 4: batches are filled up to a "
               "multiple of it, and cut up among the cores by it. 0: not known; then pytorch with --inf2 takes a batch "
               "whole, on one core, and the others in even parts, on all of them, where its rows may vary", whole(0),
               0),
    )),
    Group("tensorflow", (TENSORFLOW,), "", (
        Option("tag_set", "TAGS", "the SavedModel's, such as serve,gpu", default="serve"),
        Option("signature_def_key", "KEY", "the SavedModel's, such as predict", default="serving_default"),
    )),
    Group("transformers (the defaults are those of models that do not know it themselves)", (TRANSFORMERS,),
          "goes with --model_type transformers only: leave it out", (
        Option("model_class", "CLASS", f"what loads the model, such as {CLASS}",
               like(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", f"a class with its package, such as {CLASS}"), must=True),
        Option("tp_degree", "CORES", "cores the model is split over, such as 2 (default: an instance's)", whole(1)),
        Option("batch_size", "PROMPTS", "prompts the model takes at a time, such as 4", whole(1), 1),
        Option("n_positions", "TOKENS", "tokens of a prompt and its answer together at most", whole(1), 2048),
        Option("amp", "TYPE", f"what the weights are turned into: {', '.join(AMPS)}", one_of(AMPS), "bf16"),
        Option("unroll", "LAYERS", "layers in one graph, such as 12",
               like("none|[1-9][0-9]*", "none, or a whole number from 1 on"), "none"),
    )),
)  # fmt: skip

OPTIONS = {option.name: option for group in GROUPS for option in group.options}

HELP = """usage: gen_triton_model.py --model_type KIND --compiled_model PATH --neuron_core_range FIRST:LAST
                           --triton_model_dir FOLDER [what else is below]

Writes the Triton model folder of a model compiled for AWS Neuron: config.pbtxt and <version>/model.py.
Both are yours to edit.

{options}

examples:
  BERT for Inf1, on four cores, from a TorchScript file:
    gen_triton_model.py --model_type pytorch --compiled_model /compiled/bert.pt --neuron_core_range 0:3
      --triton_input INPUT__0,INT64,4x384 INPUT__1,INT64,4x384 --triton_output OUTPUT__0,FP32,4x384
      --triton_model_dir bert
  The same for Inf2 or Trn1, compiled for 4 rows, requests put together up to 16 rows:
    gen_triton_model.py --inf2 --model_type pytorch --compiled_model bert.pt --neuron_core_range 0:3
      --triton_input INPUT__0,INT64,384 INPUT__1,INT64,384 --triton_output OUTPUT__0,FP32,384
      --compiled_batch_size 4 --enable_dynamic_batching --max_batch_size 16 --triton_model_dir bert
  A SavedModel of TensorFlow, which knows its own tensors:
    gen_triton_model.py --model_type tensorflow --compiled_model /compiled/resnet50/1 --neuron_core_range 0:3
      --triton_model_dir resnet50
  A large language model on two cores:
    gen_triton_model.py --inf2 --model_type transformers --compiled_model llama-compiled --neuron_core_range 0:1
      --model_class neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM
      --triton_model_dir llama"""


def help_text() -> str:
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for group in GROUPS:
        lines += ["", f"{group.title}:"]
        for option in group.options:
            about = f"{option.about}. Must be said" if option.must else option.about
            about += "" if option.default is None else f" (default: {option.default})"
            lines.append(f"  --{option.name} {option.takes}".rstrip())
            lines += textwrap.wrap(about, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return HELP.format(options="\n".join(lines[1:]))
