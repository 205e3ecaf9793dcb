"""Large language models compiled for Neuron: what each is compiled for, and how its library loads it.

Imports no torch: where torch-neuronx is installed that may load the Neuron runtime, and cores are taken before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from neuron.cores import Cores
from neuron.libraries import imported_class, loading
from shared.errors import ConfigError
from shared.parameters import choice_parameter, int_parameter, parameter

# How transformers-neuronx names the types that weights may be kept in.
AMPS = ("f32", "f16", "bf16", "s8", "f8e4m3fn")


@dataclass(frozen=True)
class Compiled:
    """What the model is compiled for: by its own neuron_config.json, where the library writes one, and the config."""

    folder: Path
    batch_size: int
    tp_degree: int
    n_positions: int
    longest_prompt: int
    padding_side: str  # what its library says; "" where it does not
    amp: str
    unroll: int | None

    @classmethod
    def of(cls, config: dict, args: dict[str, str], cores: Cores) -> Compiled:
        folder = compiled_folder(config, args)
        own = own_config(folder)
        tp_degree = agreed(config, "TP_DEGREE", folder, own, ("tp_degree",), cores.count)
        if tp_degree > cores.count:
            raise ConfigError(
                f"the model wants {tp_degree} NeuronCores (tp_degree) and an instance has {cores.count}: give it a "
                "longer range of cores or fewer instances, or compile the model for fewer"
            )
        positions = agreed(config, "N_POSITIONS", folder, own, ("seq_len", "sequence_length"), 2048)
        return cls(
            folder,
            batch_size=agreed(config, "BATCH_SIZE", folder, own, ("batch_size",), 1),
            tp_degree=tp_degree,
            n_positions=positions,
            longest_prompt=own.get("max_context_length") or positions,
            padding_side=own.get("padding_side", ""),
            amp=choice_parameter(config, "AMP", AMPS, "bf16"),
            unroll=unroll(config),
        )


def compiled_folder(config: dict, args: dict[str, str]) -> Path:
    said = parameter(config, "COMPILED_MODEL")
    if not said:
        raise ConfigError("parameter 'COMPILED_MODEL' is missing: say the folder of the compiled model")
    folder = Path(args["model_repository"], said)  # which an absolute path replaces
    if not folder.is_dir():
        raise ConfigError(f"COMPILED_MODEL: there is no folder {folder}: put the compiled model there")
    return folder


def unroll(config: dict) -> int | None:
    return None if parameter(config, "UNROLL", "none").lower() == "none" else int_parameter(config, "UNROLL", 0)


def own_config(folder: Path) -> dict:
    """NxD Inference keeps it within the model's, optimum-neuron by itself; transformers-neuronx writes none."""
    path = folder / "neuron_config.json"
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text())
        return dict(said.get("neuron_config") or said)
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not what the compiler writes: copy the compiled folder again") from None


def agreed(config: dict, name: str, folder: Path, own: dict, keys: tuple[str, ...], default: int) -> int:
    """What config.pbtxt says or the model does: a compiled model takes its own shapes and no others."""
    key, compiled = next(((key, own[key]) for key in keys if own.get(key) is not None), ("", default))
    value = int_parameter(config, name, compiled)
    if value < 1:
        raise ConfigError(f"parameter '{name}' must be at least 1, not {value}")
    if key and value != compiled:
        raise ConfigError(
            f"parameter '{name}' is {value}, but the model was compiled for {key} {compiled} "
            f"({folder / 'neuron_config.json'}): leave the parameter out, or compile the model again"
        )
    return value


# --- the libraries ----------------------------------------------------------------------------------------------------


def load(path: str, compiled: Compiled, cores: Cores):
    package = next((name for name in LOADERS if path.startswith(f"{name}.")), None)
    if not path or package is None:
        said = f"is '{path}', of none of" if path else "is missing: say a class of one of"
        raise ConfigError(
            f"parameter 'MODEL_CLASS' {said} {', '.join(LOADERS)}, such as "
            "neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM; a model of another "
            "library is loaded by load() in model.py"
        )
    model_class = imported_class(path)
    with loading(compiled.folder, cores):
        return LOADERS[package](model_class, compiled)


def load_nxd_inference(model_class: type, compiled: Compiled):
    check_compiled(compiled.folder, "that the model's compile() wrote")
    model = model_class(str(compiled.folder))
    model.load(str(compiled.folder))
    return model


def load_optimum(model_class: type, compiled: Compiled):
    check_compiled(compiled.folder, "that optimum-neuron's save_pretrained() or `optimum-cli export neuron` wrote")
    return model_class.from_pretrained(str(compiled.folder), local_files_only=True)


def load_transformers_neuronx(model_class: type, compiled: Compiled):
    if not (compiled.folder / "config.json").is_file():
        raise ConfigError(f"COMPILED_MODEL: {compiled.folder} has no config.json: it is the folder of the checkpoint")
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


def check_compiled(folder: Path, written: str) -> None:
    for name in ("neuron_config.json", "model.pt"):
        if not (folder / name).is_file():
            raise ConfigError(f"COMPILED_MODEL: {folder} has no {name}: it is to be the folder {written}")


LOADERS = {
    "neuronx_distributed_inference": load_nxd_inference,
    "optimum.neuron": load_optimum,
    "transformers_neuronx": load_transformers_neuronx,
}
