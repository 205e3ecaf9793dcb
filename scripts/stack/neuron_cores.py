"""Check which NeuronCores the models of systems take: each core exists and belongs to one model."""

from __future__ import annotations

from collections.abc import Iterable

from export.record import models_of
from triton_transformers.model_config import find_config, load_config
from triton_transformers.settings import Settings, UserError

PER_DEVICE = {"inf1": 4, "inf2": 2, "trn1": 2}
FIRST, LAST = "NEURON_CORE_START_INDEX", "NEURON_CORE_END_INDEX"


def check_cores(settings: Settings, systems: Iterable[str]) -> None:
    """Raise before Triton starts: Neuron's runtime would fail model by model, in words of its own."""
    available = settings.neuron_devices * PER_DEVICE.get(settings.neuron_chip, 0)
    owners: dict[int, str] = {}
    for model, cores in core_ranges(settings, systems).items():
        if cores[-1] >= available:
            raise UserError(
                f"{model} is set to NeuronCores {spelled(cores)}, but NEURON_DEVICES={settings['NEURON_DEVICES']} of "
                f"{settings.neuron_chip} have only {available}. Set other cores in its config.pbtxt, "
                "or raise NEURON_DEVICES"
            )
        for core in cores:
            if (owner := owners.setdefault(core, model)) != model:
                raise UserError(
                    f"{owner} and {model} are both set to NeuronCore {core}, which only one process can use. Set other "
                    f"cores for {model}: in its config.pbtxt, or with NEURON_CORES= when you compile it"
                )


def core_ranges(settings: Settings, systems: Iterable[str]) -> dict[str, range]:
    """Return the cores of each model whose configuration sets any."""
    repository, profile = settings.model_repository, settings.profile
    ranges: dict[str, range] = {}
    for model in (model for name in systems for model in models_of(name, repository)):
        parameters = load_config(model, repository, profile).parameters
        if FIRST not in parameters:
            continue
        try:
            first = int(parameters[FIRST])
            ranges[model] = range(first, int(parameters.get(LAST, first)) + 1)
        except ValueError:
            path = find_config(model, repository, profile)
            raise UserError(f"{path}: {FIRST} and {LAST} must be whole numbers") from None
    return {model: cores for model, cores in ranges.items() if cores}


def spelled(cores: range) -> str:
    return f"{cores[0]} to {cores[-1]}" if len(cores) > 1 else str(cores[0])
