"""Compiled large language models: the shape of each, and how its library loads it.

It imports no torch, because torch-neuronx may start the Neuron runtime before the instance has claimed its cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.neuron.cores import Cores
from serving.neuron.libraries import imported_class, loading
from serving.triton.parameters import choice_parameter, int_parameter, parameter
from serving.triton.types import ConfigError

# Names of transformers-neuronx for the types of weights.
AMPS = ("f32", "f16", "bf16", "s8", "f8e4m3fn")


@dataclass(frozen=True)
class CompiledLLM:
    """A model's compiled shape, from its neuron_config.json, if the library writes one, and from config.pbtxt."""

    folder: Path
    batch_size: int
    tp_degree: int
    n_positions: int
    max_prompt: int
    padding_side: str  # "" if neuron_config.json has none
    amp: str
    unroll: int | None

    @classmethod
    def read(cls, config: dict, args: dict[str, str], cores: Cores) -> CompiledLLM:
        folder = compiled_folder(config, args)
        own = neuron_config(folder)
        tp_degree = compiled_value(config, "TP_DEGREE", folder, own, ("tp_degree",), cores.count)
        if tp_degree > cores.count:
            raise ConfigError(
                f"the model needs {tp_degree} NeuronCores (tp_degree) and an instance has {cores.count}: set a "
                "longer range of cores or fewer instances, or compile the model for fewer cores"
            )
        positions = compiled_value(config, "N_POSITIONS", folder, own, ("seq_len", "sequence_length"), 2048)
        unroll = parameter(config, "UNROLL", "none").lower()
        return cls(
            folder,
            batch_size=compiled_value(config, "BATCH_SIZE", folder, own, ("batch_size",), 1),
            tp_degree=tp_degree,
            n_positions=positions,
            max_prompt=own.get("max_context_length") or positions,
            padding_side=own.get("padding_side", ""),
            amp=choice_parameter(config, "AMP", AMPS, "bf16"),
            unroll=None if unroll == "none" else int_parameter(config, "UNROLL", 0),
        )


def compiled_folder(config: dict, args: dict[str, str]) -> Path:
    path = parameter(config, "COMPILED_MODEL")
    if not path:
        raise ConfigError("parameter 'COMPILED_MODEL' is missing: set it to the folder of the compiled model")
    folder = Path(args["model_repository"], path)  # an absolute path replaces the first part
    if not folder.is_dir():
        raise ConfigError(f"COMPILED_MODEL: there is no folder {folder}: put the compiled model there")
    return folder


def neuron_config(folder: Path) -> dict:
    """Read neuron_config.json, which transformers-neuronx does not write; NxD Inference nests it in the model's."""
    path = folder / "neuron_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
        return dict(config.get("neuron_config") or config)
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not what the compiler writes: copy the compiled folder again") from None


def compiled_value(config: dict, name: str, folder: Path, own: dict, keys: tuple[str, ...], default: int) -> int:
    """Return the model's own value, or the parameter. Raise if both exist and differ: a compiled shape is fixed."""
    key, compiled = next(((key, own[key]) for key in keys if own.get(key) is not None), ("", default))
    value = int_parameter(config, name, compiled)
    if value < 1:
        raise ConfigError(f"parameter '{name}' must be at least 1, not {value}")
    if key and value != compiled:
        raise ConfigError(
            f"parameter '{name}' is {value}, but the model was compiled for {key} {compiled} "
            f"({folder / 'neuron_config.json'}): remove the parameter, or compile the model again"
        )
    return value


# --- the libraries ----------------------------------------------------------------------------------------------------


def load(class_path: str, compiled: CompiledLLM, cores: Cores):
    package = next((name for name in LOADERS if class_path.startswith(f"{name}.")), None)
    if package is None:
        problem = f"is '{class_path}'" if class_path else "is missing"
        raise ConfigError(
            f"parameter 'MODEL_CLASS' {problem}: set a class of {', '.join(LOADERS)}, such as "
            "neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM; to use another "
            "library, override load() in model.py"
        )
    model_class = imported_class(class_path)
    with loading(compiled.folder, cores):
        return LOADERS[package](model_class, compiled)


def load_nxd_inference(model_class: Any, compiled: CompiledLLM):
    check_files(compiled.folder, "that the model's compile() wrote")
    model = model_class(str(compiled.folder))
    model.load(str(compiled.folder))
    return model


def load_optimum(model_class: Any, compiled: CompiledLLM):
    check_files(compiled.folder, "that optimum-neuron's save_pretrained() or `optimum-cli export neuron` wrote")
    return model_class.from_pretrained(str(compiled.folder), local_files_only=True)


def load_transformers_neuronx(model_class: Any, compiled: CompiledLLM):
    if not (compiled.folder / "config.json").is_file():
        raise ConfigError(f"COMPILED_MODEL: {compiled.folder} has no config.json: it must be a checkpoint's folder")
    model = model_class.from_pretrained(
        str(compiled.folder),
        batch_size=compiled.batch_size,
        tp_degree=compiled.tp_degree,
        amp=compiled.amp,
        n_positions=compiled.n_positions,
        unroll=compiled.unroll,
    )
    model.to_neuron()
    return model


def check_files(folder: Path, origin: str) -> None:
    for name in ("neuron_config.json", "model.pt"):
        if not (folder / name).is_file():
            raise ConfigError(f"COMPILED_MODEL: {folder} has no {name}: it must be the folder {origin}")


LOADERS = {
    "neuronx_distributed_inference": load_nxd_inference,
    "optimum.neuron": load_optimum,
    "transformers_neuronx": load_transformers_neuronx,
}
