"""How the instances of a model share its NeuronCores."""

from __future__ import annotations

import os

import pytest

from neuron.cores import Cores
from shared.types import ConfigError


def config(first: int, last: int, instances: int = 1, threads: int = 1) -> dict:
    parameters = {"NEURON_CORE_START_INDEX": first, "NEURON_CORE_END_INDEX": last, "NUM_THREADS_PER_CORE": threads}
    return {
        "instance_group": [{"count": instances}],
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
    }


def instance(name: str) -> dict[str, str]:
    return {"model_instance_name": name}


@pytest.mark.parametrize(("instances", "shares"), [(1, ["4-7"]), (2, ["4-5", "6-7"]), (4, ["4", "5", "6", "7"])])
def test_instances_share_the_cores_equally(monkeypatch, instances, shares):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    for index, share in enumerate(shares):
        Cores.of_instance(config(4, 7, instances), instance(f"my_model_0_{index}")).claim()
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == share


def test_threads_are_per_core():
    cores = Cores.of_instance(config(0, 3, instances=2, threads=3), instance("m_0_1"))
    assert (cores.first, cores.last, cores.count, cores.threads_per_core, cores.threads) == (2, 3, 2, 3, 6)


def test_default_is_one_core():
    assert Cores.of_instance({"instance_group": [{"count": 1}]}, instance("my_model_0_0")) == Cores(0, 1, 1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (config(3, 2), "3 to NEURON_CORE_END_INDEX 2 is no range"),
        (config(-1, 2), "is no range"),
        (config(0, 3, threads=0), "NUM_THREADS_PER_CORE must be at least 1, not 0"),
        (config(0, 3, instances=3), "4 NeuronCores .* cannot be shared out equally among 3"),
        (config(0, 0, instances=2), "1 NeuronCores .* cannot be shared out equally among 2"),
        (config(0, 1) | {"instance_group": [{"count": 1}, {"count": 1}]}, "one instance group, not 2"),
        (config(0, "x"), "'NEURON_CORE_END_INDEX' must be a whole number, not 'x'"),
    ],
)
def test_invalid_cores_are_refused(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        Cores.of_instance(wrong, instance("m_0_0"))


def test_instance_name_without_a_number_is_refused():
    with pytest.raises(ConfigError, match="KIND_MODEL"):
        Cores.of_instance(config(0, 1, instances=2), instance("m_0_0_gpu"))
