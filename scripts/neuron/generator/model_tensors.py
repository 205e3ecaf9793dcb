"""The inputs and outputs of a model: from the command line, else from its SavedModel."""

from __future__ import annotations

import re

from generator.arguments import Arguments, InvalidArgument
from generator.options import EXAMPLES, PYTORCH, TENSORFLOW
from generator.paths import CompiledModel
from generator.saved_model import remove_batch_dimension, signature_tensors
from generator.value_types import Tensor

# The same as in model_repository/falcon7b/config.pbtxt.
LANGUAGE_MODEL = {
    "triton_input": [
        Tensor("prompt", "STRING", [-1], optional=True),
        Tensor("text_input", "STRING", [-1], optional=True),
        Tensor("messages", "STRING", [1], optional=True),
        Tensor("max_new_tokens", "INT32", [1], optional=True),
        Tensor("temperature", "FP32", [1], optional=True),
        Tensor("top_p", "FP32", [1], optional=True),
        Tensor("seed", "INT64", [1], optional=True),
        Tensor("stop", "STRING", [-1], optional=True),
        Tensor("cancel", "STRING", [1], optional=True),
        Tensor("stream", "BOOL", [1], optional=True),
        Tensor("exclude_input_in_output", "BOOL", [1], optional=True),
        Tensor("sampling_parameters", "STRING", [1], optional=True),
    ],
    "triton_output": [
        Tensor("text", "STRING", [-1]),
        Tensor("text_output", "STRING", [-1]),
        Tensor("finish_reason", "STRING", [-1]),
        Tensor("num_input_tokens", "UINT32", [-1]),
        Tensor("num_output_tokens", "UINT32", [-1]),
        Tensor("tokenized", "STRING", [-1]),
    ],
}


def model_tensors(arguments: Arguments, compiled: CompiledModel | None) -> tuple[dict[str, list[Tensor]], int]:
    """Return the tensors of both sides, and the rows that the model was compiled for, 0 if unknown."""
    for side in EXAMPLES:
        check_tensors(arguments, side)
    tensors = {side: arguments[side] for side in EXAMPLES if arguments.given(side)}
    rows = arguments["compiled_batch_size"]
    if len(tensors) == len(EXAMPLES) or arguments.kind != TENSORFLOW:
        return tensors, rows
    if compiled is None:
        raise InvalidArgument
    own = {side: own for side, own in signature_tensors(arguments, compiled.path).items() if side not in tensors}
    own_rows = remove_batch_dimension(arguments, own)
    if own_rows and rows not in (0, own_rows):
        raise arguments.error("compiled_batch_size", f"the model's own batch dimension is {own_rows}")
    return {**tensors, **own}, rows or own_rows


def check_tensors(arguments: Arguments, side: str) -> None:
    """Record errors of names and types. Reads texts, because a tensor with an invalid shape has no value."""
    parts = [text.split(",") for text in arguments.texts.get(side, [])]
    names = [part[0] for part in parts if len(part) == 3 and part[0]]
    if arguments.kind == PYTORCH:
        check_indices(arguments, side, names)
    else:
        for name in sorted({name for name in names if names.count(name) > 1}):
            arguments.errors.append(f"--{side}: {name} appears more than once; each tensor needs a name of its own")
    for part in parts:
        if arguments.kind == PYTORCH and part[1:2] in (["BYTES"], ["STRING"]):
            arguments.error(side, "PyTorch has no strings; must be a type of numbers", ",".join(part))
        if arguments.kind == TENSORFLOW and part[1:2] == ["BF16"]:
            arguments.error(side, "BF16 is for PyTorch; must be FP32, which TensorFlow converts to", ",".join(part))


def check_indices(arguments: Arguments, side: str, names: list[str]) -> None:
    example, indices = EXAMPLES[side], []
    if not arguments.given(side):
        arguments.errors.append(
            f"--{side} is missing: a TorchScript model does not list its tensors. Set it, as in {example}"
        )
    for name in names:
        match = re.fullmatch("(.+)__([0-9]{1,9})", name)
        if match:
            indices.append(int(match.group(2)))
        else:
            arguments.error(side, f"PyTorch's tensors are named <name>__<index>, such as {example}", name)
    if indices and len(indices) == len(arguments.texts[side]) and sorted(indices) != list(range(len(indices))):
        expected = "0" if len(indices) == 1 else f"0 to {len(indices) - 1}, each once"
        arguments.errors.append(f"--{side}: the indices are {', '.join(map(str, indices))}; must be {expected}")
