"""Write config.pbtxt with Triton's own schema, for models whose folder is not in git."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

# Fields of ModelConfig as in its JSON form.
Config = dict[str, Any]


def write_config(model: Path, comment: str, config: Config, parameters: Mapping[str, object] | None = None) -> None:
    """Write <model>/config.pbtxt under a comment of one line."""
    message = ParseDict({"name": model.name, **config}, ModelConfig())
    for key, value in (parameters or {}).items():
        message.parameters[key].string_value = str(value)
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(f"# {comment}\n{text_format.MessageToString(message)}")


def tensor(name: str, data_type: str, dims: list[int], **fields: object) -> Config:
    """Return an input or output."""
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": dims, **fields}


def batched(backend: str, max_batch: int, inputs: list[Config], outputs: list[Config], kind: str) -> Config:
    """Return the configuration of one instance with dynamic batching."""
    return {
        "backend": backend,
        "max_batch_size": max_batch,
        "input": inputs,
        "output": outputs,
        "dynamic_batching": {},
        "instance_group": [{"count": 1, "kind": kind}],
    }


def ragged(tensors: list[Config]) -> list[Config]:
    """Let Triton batch requests whose texts differ in length, or images in size."""
    return [tensor | ({"allow_ragged_batch": True} if -1 in tensor["dims"] else {}) for tensor in tensors]


def ensemble(steps: dict[str, Config], inputs: list[Config], outputs: list[Config]) -> Config:
    """Return an ensemble of these models. Each step gets the tensors that it needs, under their own names."""
    needed = {tensor["name"] for config in steps.values() for tensor in config["input"]}
    needed |= {tensor["name"] for tensor in outputs}
    scheduling = [
        {
            "model_name": model,
            "model_version": -1,
            "input_map": {tensor["name"]: tensor["name"] for tensor in config["input"]},
            "output_map": {tensor["name"]: tensor["name"] for tensor in config["output"] if tensor["name"] in needed},
        }
        for model, config in steps.items()
    ]
    return {
        "platform": "ensemble",
        "max_batch_size": min(config["max_batch_size"] for config in steps.values()),
        "input": inputs,
        "output": outputs,
        "ensemble_scheduling": {"step": scheduling},
    }
