"""config.pbtxt from Triton's own schema, for models whose folder is not in git."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.model_config_pb2 import ModelConfig


def write_config(model: Path, comment: str, config: dict, parameters: dict[str, object] | None = None) -> None:
    """model/config.pbtxt: the fields of Triton's ModelConfig as in its JSON form, under a comment of one line."""
    message = ParseDict({"name": model.name, **config}, ModelConfig())
    for key, value in (parameters or {}).items():
        message.parameters[key].string_value = str(value)
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(f"# {comment}\n{text_format.MessageToString(message)}")


def tensor(name: str, data_type: str, dims: list[int], **more: object) -> dict:
    """An input or an output: tensor("text", "STRING", [1])."""
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": dims, **more}


def batched(backend: str, most: int, inputs: list[dict], outputs: list[dict], kind: str) -> dict:
    """One instance, dynamic batches of `most` at most."""
    return {
        "backend": backend,
        "max_batch_size": most,
        "input": inputs,
        "output": outputs,
        "dynamic_batching": {},
        "instance_group": [{"count": 1, "kind": kind}],
    }


def ragged(tensors: list[dict]) -> list[dict]:
    """Requests are batched whatever the length of their texts, or the size of their pictures."""
    return [each | ({"allow_ragged_batch": True} if -1 in each["dims"] else {}) for each in tensors]


def ensemble(steps: dict[str, dict], inputs: list[dict], outputs: list[dict]) -> dict:
    """Of models and their configs, one after the other. Tensors keep their names from step to step."""
    scheduling = [
        {
            "model_name": model,
            "model_version": -1,
            "input_map": {each["name"]: each["name"] for each in config["input"]},
            "output_map": {each["name"]: each["name"] for each in config["output"]},
        }
        for model, config in steps.items()
    ]
    most = min(config["max_batch_size"] for config in steps.values())
    batch = {"platform": "ensemble", "max_batch_size": most, "input": inputs, "output": outputs}
    return batch | {"ensemble_scheduling": {"step": scheduling}}
