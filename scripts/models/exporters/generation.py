"""`text-generation`: any causal language model as it is, and a second model that streams from the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.settings import UserError
from scripts.models.catalogue import SYSTEMS, Order
from scripts.models.exporters.config_writer import tensor, write_config
from scripts.models.tasks import task_of_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of what lies in a checkpoint's folder, all that transformers reads beside the weights: configs and tokenizers.
SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def assemble(order: Order) -> dict:
    weights = weight_files(order.weights)
    tokenizer = loaded_tokenizer(order)
    served, streamed = order.folder / order.system, order.folder / f"{order.system}_stream"
    for model in (served, streamed):
        (model / "1").mkdir(parents=True)
    for file in [*weights, *other_files(order)]:
        order.take(file, served / "1")
    if tokenizer.is_fast and not (served / "1/tokenizer.json").exists():
        # Made of a tokenizer.model, which takes a library that the server does without.
        tokenizer.save_pretrained(served / "1")
    if order.system not in SYSTEMS:
        write_configs(order, served, streamed)
    size = sum(file.stat().st_size for file in (served / "1").glob("*.safetensors"))
    return {"said": f"{size / 1e9:.2g} GB of weights; {streamed.name} streams from them"}


def weight_files(folder: Path) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: name a folder that save_pretrained wrote")
    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
    if odd := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise UserError(f"{index} names '{odd[0]}', which is no file of weights beside it")
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    if any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} has its weights as *.bin, which can run code when they are read. To convert a model that you "
            "trust: load it with AutoModelForCausalLM.from_pretrained(folder), then save_pretrained(another), and the "
            "same with AutoTokenizer"
        )
    raise UserError(f"{folder} has no {', '.join(missing)}: it is incomplete, or its weights are of another format")


def other_files(order: Order) -> list[Path]:
    suffixes = (*SUFFIXES, ".py") if order.trust_remote_code else SUFFIXES
    return sorted(file for file in order.weights.iterdir() if file.suffix in suffixes and file.is_file())


def loaded_tokenizer(order: Order) -> PreTrainedTokenizerBase:
    """It and the configuration load: the weights would take minutes, and the server's memory."""
    import transformers

    more = {"local_files_only": True, "trust_remote_code": order.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(order.weights, **more)
        tokenizer = transformers.AutoTokenizer.from_pretrained(order.weights, **more)
    except Exception as error:  # whatever a checkpoint's files make transformers and tokenizers stumble over
        raise UserError(f"{order.weights} does not load in transformers {transformers.__version__}: {error}") from None
    stored = [name for name in config.architectures or [] if task_of_architecture(name) != order.task]
    if stored and len(stored) == len(config.architectures):
        raise UserError(f"{order.weights} is a {stored[0]}, which lacks what continues a text: say another TASK")
    remote = order.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if not remote and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{order.weights} is a {config.model_type}, which does not continue texts: say another TASK")
    return tokenizer


def write_configs(order: Order, served: Path, streamed: Path) -> None:
    """As those of falcon7b and falcon7b_stream, which are commented."""
    config = {
        "backend": "transformers",
        "input": [
            tensor("prompt", "STRING", [-1]),
            tensor("max_new_tokens", "INT32", [1], optional=True),
            tensor("temperature", "FP32", [1], optional=True),
            tensor("top_p", "FP32", [1], optional=True),
            tensor("seed", "INT64", [1], optional=True),
            tensor("stop", "STRING", [-1], optional=True),
        ],
        "output": [tensor("text", "STRING", [-1])],
        "instance_group": [{"count": 1, "kind": "KIND_AUTO"}],
    }
    parameters = {"task": order.task, "max_new_tokens": 64, "max_batch": 32, "dtype": "auto", "device": "auto"}
    if order.trust_remote_code:
        parameters["trust_remote_code"] = 1
    write_config(served, "A prompt is continued: docs/generation.md.", config, parameters)
    config["model_transaction_policy"] = {"decoupled": True}
    parameters["weights"] = order.system
    write_config(streamed, f"As {order.system}, piece by piece: docs/generation.md.", config, parameters)
