"""The NeuronCores of an instance: an equal share of the model's range."""

from __future__ import annotations

import os
from dataclasses import dataclass

from serving.triton.parameters import int_parameter
from serving.triton.types import ConfigError
from triton_transformers.protocol import FIRST_CORE, LAST_CORE


@dataclass(frozen=True)
class Cores:
    """`count` cores from `first` on, numbered as on the machine, and the threads that feed each core."""

    first: int
    count: int
    threads_per_core: int

    @classmethod
    def of_instance(cls, config: dict, args: dict[str, str]) -> Cores:
        """Return this instance's share: of two instances on cores 0 to 3, the first has 0 and 1, the second 2 and 3."""
        first = int_parameter(config, FIRST_CORE, 0)
        last = int_parameter(config, LAST_CORE, first)
        threads = int_parameter(config, "NUM_THREADS_PER_CORE", 1)
        if not 0 <= first <= last:
            raise ConfigError(f"NEURON_CORE_START_INDEX {first} to NEURON_CORE_END_INDEX {last} is no range of cores")
        if threads < 1:
            raise ConfigError(f"NUM_THREADS_PER_CORE must be at least 1, not {threads}")
        groups = config["instance_group"]
        if len(groups) != 1:
            raise ConfigError(f"a Neuron model takes one instance group, not {len(groups)}")
        instances, total = groups[0]["count"], last - first + 1
        if total % instances:
            raise ConfigError(f"{total} NeuronCores ({first} to {last}) cannot be shared out equally among {instances}")
        index = instance_number(args["model_instance_name"])
        if index >= instances:  # Triton adds instances to a loaded model, and passes them the old config
            raise ConfigError("the instances of a Neuron model share its cores; unload it to change their number")
        share = total // instances
        return cls(first + index * share, share, threads)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def threads(self) -> int:
        return self.count * self.threads_per_core

    def claim(self) -> None:
        """Give this process these cores only. Call it before a Neuron library is imported."""
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(self.first) if self.count == 1 else f"{self.first}-{self.last}"


def instance_number(instance: str) -> int:
    """Return the number at the end of an instance's name."""
    number = instance.rpartition("_")[2]
    if not number.isdecimal():
        raise ConfigError(f"'{instance}' does not end in a number: set `kind: KIND_MODEL` in instance_group")
    return int(number)
