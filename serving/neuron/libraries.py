"""Imports the libraries that models on Neuron need, and shortens their errors to one line.

It imports none of them by itself, because an instance claims its cores first.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from serving.neuron.cores import Cores
from serving.triton.types import ConfigError

_INF2_IMAGE = "the image of NEURON_CHIP=inf2 and trn1 has it"
_OWN_IMAGE = (
    "no image of ours has it: install it into one of your own, in a release that fits the SDK that compiled the model"
)
SOURCES = {
    "torch": "the images of PROFILE=neuron have it",
    "torch_neuron": "the image of NEURON_CHIP=inf1 has it",
    "torch_neuronx": _INF2_IMAGE,
    "tensorflow": "no image of ours has it, for AWS supports none since 2.29: install it into one of your own",
    "neuronx_distributed_inference": _INF2_IMAGE,
    "optimum.neuron": _OWN_IMAGE,
    "transformers_neuronx": _OWN_IMAGE,
}
# Errors of the Neuron runtime (NRT) when another process has the cores.
CORES_TAKEN = re.compile(r"\bNRT|not available", re.IGNORECASE)


class ModelFailed(RuntimeError):
    """Raised when a run of the compiled model fails."""


def imported(name: str) -> ModuleType:
    """Import one of these packages, or a module of one. Raise ConfigError if that is impossible."""
    package = next((package for package in SOURCES if f"{name}.".startswith(f"{package}.")), name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(missing_module(error.name or name, package)) from None
    except Exception as error:  # a part of the Neuron runtime is missing, or does not start
        raise ConfigError(f"{name} could not be imported: {reason(error)}") from error
    if getattr(module, "__file__", None) is None:  # an unrelated folder of that name
        raise ConfigError(missing_module(name, name))
    return module


def imported_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        return getattr(imported(module), name)
    except AttributeError:
        raise ConfigError(f"{module} has no class {name}; is it of another release?") from None


def missing_module(missing: str, package: str) -> str:
    if f"{package}.".startswith(f"{missing}."):
        source = SOURCES.get(package, "install it there")
        return f"the Python package {package} is not installed where Triton runs: {source}"
    if missing.startswith(f"{package}."):
        return f"{package} has no module {missing}; is it of another release?"
    return f"{package} needs the Python package {missing}, which is not installed where Triton runs"


@contextmanager
def loading(model: object, cores: Cores) -> Iterator[None]:
    """Turn errors of loading a model into ConfigError. The cores may be the cause, not the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise many types
        hint = "; is another model or process on them?" if CORES_TAKEN.search(str(error)) else ""
        place = f"NeuronCores {cores.first} to {cores.last}"
        raise ConfigError(f"{model} could not be loaded on {place}: {reason(error)}{hint}") from error


@contextmanager
def running() -> Iterator[None]:
    """Turn errors of a run into ModelFailed."""
    try:
        yield
    except Exception as error:
        raise ModelFailed(reason(error)) from error


def reason(error: Exception) -> str:
    """Return the line that matters: TorchScript puts it below a long trace, and its loader puts it above."""
    text = str(error).partition("Exception raised from")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # the text of a KeyError is only the key
        return ": ".join([type(error).__name__, *lines[-1:]])
    return lines[-1]
