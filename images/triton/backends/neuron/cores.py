"""Which NeuronCores an instance has: the model's range, shared out equally among its instances."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.parameters import int_parameter


@dataclass(frozen=True)
class Cores:
    """`count` of them from `first` on, by the machine's count, and how many threads feed each."""

    first: int
    count: int
    threads_each: int

    @classmethod
    def of(cls, config: dict, args: dict[str, str]) -> Cores:
        """Of this instance: with two on cores 0 to 3, the first has 0 and 1, the second 2 and 3."""
        first = int_parameter(config, "NEURON_CORE_START_INDEX", 0)
        last = int_parameter(config, "NEURON_CORE_END_INDEX", first)
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
        index = _number(args["model_instance_name"])
        if index >= instances:  # Triton adds instances to a model that is served, with the config of before
            raise ConfigError("the instances of a Neuron model share its cores: to have others, unload it first")
        share = total // instances
        return cls(first + index * share, share, threads)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def threads(self) -> int:
        return self.count * self.threads_each

    def claim(self) -> None:
        """This process, which is one instance's, takes them and no others. Before a Neuron library is imported."""
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(self.first) if self.count == 1 else f"{self.first}-{self.last}"


def _number(instance: str) -> int:
    """Of an instance among several, which Triton's name for it ends in."""
    number = instance.rpartition("_")[2]
    if not number.isdecimal():
        raise ConfigError(f"'{instance}' ends in no number of an instance: instance_group wants KIND_MODEL")
    return int(number)
