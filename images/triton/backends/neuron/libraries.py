"""The libraries that models on Neuron need: where each is, and one line for what they raise.

Imports none of them: an instance takes its cores before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from neuron.cores import Cores
from shared.errors import ConfigError

_TODAYS = "the image of NEURON_CHIP=inf2 and trn1 has it"
_YOUR_OWN = (
    "no image of ours has it: install it into one of your own, in a release that goes with the SDK that the model was "
    "compiled with"
)
PLACES = {
    "torch": "the images of PROFILE=neuron have it",
    "torch_neuron": "the image of NEURON_CHIP=inf1 has it",
    "torch_neuronx": _TODAYS,
    "tensorflow": "no image of ours has it, for AWS supports none since 2.29: install it into one of your own",
    "neuronx_distributed_inference": _TODAYS,
    "optimum.neuron": _YOUR_OWN,
    "transformers_neuronx": _YOUR_OWN,
}
# Of the runtime (NRT), where another process has the cores.
TAKEN = re.compile(r"\bNRT|not available", re.IGNORECASE)


class ModelFailed(RuntimeError):
    """A run of it."""


def imported(name: str) -> ModuleType:
    """One of these packages, or a module of one."""
    package = next((each for each in PLACES if f"{name}.".startswith(f"{each}.")), name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(why_missing(error.name or name, package)) from None
    except Exception as error:  # a part of the Neuron runtime that is not there, or does not start
        raise ConfigError(f"{name} could not be imported: {reason(error)}") from error
    if getattr(module, "__file__", None) is None:  # any folder of that name
        raise ConfigError(why_missing(name, name))
    return module


def imported_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found = getattr(imported(module), name, None)
    if found is None:
        raise ConfigError(f"{module} has no class {name}; is it of another release?")
    return found


def why_missing(missing: str, package: str) -> str:
    if f"{package}.".startswith(f"{missing}."):
        place = PLACES.get(package, "install it there")
        return f"the Python package {package} is not installed where Triton runs: {place}"
    if missing.startswith(f"{package}."):
        return f"{package} has no module {missing}; is it of another release?"
    return f"{package} wants the Python package {missing}, which is not installed where Triton runs"


@contextmanager
def loading(what: object, cores: Cores) -> Iterator[None]:
    """The file may be sound, and the cores not to be had."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the libraries' are of many kinds
        asked = "; is another model or process on them?" if TAKEN.search(str(error)) else ""
        place = f"NeuronCores {cores.first} to {cores.last}"
        raise ConfigError(f"{what} could not be loaded on {place}: {reason(error)}{asked}") from error


@contextmanager
def blamed_on_the_model() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelFailed(reason(error)) from error


def reason(error: Exception) -> str:
    """TorchScript puts what happened below pages of where, its loader above them."""
    text = str(error).partition("Exception raised from")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # whose text is the bare key
        return ": ".join([type(error).__name__, *lines[-1:]])
    return lines[-1]
