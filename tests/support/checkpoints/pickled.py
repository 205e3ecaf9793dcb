"""Save weights as PyTorch pickles them, as older checkpoints have them, and pickles that hold code."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

INDEX = "pytorch_model.bin.index.json"


def pickle_weights(folder: Path, shards: int = 1) -> Path:
    """Replace each *.safetensors of a folder by what torch.save writes."""
    for path in list(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        path.unlink()
        name = "adapter_model" if path.stem == "adapter_model" else "pytorch_model"
        if shards == 1:
            torch.save(tensors, path.with_name(f"{name}.bin"))
        else:
            save_shards(tensors, path.parent, shards)
    return folder


def save_shards(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    places = {key: f"pytorch_model-{n % shards + 1:05}-of-{shards:05}.bin" for n, key in enumerate(tensors)}
    for place in {*places.values()}:
        torch.save({key: tensors[key] for key in tensors if places[key] == place}, folder / place)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


class Code:
    """An object whose pickle calls a function with these arguments when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Stateful:
    """An object that runs code when its state is set."""

    def __getstate__(self) -> dict[str, str]:
        return {"file": ""}

    def __setstate__(self, state: dict[str, str]) -> None:
        raise SystemExit("ran")


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def archived(instructions: bytes) -> bytes:
    """Return a file of torch.save whose pickle has these instructions."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(2)}))) as source, zipfile.ZipFile(stream, "w") as target:
        for entry in source.infolist():
            own = instructions if entry.filename.endswith("data.pkl") else source.read(entry)
            target.writestr(zipfile.ZipInfo(entry.filename), own)
    return stream.getvalue()


def forms_of_code(canary: Path) -> dict[str, bytes]:
    """Return files of weights that would make the canary, in each way in which pickles can call code."""
    shell = f"touch {canary}"
    touch, tensor = Code(os.system, shell), torch.ones(2)
    text = f"X{chr(len(shell))}\0\0\0{shell}".encode()
    return {
        "reduce": saved({"w": touch}),
        "eval": saved({"w": Code(eval, f"open({str(canary)!r}, 'w')")}),
        "nested": saved({"w": tensor, "more": {"deeper": {"deepest": touch}}}),
        "list": saved({"w": tensor, "more": [1, [touch]]}),
        "stack global": saved({"w": touch}, pickle_protocol=4),
        "legacy file": saved({"w": tensor, "more": touch}, _use_new_zipfile_serialization=False),
        "plain pickle": pickle.dumps({"w": touch}, protocol=2),
        "state": saved({"w": Stateful()}),
        "inst": archived(f"(S'{shell}'\nios\nsystem\n.".encode()),
        "obj": archived(f"(cos\nsystem\nS'{shell}'\no.".encode()),
        "new object": archived(b"\x80\x02csubprocess\nPopen\n(" + text + b"t\x81."),
        "persistent id": archived(b"\x80\x02(X\x06\0\0\0modulecos\nsystem\n" + text + b"\x85RtQ."),
        "allowed beside it": archived(b"\x80\x02ccollections\nOrderedDict\n)R0cposix\nsystem\n" + text + b"\x85R."),
    }
