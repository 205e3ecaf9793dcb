#!/usr/bin/env python3
"""Write the Triton model folder of a model compiled for AWS Neuron: config.pbtxt and <version>/model.py.

This file runs alone, anywhere with Python 3.8 or newer. It needs `tensorflow` only to read the tensors of a SavedModel
that the command line does not list. It writes all new files to a work folder first, so that a failure changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

INT32, INT64 = 2**31 - 1, 2**63 - 1
INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
DATA_TYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "STRING")
PYTORCH, TENSORFLOW, TRANSFORMERS = KINDS = ("pytorch", "tensorflow", "transformers")
AMPS = ("f32", "f16", "bf16", "s8", "f8e4m3fn")
CLASS = "transformers_neuronx.opt.model.OPTForSampling"
EXAMPLES = {"triton_input": "INPUT__0,INT64,4x384", "triton_output": "OUTPUT__0,FP32,4x384"}


# --- types of values: a text becomes a value, or ArgumentTypeError names what is wrong --------------------------------


def whole_number(minimum: int, maximum: int = INT32) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else minimum - 1
        if not minimum <= number <= maximum:
            limit = f"at most {maximum}" if number > maximum else f"at least {minimum}"
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {limit}")
        return number

    return convert


def matching(pattern: str, description: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} must be {description}")
        return text

    return convert


def core_range(text: str) -> range:
    match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be the first and the last core, such as 0:3")
    return range(int(match[1]), int(match[2]) + 1)


@dataclass
class Tensor:
    """An input or an output of the model."""

    name: str
    data_type: str
    dims: list[int] | None  # None: the model does not know how many dimensions there are
    optional: bool = False


def tensor(text: str) -> Tensor:
    match = re.fullmatch("([^,]+),([^,]*),([^,]*)", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a name, a data type and a shape, such as INPUT__0,INT64,4x384"
        )
    name, data_type, shape = match.groups()
    data_type = "STRING" if data_type == "BYTES" else data_type
    if data_type not in DATA_TYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: unknown data type {data_type!r}; must be one of {', '.join(DATA_TYPES)}"
        )
    if not all(re.fullmatch("-1|0*[1-9][0-9]{0,17}", size) for size in shape.split("x")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: invalid shape; must be sizes of at least 1, or -1 for any size, such as 4x384"
        )
    return Tensor(name, data_type, [int(size) for size in shape.split("x")])


# --- the options ------------------------------------------------------------------------------------------------------


TEXT = matching(".+", "at least one character")


@dataclass(frozen=True)
class Option:
    name: str
    metavar: str  # "" for a switch, which takes no value
    help: str
    type: Callable[[str], object] = TEXT
    default: object = None
    required: bool = False
    many: bool = False  # takes several values, and may be repeated
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Group:
    title: str
    kinds: tuple[str, ...]
    not_applicable: str  # the error if another kind's command line has the option; "" for a warning only
    options: tuple[Option, ...]


GROUPS = (
    Group("model", KINDS, "", (
        Option("model_type", "KIND", "pytorch, tensorflow, or transformers (a large language model)",
               required=True, choices=KINDS),
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
        Option("amp", "TYPE", f"the type of the weights: {', '.join(AMPS)}", default="bf16", choices=AMPS),
        Option("unroll", "LAYERS", "layers per graph, such as 12",
               matching("none|[1-9][0-9]*", "none, or a whole number, at least 1"), "none"),
    )),
)  # fmt: skip

DEFAULTS = {option.name: option.default if option.metavar else False for group in GROUPS for option in group.options}

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


class InvalidArgument(Exception):
    """An argument is wrong; nothing is written."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, built from GROUPS. Its result has only the options that were given."""

    def __init__(self) -> None:
        super().__init__(
            usage=USAGE,
            description=DESCRIPTION,
            epilog=EPILOG,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=8, width=min(shutil.get_terminal_size().columns, 120)
            ),
        )
        for group in GROUPS:
            section = self.add_argument_group(group.title)
            for option in group.options:
                text = f"{option.help}. Required" if option.required else option.help
                text += "" if option.default is None else f" (default: {option.default})"
                form: dict[str, Any] = {"action": "store_true"}
                if option.metavar:
                    form = {"metavar": option.metavar, "type": option.type, "choices": option.choices}
                if option.many:
                    form.update(action="extend", nargs="+")
                section.add_argument(
                    f"--{option.name}", help=text, required=option.required and group.kinds == KINDS, **form
                )

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(message)


class Arguments:
    """The values of all options, and what to warn of."""

    def __init__(self, command_line: list[str]) -> None:
        for argument in command_line:  # config.pbtxt has the command in a comment
            if not argument.isprintable():
                raise InvalidArgument(f"{argument!a}: has characters that cannot be printed")
        self.given = vars(Parser().parse_args(command_line))
        self.values = {**DEFAULTS, **self.given}
        self.warnings: list[str] = []
        self.kind: str = self["model_type"]
        for group in GROUPS:
            for option in group.options:
                if self.kind not in group.kinds:
                    self.reject(option, group)
                elif option.required and option.name not in self.given:
                    raise InvalidArgument(f"--{option.name} is missing: {option.help}")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def reject(self, option: Option, group: Group) -> None:
        """Refuse an option of another kind of model if it would have changed something."""
        if self[option.name] != DEFAULTS[option.name]:
            if group.not_applicable:
                raise InvalidArgument(f"--{option.name}: {group.not_applicable}")
            self.warnings.append(f"--{option.name}: ignored, it goes with --model_type {group.kinds[0]}")

    def error(self, name: str, problem: str, value: object = None) -> InvalidArgument:
        """Return the error of an option, with its value, or with the part of it that is wrong."""
        return InvalidArgument(f"--{name} {shlex.quote(str(value or self[name]))}: {problem}")


# --- what to write ----------------------------------------------------------------------------------------------------

LANGUAGE_OPTIONS = [option.name for group in GROUPS if group.kinds == (TRANSFORMERS,) for option in group.options]
# The same as in model_repository/falcon7b/config.pbtxt, and a chat.
PROMPTS = (
    "prompt,STRING,-1 text_input,STRING,-1 messages,STRING,1 max_new_tokens,INT32,1 temperature,FP32,1 top_p,FP32,1 "
    "seed,INT64,1 stop,STRING,-1 cancel,STRING,1 stream,BOOL,1 exclude_input_in_output,BOOL,1 "
    "sampling_parameters,STRING,1"
)
TEXTS = (
    "text,STRING,-1 text_output,STRING,-1 finish_reason,STRING,-1 stop_reason,STRING,-1 num_input_tokens,UINT32,-1 "
    "num_output_tokens,UINT32,-1 num_cached_tokens,UINT32,-1 logprobs,STRING,-1 tokenized,STRING,-1"
)
LANGUAGE_MODEL = {
    "triton_input": [replace(tensor(text), optional=True) for text in PROMPTS.split()],
    "triton_output": [tensor(text) for text in TEXTS.split()],
}
TRITON_TYPES = {
    **{f"DT_{name}": name for name in ("BOOL", *INTEGERS, "STRING")},
    **{"DT_HALF": "FP16", "DT_FLOAT": "FP32", "DT_DOUBLE": "FP64"},
    "DT_BFLOAT16": "FP32",  # TensorFlow answers in numpy, which has no bfloat16
}


@dataclass
class Specification:
    folder: Path
    version: int
    compiled: CompiledModel
    base: str  # the class of the `neuron` backend that model.py subclasses
    config: dict


def specify(arguments: Arguments) -> Specification:
    folder = model_folder(arguments)
    cores = cores_per_instance(arguments)
    batching = dynamic_batching(arguments)
    compiled = compiled_model(arguments, folder)
    if arguments.kind == TRANSFORMERS:
        base, sides, rows = "LanguageModel", LANGUAGE_MODEL, 0
        check_tp_degree(arguments, cores)
    else:
        base, (sides, rows) = "TensorModel", model_tensors(arguments, compiled)
    warn_of_newer_version(arguments, folder)
    if arguments.kind == PYTORCH and not rows:
        warn_of_idle_cores(arguments, cores)
    config = {
        "name": folder.name,
        "backend": "python",
        "max_batch_size": arguments["max_batch_size"],
        "input": [tensor_config(tensor) for tensor in sides["triton_input"]],
        "output": [tensor_config(tensor) for tensor in sides["triton_output"]],
        **batching,
        "instance_group": [{"count": arguments["triton_model_instance_count"], "kind": Enum("KIND_MODEL")}],
        "parameters": Map(
            (name, {"string_value": str(value)}) for name, value in parameters(arguments, compiled, rows).items()
        ),
    }
    return Specification(folder, arguments["model_version"], compiled, base, config)


def cores_per_instance(arguments: Arguments) -> int:
    cores, instances = len(arguments["neuron_core_range"]), arguments["triton_model_instance_count"]
    if cores % instances:
        divisors = ", ".join(str(count) for count in range(1, min(cores, 128) + 1) if cores % count == 0)
        problem = f"cannot share {cores} cores equally; must be one of {divisors}"
        raise arguments.error("triton_model_instance_count", problem)
    return cores // instances


def dynamic_batching(arguments: Arguments) -> dict[str, dict]:
    """Return the field of config.pbtxt, or nothing if dynamic batching is off."""
    given = [name for name in ("preferred_batch_size", "max_queue_delay_microseconds") if name in arguments.given]
    if not arguments["enable_dynamic_batching"]:
        arguments.warnings += [f"--{name}: ignored without --enable_dynamic_batching" for name in given]
        return {}
    maximum = arguments["max_batch_size"]
    if maximum == 0:
        raise InvalidArgument("--enable_dynamic_batching: needs --max_batch_size, such as 8")
    for size in arguments["preferred_batch_size"] or []:
        if size > maximum:
            raise arguments.error("preferred_batch_size", f"must be at most --max_batch_size, {maximum}", size)
    return {"dynamic_batching": {name: arguments[name] for name in given}}


def check_tp_degree(arguments: Arguments, cores: int) -> None:
    degree = arguments["tp_degree"] or cores
    if degree > cores:
        raise arguments.error("tp_degree", f"an instance has {cores} cores; must be at most {cores}")
    if degree < cores:
        arguments.warnings.append(f"--tp_degree {degree}: an instance has {cores} cores; the others stay idle")


def warn_of_newer_version(arguments: Arguments, folder: Path) -> None:
    newest = max((int(path.name) for path in folder.glob("*") if re.fullmatch("[1-9][0-9]*", path.name)), default=0)
    version = arguments["model_version"]
    if newest > version:
        arguments.warnings.append(f"--model_version {version}: {folder.name} has {newest} too, which Triton prefers")


def warn_of_idle_cores(arguments: Arguments, cores: int) -> None:
    """Warn about torch-neuronx only: torch-neuron cuts batches by itself, and separate requests run side by side."""
    side_by_side = arguments["disable_batch_requests_to_neuron"] and arguments["enable_dynamic_batching"]
    if arguments["inf2"] and cores > 1 and not side_by_side:
        arguments.warnings.append(
            f"--compiled_batch_size is not set: only one of an instance's {cores} cores computes at a time; set it to "
            "cut batches over the cores, or give each core an instance with --triton_model_instance_count "
            f"{len(arguments['neuron_core_range'])}"
        )


def tensor_config(tensor: Tensor) -> dict[str, object]:
    config: dict[str, object] = {
        "name": tensor.name,
        "data_type": Enum(f"TYPE_{tensor.data_type}"),
        "dims": tensor.dims or [1],
    }
    if not tensor.dims:  # Triton needs a dimension: clients see one of size 1, the model sees none
        config["reshape"] = {"shape": []}
    return {**config, "optional": True} if tensor.optional else config


def parameters(arguments: Arguments, compiled: CompiledModel, rows: int) -> dict[str, object]:
    """Return the parameters of config.pbtxt. For a language model, unset options are left to the model's own config."""
    cores, neuronx = arguments["neuron_core_range"], arguments["inf2"] or arguments.kind == TRANSFORMERS
    common = {
        "COMPILED_MODEL": compiled.parameter,
        "NEURON_CORE_START_INDEX": cores[0],
        "NEURON_CORE_END_INDEX": cores[-1],
        "NUM_THREADS_PER_CORE": arguments["threads_per_core"],
        "FRAMEWORK": TENSORFLOW if arguments.kind == TENSORFLOW else "torch-neuronx" if neuronx else "torch-neuron",
    }
    if arguments.kind == TRANSFORMERS:
        return {**common, **{name.upper(): arguments[name] for name in LANGUAGE_OPTIONS if name in arguments.given}}
    common["BATCH_REQUESTS_TO_NEURON"] = "false" if arguments["disable_batch_requests_to_neuron"] else "true"
    if rows:
        common["COMPILED_BATCH_SIZE"] = rows
    if arguments.kind == TENSORFLOW:
        common.update(TAG_SET=arguments["tag_set"], SIGNATURE_DEF_KEY=arguments["signature_def_key"])
    return common


# --- the model folder, and the compiled model -------------------------------------------------------------------------


def model_folder(arguments: Arguments) -> Path:
    folder = Path(os.path.abspath(arguments["triton_model_dir"]))
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_.-]*", folder.name):
        problem = "its last part is the model's name: letters, digits, '_', '-' and '.'"
    elif not os.path.isdir(parent):
        problem = f"{parent} is not a folder; choose another one, or move it away"
    elif not os.access(parent, os.W_OK | os.X_OK):
        problem = f"you cannot write to {parent}; choose another folder, or ask its owner"
    else:
        return folder
    raise arguments.error("triton_model_dir", problem)


@dataclass
class CompiledModel:
    path: Path
    parameter: str  # the COMPILED_MODEL of config.pbtxt: relative if the model lies in the model folder
    copied: bool = False  # into the model folder, unless that has the same content


def compiled_model(arguments: Arguments, folder: Path) -> CompiledModel:
    text = arguments["compiled_model"]
    path = Path(os.path.abspath(text))
    moves_in = arguments["inf2"] and not os.path.isabs(text)
    if moves_in:
        model = compiled_for_inf2(text, path, folder)
    else:
        # A relative path stays valid in a container, and after the folder was moved.
        model = CompiledModel(path, path_within(folder, path) or str(path))
    if not os.path.exists(model.path):
        neither = f"is neither in {folder} nor in {os.getcwd()}"
        problem = neither if moves_in else f"{model.path} does not exist"
    elif arguments.kind == PYTORCH and not os.path.isfile(model.path):
        kind = "a folder" if os.path.isdir(model.path) else "not a regular file"
        problem = f"is {kind}; must be the file that torch.jit.save wrote"
    elif arguments.kind == TENSORFLOW and not saved_model_file(model.path):
        problem = "must be the folder of a SavedModel, which has a saved_model.pb"
    elif arguments.kind == TRANSFORMERS and not os.path.isdir(model.path):
        problem = "is not a folder; must be the folder that the model was saved in"
    elif model.copied and model.path in (folder, *folder.parents):
        problem = "contains --triton_model_dir, so it cannot be copied there; choose another folder"
    elif model.copied and model.parameter.isdecimal():
        problem = f"would look like version {model.parameter} in the model folder; rename it, or give its absolute path"
    elif not os.path.isabs(model.parameter) and {"config.pbtxt", "model.py"} & set(Path(model.parameter).parts):
        problem = "has the name of a file that is written into the model folder; rename it"
    else:
        return model
    raise arguments.error("compiled_model", problem)


def compiled_for_inf2(text: str, path: Path, folder: Path) -> CompiledModel:
    """Return the copy in the model folder, or what is to be copied there. The caller checks that it exists."""
    name = os.path.normpath(text)
    if name.split(os.sep)[0] in (os.curdir, os.pardir):
        name = path.name
    place, inside = folder / name, path_within(folder, path)
    if os.path.exists(path) and not inside:
        return CompiledModel(path, name, copied=True)
    return CompiledModel(path, inside) if inside and not os.path.exists(place) else CompiledModel(place, name)


def path_within(folder: Path, path: Path) -> str | None:
    """Return the path relative to the folder, also through links, or None if it lies elsewhere."""
    resolved = Path(os.path.realpath(path.parent)) / path.name
    for inner, outer in ((path, folder), (resolved, Path(os.path.realpath(folder)))):
        if outer in (inner, *inner.parents):
            return str(inner.relative_to(outer))
    return None


# --- inputs and outputs: from the command line, else from the SavedModel ----------------------------------------------


def model_tensors(arguments: Arguments, compiled: CompiledModel) -> tuple[dict[str, list[Tensor]], int]:
    """Return the tensors of both sides, and the rows that the model was compiled for, 0 if unknown."""
    tensors = {side: arguments[side] for side in EXAMPLES if side in arguments.given}
    rows = arguments["compiled_batch_size"]
    if arguments.kind == PYTORCH:
        for side, example in EXAMPLES.items():
            check_torch_tensors(arguments, side, example)
        return tensors, rows
    for side, given in tensors.items():
        check_tensorflow_tensors(arguments, side, given)
    if len(tensors) == len(EXAMPLES):
        return tensors, rows
    own = {side: own for side, own in signature_tensors(arguments, compiled.path).items() if side not in tensors}
    own_rows = remove_batch_dimension(arguments, own)
    if own_rows and rows not in (0, own_rows):
        raise arguments.error("compiled_batch_size", f"the model's own batch dimension is {own_rows}")
    return {**tensors, **own}, rows or own_rows


def check_torch_tensors(arguments: Arguments, side: str, example: str) -> None:
    indices = []
    for tensor in arguments[side] or []:
        match = re.fullmatch("(.+)__([0-9]{1,9})", tensor.name)
        if not match:
            raise arguments.error(side, f"PyTorch's tensors are named <name>__<index>, such as {example}", tensor.name)
        if tensor.data_type == "STRING":
            raise arguments.error(side, "PyTorch has no strings; must be a type of numbers", tensor.name)
        indices.append(int(match[2]))
    if not indices:
        raise InvalidArgument(
            f"--{side} is missing: a TorchScript model does not list its tensors. Set it, as in {example}"
        )
    if sorted(indices) != list(range(len(indices))):
        expected = "0" if len(indices) == 1 else f"0 to {len(indices) - 1}, each once"
        raise InvalidArgument(f"--{side}: the indices are {', '.join(map(str, indices))}; must be {expected}")


def check_tensorflow_tensors(arguments: Arguments, side: str, tensors: list[Tensor]) -> None:
    names = [tensor.name for tensor in tensors]
    for tensor in tensors:
        if names.count(tensor.name) > 1:
            raise arguments.error(side, "appears more than once; each tensor needs a name of its own", tensor.name)
        if tensor.data_type == "BF16":
            problem = "BF16 is for PyTorch; must be FP32, which TensorFlow converts to"
            raise arguments.error(side, problem, tensor.name)


def saved_model_file(folder: Path) -> Path | None:
    files = (folder / name for name in ("saved_model.pb", "saved_model.pbtxt"))
    return next(filter(os.path.isfile, files), None)


def signature_tensors(arguments: Arguments, folder: Path) -> dict[str, list[Tensor]]:
    """Return the inputs and outputs of the chosen signature, with the batch dimension in their shapes."""
    graphs = {joined_tags(graph.meta_info_def.tags): graph for graph in meta_graphs(arguments, folder)}
    graph = graphs.get(joined_tags(filter(None, arguments["tag_set"].split(","))))
    if graph is None:
        known = "; ".join(f"'{tags}'" for tags in sorted(graphs))
        raise arguments.error("tag_set", f"{folder} has no graph with these tags; it has {known or 'none at all'}")
    signature = graph.signature_def.get(arguments["signature_def_key"])
    if signature is None:
        known = ", ".join(sorted(key for key in graph.signature_def if not key.startswith("__")))
        raise arguments.error("signature_def_key", f"{folder} has no such signature; it has {known or 'none at all'}")
    return {"triton_input": tensors_of(signature.inputs), "triton_output": tensors_of(signature.outputs)}


def joined_tags(tags: Iterable[str]) -> str:
    return ",".join(sorted(tags))


def meta_graphs(arguments: Arguments, folder: Path) -> list:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")  # or its import logs a page
    file = saved_model_file(folder)
    assert file is not None  # compiled_model() has checked it
    try:
        from tensorflow.core.protobuf import saved_model_pb2
    except ImportError as error:
        problem = f"reading its tensors needs tensorflow, which is not installed here ({error}); install it, or set "
        raise arguments.error("compiled_model", f"{problem}--triton_input and --triton_output") from None
    try:
        if file.suffix == ".pb":
            return saved_model_pb2.SavedModel.FromString(file.read_bytes()).meta_graphs
        from google.protobuf import text_format

        return text_format.Parse(file.read_text(), saved_model_pb2.SavedModel()).meta_graphs
    except Exception as error:  # protobuf has errors of many types
        raise arguments.error("compiled_model", f"{file.name} cannot be read as a SavedModel: {error}") from None


def tensors_of(infos: dict) -> list[Tensor]:
    from tensorflow.core.framework import types_pb2

    tensors = []
    for name in sorted(infos):
        data_type, shape = types_pb2.DataType.Name(infos[name].dtype), infos[name].tensor_shape
        dims = None if shape.unknown_rank else [int(dim.size) for dim in shape.dim]
        tensors.append(Tensor(name, TRITON_TYPES.get(data_type, data_type), dims))
    return tensors


def remove_batch_dimension(arguments: Arguments, sides: dict[str, list[Tensor]]) -> int:
    """Leave the shapes as config.pbtxt has them. Return the rows that the model was compiled for, 0 if unknown."""
    batching, sizes = arguments["max_batch_size"] > 0, {0}
    for side, tensors in sides.items():
        for tensor in tensors:
            if tensor.data_type not in DATA_TYPES:
                raise arguments.error(
                    "compiled_model", f"{tensor.name} is {tensor.data_type}, which Triton does not have"
                )
            if tensor.dims is None:
                example = f"set --{side} {tensor.name},{tensor.data_type},-1x224x224x3, or what its shape is"
                raise arguments.error("compiled_model", f"has no shape for {tensor.name}; {example}")
            if batching and not tensor.dims:
                raise arguments.error("max_batch_size", f"{tensor.name} has no batch dimension; must be 0")
            if batching:
                sizes.add(tensor.dims.pop(0))
    if len(sizes - {0}) > 1:
        listed = " and ".join(str(size) for size in sorted(sizes - {0}))
        raise arguments.error("max_batch_size", f"the model's tensors have batch dimensions of {listed}; must be 0")
    return max(sizes)


# --- the folder -------------------------------------------------------------------------------------------------------

MODEL_PY = '''"""Serve {name} on AWS Neuron. gen_triton_model.py wrote this file; it is yours to edit.

config.pbtxt names the compiled model and its cores; {base} does the rest.
"""

from serving.neuron.{module} import {base}


class TritonPythonModel({base}):
    """Override a method to change what it does; super() has the original.

    {overrides}
    """
'''
BASES = {  # class: its module, and the methods to override
    "TensorModel": (
        "tensors",
        "load(path) returns the loaded model. run(inputs) runs a batch: numpy arrays by name in and out.",
    ),
    "LanguageModel": (
        "language",
        "load() returns the loaded model: any object with the generate() of Hugging Face's models.",
    ),
}


def write_folder(specification: Specification, command: str) -> list[str]:
    """Write what is new, leave everything else. Return the names under which replaced files are kept."""
    folder = specification.folder
    prefix, suffix = f".{folder.name}.", ".unfinished"
    with created(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix, suffix=suffix) as work:
        return move_in(prepare(specification, command, Path(work)), folder)


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create the folder, and remove it and its new parents if they stay empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def prepare(specification: Specification, command: str, work: Path) -> dict[str, Path]:
    """Write all that is new into the work folder. Return its paths by name, in the order to move them in."""
    folder, compiled = specification.folder, specification.compiled
    paths: dict[str, Path] = {}

    def new(name: str) -> Path:
        return paths.setdefault(name, work / str(len(paths)))

    if compiled.copied and not same_content(compiled.path, folder / compiled.parameter):
        print(f"copying {compiled.path} into {folder}", flush=True)
        copy = shutil.copytree if compiled.path.is_dir() else shutil.copy2
        copy(compiled.path, new(compiled.parameter))
    for name, text in generated_files(specification, command).items():
        place = folder / name
        if not place.is_file() or place.read_bytes() != text.encode():
            new(name).write_text(text, encoding="utf-8")
    return paths


def same_content(one: Path, other: Path) -> bool:
    """Compare bytes: a reproducible build has the same times and sizes, whatever is in its files."""
    if not other.exists() or one.is_dir() != other.is_dir():
        return False
    if not one.is_dir():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all(same_content(one / name, other / name) for name in names)


def move_in(paths: dict[str, Path], folder: Path) -> list[str]:
    """Replace files, and return the free names that the old ones get: the user may have edited earlier ones too."""
    kept = []
    for name, new in paths.items():
        place, old = folder / name, folder / f"{name}.old"
        numbers = itertools.count(1)
        while os.path.lexists(old):
            old = folder / f"{name}.old.{next(numbers)}"
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.path.lexists(place):
                os.rename(place, old)
                kept.append(str(old.relative_to(folder)))
            os.replace(new, place)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(place):
                os.rename(old, place)
            raise
    return kept


def generated_files(specification: Specification, command: str) -> dict[str, str]:
    name, model_py = specification.folder.name, f"{specification.version}/model.py"
    module, overrides = BASES[specification.base]
    comment = f"# {name} on AWS Neuron. This command wrote the file and {model_py}; both are yours to edit."
    return {
        model_py: MODEL_PY.format(name=name, base=specification.base, module=module, overrides=overrides),
        "config.pbtxt": f"{comment}\n# {command}\n{config_text(specification.config)}",
    }


# --- protobuf's text format, laid out for people: plain fields first, then one block per field ------------------------


class Enum(str):
    """A name from the schema, which is written without quotes."""


class Map(dict):
    """A field of keys and values, which is written as one entry per line."""


def config_text(config: dict) -> str:
    plain = [field(name, value) for name, value in config.items() if not isinstance(value, (dict, list))]
    blocks = [block(name, value) for name, value in config.items() if isinstance(value, (dict, list))]
    return "\n\n".join(["\n".join(plain), *blocks]) + "\n"


def block(name: str, value: dict | list) -> str:
    if isinstance(value, Map):
        return "\n".join(field(name, {"key": key, "value": entry}) for key, entry in value.items())
    if isinstance(value, list) and len(value) > 1:
        entries = ",\n".join(f"  {value_text(entry)}" for entry in value)
        return f"{name} [\n{entries}\n]"
    return field(name, value)


def field(name: str, value: object) -> str:
    message = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return f"{name}{'' if message else ':'} {value_text(value)}"


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(["{", *(field(name, entry) for name, entry in value.items()), "}"])
    if isinstance(value, list):
        return f"[ {', '.join(map(value_text, value))} ]" if value else "[ ]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Enum):
        return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda match: f"\\{ord(match.group()):03o}", value) + '"'
    return str(value)


# --- the command ------------------------------------------------------------------------------------------------------


def main(command_line: list[str]) -> int:
    try:
        arguments = Arguments(command_line)
        specification = specify(arguments)
        for warning in arguments.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        kept = write_folder(specification, shlex.join(["gen_triton_model.py", *command_line]))
    except InvalidArgument as error:
        print(f"error: {error}\nnothing was written (--help describes every option)", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {reason(error)}: config.pbtxt was not written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: config.pbtxt was not written", file=sys.stderr)
        return 130
    report(specification, os.path.normpath(arguments["triton_model_dir"]), kept)
    return 0


def reason(error: OSError) -> str:
    """Return one line, also for shutil's error that lists every file of a folder."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


def report(specification: Specification, folder: str, kept: list[str]) -> None:
    print(f"wrote {folder}/config.pbtxt and {folder}/{specification.version}/model.py")
    if kept:
        print(f"replaced files are kept as {', '.join(kept)}")
    path = specification.compiled.parameter
    if os.path.isabs(path):
        print(f"Triton loads {path} from that path. For a container, move it into {folder} and run this again,")
        print("      or mount it at the same path with this line in compose.override.yaml:")
        print(f"      {mount(path)}")
    name, parent = specification.folder.name, specification.folder.parent.name
    move = "" if parent == "model_repository" else f"move {folder} into model_repository/, and "
    print(f"next: {move}make up PROFILE=neuron SYSTEMS={name}")


def mount(path: str) -> str:
    """Return a line of YAML. Compose would read a single $ as the start of a variable."""
    quoted = json.dumps(path.replace("$", "$$"), ensure_ascii=False)
    volume = f"{{ type: bind, source: {quoted}, target: {quoted}, read_only: true }}"
    return f"services: {{ triton-neuron: {{ volumes: [{volume}] }} }}"


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, stop)
    sys.exit(main(sys.argv[1:]))
