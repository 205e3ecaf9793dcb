"""Which NeuronCores the models of SYSTEMS have: each its own, and none that there is not."""

from __future__ import annotations

import re

from scripts.common.model_config import COMMENT, config_of
from scripts.common.settings import Settings, UserError
from scripts.models.assemble import CONFIGS, models_of

PER_DEVICE = {"inf1": 4, "inf2": 2, "trn1": 2}
CORE = re.compile(r"""NEURON_CORE_(START|END)_INDEX["'][^}]*?string_value\s*:\s*["'](\d+)""")


def check_cores(settings: Settings) -> None:
    """Before Triton finds out, model by model and in Neuron's own words."""
    there = settings.integer("NEURON_DEVICES") * PER_DEVICE.get(settings["NEURON_CHIP"], 0)
    taken: dict[int, str] = {}
    for model, cores in ranges(settings).items():
        if cores[-1] >= there:
            raise UserError(
                f"{model} is for NeuronCores {said(cores)}, and NEURON_DEVICES={settings['NEURON_DEVICES']} of "
                f"{settings['NEURON_CHIP']} are {there}: give it others (its config.pbtxt), or raise NEURON_DEVICES"
            )
        for core in cores:
            if (other := taken.setdefault(core, model)) != model:
                raise UserError(
                    f"{other} and {model} both want NeuronCore {core}, which only one can have: give {model} others "
                    "(its config.pbtxt; NEURON_CORES= when it is made)"
                )


def ranges(settings: Settings) -> dict[str, range]:
    repository = settings.path("MODEL_REPOSITORY")
    found: dict[str, range] = {}
    for model in (model for name in settings.words("SYSTEMS") for model in models_of(name, repository)):
        config = config_of(model, repository, CONFIGS)
        if not config:
            continue
        profiled = config.with_name("configs") / f"{settings['PROFILE']}.pbtxt"
        text = (profiled if profiled.exists() else config).read_text()
        cores = {name: int(index) for name, index in CORE.findall(COMMENT.sub("", text))}
        if "START" in cores:
            found[model] = range(cores["START"], cores.get("END", cores["START"]) + 1)
    return {model: cores for model, cores in found.items() if cores}


def said(cores: range) -> str:
    return f"{cores[0]} to {cores[-1]}" if len(cores) > 1 else str(cores[0])
