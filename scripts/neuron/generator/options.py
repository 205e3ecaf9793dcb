"""The options: what each takes, what it is for, the kinds of models that it applies to, and their values.

All wrong arguments are collected, so that one run reports every one of them.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INT32, INT64 = 2**31 - 1, 2**63 - 1
INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
DATA_TYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "STRING")
PYTORCH, TENSORFLOW, TRANSFORMERS = KINDS = ("pytorch", "tensorflow", "transformers")
AMPS = ("f32", "f16", "bf16", "s8", "f8e4m3fn")
CLASS = "transformers_neuronx.opt.model.OPTForSampling"
EXAMPLES = {"triton_input": "INPUT__0,INT64,4x384", "triton_output": "OUTPUT__0,FP32,4x384"}


# --- types of values: a text becomes a value, or ValueError names what is wrong ---------------------------------------


def whole_number(minimum: int, maximum: int = INT32) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else minimum - 1
        if not minimum <= number <= maximum:
            limit = f"at most {maximum}" if number > maximum else f"at least {minimum}"
            raise ValueError(f"must be a whole number, {limit}")
        return number

    return convert


def matching(pattern: str, description: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"must be {description}")
        return text

    return convert


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    return matching("|".join(choices), f"one of {', '.join(choices)}")


def core_range(text: str) -> range:
    match = re.fullmatch("(-?[0-9]{1,19}):(-?[0-9]{1,19})", text)
    if not match:
        raise ValueError("must be the first and the last core, such as 0:3")
    first, last = map(int, match.groups())
    if min(first, last) < 0 or max(first, last) > INT32:
        raise ValueError("cores are counted from 0, such as 0:3")
    if last < first:
        raise ValueError(f"ends before it starts; did you mean {last}:{first}?")
    return range(first, last + 1)


@dataclass
class Tensor:
    """An input or an output of the model."""

    name: str
    data_type: str
    dims: list[int] | None  # None: the model does not know how many dimensions there are
    optional: bool = False


def tensor(text: str) -> Tensor:
    """Return the tensor, or raise ValueError with one argument per mistake."""
    parts = text.split(",")
    if len(parts) != 3 or not parts[0]:
        raise ValueError("must be a name, a data type and a shape, such as INPUT__0,INT64,4x384")
    name, data_type, shape = parts
    data_type = "STRING" if data_type == "BYTES" else data_type
    mistakes = []
    if data_type not in DATA_TYPES:
        mistakes.append(f"unknown data type '{data_type}'; must be one of {', '.join(DATA_TYPES)}")
    if not all(re.fullmatch("-1|0*[1-9][0-9]{0,17}", size) for size in shape.split("x")):
        mistakes.append(f"invalid shape '{shape}'; must be sizes of at least 1, or -1 for any size, such as 4x384")
    if mistakes:
        raise ValueError(*mistakes)
    return Tensor(name, data_type, [int(size) for size in shape.split("x")])


# --- the options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    name: str
    metavar: str  # "" for a switch, which takes no value
    help: str
    type: Callable[[str], object] = str
    default: object = None
    required: bool = False
    many: bool = False  # takes several values, and may be repeated


@dataclass(frozen=True)
class Group:
    title: str
    kinds: tuple[str, ...]
    not_applicable: str  # the error if another kind's command line has the option; "" for a warning only
    options: tuple[Option, ...]


GROUPS = (
    Group("model", KINDS, "", (
        Option("model_type", "KIND", "pytorch, tensorflow, or transformers (a large language model)", one_of(KINDS),
               required=True),
        Option("inf2", "", "for Inf2 and Trn1 (torch-neuronx); without it for Inf1 (torch-neuron)"),
        Option("compiled_model", "PATH", "the compiled model: a TorchScript file, or the folder of a SavedModel or of "
               "a language model, such as /compiled/bert.pt. Best kept in the model folder, which can then be moved. "
               "With --inf2 a relative path is copied there from the working directory, and copied again if it has "
               "changed", required=True),
        Option("triton_model_dir", "FOLDER", "the model folder to write, such as bert; its name becomes the model's "
               "name", required=True),
        Option("model_version", "N", "the version whose model.py is written", whole_number(1, INT64), 1),
    )),
    Group("tensors (optional for a SavedModel, which knows its own)", (PYTORCH, TENSORFLOW),
          "a large language model takes prompts and returns texts; leave it out", (
        Option("triton_input", "NAME,TYPE,SHAPE", f"inputs, such as {EXAMPLES['triton_input']}: for pytorch named "
               "<name>__<index>, by their position among the model's arguments; -1 for any size; if --max_batch_size "
               f"is above 0, without the batch dimension. Types: {', '.join(DATA_TYPES)}", tensor, many=True),
        Option("triton_output", "NAME,TYPE,SHAPE", f"outputs, such as {EXAMPLES['triton_output']}, in the form of "
               "inputs", tensor, many=True),
    )),
    Group("NeuronCores", KINDS, "", (
        Option("neuron_core_range", "FIRST:LAST", "the cores that load the model, such as 0:3 for four cores",
               core_range, required=True),
        Option("triton_model_instance_count", "N", "instances, which share the cores equally: with 0:3 and two "
               "instances, the first one has 0:1", whole_number(1), 1),
        Option("threads_per_core", "N", "threads that feed each core", whole_number(1), 1),
    )),
    Group("batching", (PYTORCH, TENSORFLOW),
          "the backend batches prompts by itself, up to --batch_size; leave it out", (
        Option("max_batch_size", "ROWS", "maximum rows per batch, such as 16; 0: requests have no batch dimension",
               whole_number(0), 0),
        Option("enable_dynamic_batching", "", "Triton merges requests into batches of up to --max_batch_size rows"),
        Option("preferred_batch_size", "ROWS", "with --enable_dynamic_batching: batch sizes that do not wait for more "
               "requests, such as 4 8; best multiples of the cores per instance", whole_number(1), many=True),
        Option("max_queue_delay_microseconds", "MICROSECONDS", "with --enable_dynamic_batching: how long a request "
               "waits for others at most, such as 100", whole_number(0, INT64)),
        Option("disable_batch_requests_to_neuron", "", "run each request by itself, even if Triton batched it with "
               "others"),
        Option("compiled_batch_size", "ROWS", "rows that the model was compiled for, such as 4: a batch is padded to "
               "a multiple of it and cut into chunks of it, which the cores run side by side. 0: unknown; then "
               "pytorch with --inf2 runs a batch whole on one core, and the others cut it evenly over all cores if "
               "its number of rows may vary", whole_number(0), 0),
    )),
    Group("tensorflow", (TENSORFLOW,), "", (
        Option("tag_set", "TAGS", "the SavedModel's tags, such as serve,gpu", default="serve"),
        Option("signature_def_key", "KEY", "the SavedModel's signature, such as predict", default="serving_default"),
    )),
    Group("transformers (the model's own neuron_config.json replaces these defaults)", (TRANSFORMERS,),
          "goes with --model_type transformers only; leave it out", (
        Option("model_class", "CLASS", f"the class that loads the model, such as {CLASS}",
               matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", f"a class with its package, such as {CLASS}"),
               required=True),
        Option("tp_degree", "CORES", "cores that the model is split over, such as 2 (default: the cores per instance)",
               whole_number(1)),
        Option("batch_size", "PROMPTS", "prompts per batch, such as 4", whole_number(1), 1),
        Option("n_positions", "TOKENS", "maximum tokens of a prompt and its answer together", whole_number(1), 2048),
        Option("amp", "TYPE", f"the type of the weights: {', '.join(AMPS)}", one_of(AMPS), "bf16"),
        Option("unroll", "LAYERS", "layers per graph, such as 12",
               matching("none|[1-9][0-9]*", "none, or a whole number, at least 1"), "none"),
    )),
)  # fmt: skip

OPTIONS = {option.name: option for group in GROUPS for option in group.options}

USAGE = """gen_triton_model.py --model_type KIND --compiled_model PATH --neuron_core_range FIRST:LAST
                           --triton_model_dir FOLDER [options]"""
DESCRIPTION = """Write the Triton model folder of a model compiled for AWS Neuron: config.pbtxt and <version>/model.py.
Both are yours to edit."""
EPILOG = """examples:
  BERT for Inf1, on four cores, from a TorchScript file:
    gen_triton_model.py --model_type pytorch --compiled_model /compiled/bert.pt --neuron_core_range 0:3
      --triton_input INPUT__0,INT64,4x384 INPUT__1,INT64,4x384 --triton_output OUTPUT__0,FP32,4x384
      --triton_model_dir bert
  The same for Inf2 or Trn1, compiled for 4 rows, with requests merged into batches of up to 16 rows:
    gen_triton_model.py --inf2 --model_type pytorch --compiled_model bert.pt --neuron_core_range 0:3
      --triton_input INPUT__0,INT64,384 INPUT__1,INT64,384 --triton_output OUTPUT__0,FP32,384
      --compiled_batch_size 4 --enable_dynamic_batching --max_batch_size 16 --triton_model_dir bert
  A TensorFlow SavedModel, which knows its own tensors:
    gen_triton_model.py --model_type tensorflow --compiled_model /compiled/resnet50/1 --neuron_core_range 0:3
      --triton_model_dir resnet50
  A large language model on two cores:
    gen_triton_model.py --inf2 --model_type transformers --compiled_model llama-compiled --neuron_core_range 0:1
      --model_class neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM
      --triton_model_dir llama"""


def build_parser(single: str | None = None, many: str = "+") -> argparse.ArgumentParser:
    """Build the parser. `single` and `many` are the nargs of options that take one value or several."""
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=8, width=min(shutil.get_terminal_size().columns, 120)
        ),
    )
    parser._negative_number_matcher = re.compile("-(?!-?[A-Za-z])")  # -1:3 is a value too
    for group in GROUPS:
        arguments = parser.add_argument_group(group.title)
        for option in group.options:
            text = f"{option.help}. Required" if option.required else option.help
            text += "" if option.default is None else f" (default: {option.default})"
            values: dict = {"action": "store_const", "const": []}
            if option.metavar:
                values = {"action": "extend", "nargs": many} if option.many else {"nargs": single}
                values["metavar"] = option.metavar
            arguments.add_argument(f"--{option.name}", help=text, **values)
    return parser


# --- the command line -------------------------------------------------------------------------------------------------


class InvalidArgument(Exception):
    """An argument is wrong. `Arguments.errors` has the message already."""


class Arguments:
    """The options' values: `arguments["max_batch_size"]` raises InvalidArgument if that value is wrong or missing."""

    def __init__(self, command_line: list[str]) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.values: dict[str, Any] = {}
        self.texts = self.parse(command_line)
        kind = self.text("model_type")
        self.kind = kind if kind in KINDS else None
        for group in GROUPS:
            for option in group.options:
                if self.kind and self.kind not in group.kinds:
                    self.reject(option, group)
                else:
                    self.convert(option, required=option.required and bool(self.kind or group.kinds == KINDS))

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidArgument
        return self.values[name]

    def given(self, name: str) -> bool:
        return name in self.texts

    def text(self, name: str) -> str:
        """Return the value as the user wrote it, or the default."""
        return " ".join(self.texts[name]) if self.given(name) else str(self.values.get(name, ""))

    def error(self, name: str, problem: str, value: object = None) -> InvalidArgument:
        """Record an error; the caller raises the result if it cannot go on without the value."""
        text = self.text(name) if value is None else str(value)
        self.errors.append(f"--{name} {shlex.quote(text)}: {problem}" if text else f"--{name}: {problem}")
        return InvalidArgument()

    def attempt(self, function: Callable, *more: object) -> Any:
        """Return the function's result, or None if an argument that it needs is wrong."""
        try:
            return function(self, *more)
        except InvalidArgument:
            return None

    def parse(self, command_line: list[str]) -> dict[str, list[str]]:
        """Return the texts of each option that was given.

        argparse exits at its first error. So it only splits the command line, with nothing left that it would reject.
        """
        accepted, unknown = [], set()
        for argument in command_line:
            name, equals, _ = argument.partition("=")
            option = OPTIONS.get(name[2:]) if name.startswith("--") else None
            if not argument.isprintable():
                self.errors.append(f"{argument!a}: has characters that cannot be printed")
            if option and equals and not option.metavar:
                self.errors.append(f"{argument}: takes no value; write {name}, or leave it out")
                continue
            elif not option and re.match("--?[A-Za-z]", argument):
                close = difflib.get_close_matches(name, ["--help", *(f"--{known}" for known in OPTIONS)], 1)
                self.errors.append(f"{name}: unknown option" + (f"; did you mean {close[0]}?" if close else ""))
                unknown.add(name)
            accepted.append(argument)
        parser = build_parser(single="?", many="*")
        if unknown:
            parser.add_argument(*unknown, dest="unknown", nargs="*")  # takes the values that may be meant for it
        namespace, rest = parser.parse_known_args(accepted)
        self.errors += [f"{argument}: belongs to no option" for argument in rest]
        return {name: text if isinstance(text, list) else [text or ""] for name, text in vars(namespace).items()}

    def convert(self, option: Option, required: bool) -> None:
        name, summary = option.name, option.help.partition(". ")[0]
        if not option.metavar:
            self.values[name] = self.given(name)
        elif not self.given(name) and required:
            self.errors.append(f"--{name} is missing: {summary}")
        elif not self.given(name):
            self.values[name] = option.default
        elif not any(self.texts[name]):
            self.errors.append(f"--{name} needs a value: {summary}")
        else:
            values = [self.convert_text(option, text) for text in self.texts[name]]
            if None not in values:
                self.values[name] = values if option.many else values[0]

    def convert_text(self, option: Option, text: str) -> object:
        try:
            return option.type(text)
        except ValueError as error:
            for problem in error.args:
                self.error(option.name, problem, text)
            return None

    def reject(self, option: Option, group: Group) -> None:
        """Report an option of another kind of model: an error if it would have changed something."""
        self.values[option.name] = option.default
        if self.given(option.name) and not group.not_applicable:
            self.warnings.append(f"--{option.name}: ignored, it goes with --model_type {group.kinds[0]}")
        elif self.given(option.name) and self.text(option.name) != str(option.default):
            self.error(option.name, group.not_applicable)
