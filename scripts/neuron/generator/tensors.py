"""The inputs and outputs of a model: as said, else as its SavedModel has them, or those of all language models."""

from __future__ import annotations

import re

from generator.flags import Flags, Told
from generator.options import EXAMPLES, PYTORCH, TENSORFLOW
from generator.places import Compiled
from generator.saved_model import signature, take_batch_off
from generator.values import Tensor

# As in model_repository/falcon7b/config.pbtxt.
LANGUAGE_MODEL = {
    "triton_input": [
        Tensor("prompt", "STRING", [-1]),
        Tensor("max_new_tokens", "INT32", [1], optional=True),
        Tensor("temperature", "FP32", [1], optional=True),
        Tensor("top_p", "FP32", [1], optional=True),
        Tensor("seed", "INT64", [1], optional=True),
        Tensor("stop", "STRING", [-1], optional=True),
    ],
    "triton_output": [Tensor("text", "STRING", [-1])],
}


def read_tensors(flags: Flags, compiled: Compiled | None) -> tuple[dict[str, list[Tensor]], int]:
    """And the rows that the model was compiled for, 0 where that is not known."""
    for side in EXAMPLES:
        check_names(flags, side)
    said = {side: flags[side] for side in EXAMPLES if flags.said(side)}
    rows = flags["compiled_batch_size"]
    if len(said) == len(EXAMPLES) or flags.kind != TENSORFLOW:
        return said, rows
    if compiled is None:
        raise Told
    found = {side: tensors for side, tensors in signature(flags, compiled.path).items() if side not in said}
    own = take_batch_off(flags, found)
    if own and rows not in (0, own):
        raise flags.wrong("compiled_batch_size", f"the model's own batch dimension is {own}")
    return {**said, **found}, rows or own


def check_names(flags: Flags, side: str) -> None:
    """Also where a type or a shape is wrong."""
    parts = [text.split(",") for text in flags.given.get(side, [])]
    names = [part[0] for part in parts if len(part) == 3 and part[0]]
    if flags.kind == PYTORCH:
        check_indices(flags, side, names)
    else:
        for name in sorted({name for name in names if names.count(name) > 1}):
            flags.errors.append(f"--{side}: {name} is there more than once; each needs a name of its own")
    for part in parts:
        if flags.kind == PYTORCH and part[1:2] in (["BYTES"], ["STRING"]):
            flags.wrong(side, "PyTorch has no strings; must be a type of numbers", ",".join(part))
        if flags.kind == TENSORFLOW and part[1:2] == ["BF16"]:
            flags.wrong(side, "BF16 is for PyTorch; must be FP32, which TensorFlow's is turned into", ",".join(part))


def check_indices(flags: Flags, side: str, names: list[str]) -> None:
    example, indices = EXAMPLES[side], []
    if not flags.said(side):
        flags.errors.append(f"--{side} is missing: a TorchScript model does not tell them, such as {example}")
    for name in names:
        found = re.fullmatch("(.+)__([0-9]{1,9})", name)
        if found:
            indices.append(int(found.group(2)))
        else:
            flags.wrong(side, f"PyTorch's tensors are named <name>__<index>, such as {example}", name)
    if indices and len(indices) == len(flags.given[side]) and sorted(indices) != list(range(len(indices))):
        what = "0" if len(indices) == 1 else f"0 to {len(indices) - 1}, each once"
        flags.errors.append(f"--{side}: the indices are {', '.join(map(str, indices))}; must be {what}")
