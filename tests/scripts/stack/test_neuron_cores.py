"""Test that no two models of a stack share a NeuronCore, and that every core exists."""

from pathlib import Path

import pytest

from scripts.stack.neuron_cores import check_cores, core_ranges
from triton_transformers.model_config import CONFIGS
from triton_transformers.settings import Settings, UserError

PARAMETER = 'parameters {{ key: "NEURON_CORE_{}_INDEX" value {{ string_value: "{}" }} }}\n'


def write_config(path: Path, first: int, last: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "# " + PARAMETER.format("START", 7) + PARAMETER.format("START", first) + PARAMETER.format("END", last)
    )


def settings(repository: Path, **values: str) -> Settings:
    defaults = {"MODEL_REPOSITORY": str(repository), "PROFILE": "neuron", "NEURON_DEVICES": "2"}
    return Settings.load().replace(**defaults | values)


def test_separate_ranges_are_valid(tmp_path):
    write_config(tmp_path / "a/config.pbtxt", 0, 1)
    write_config(tmp_path / "b/config.pbtxt", 2, 3)
    assert core_ranges(settings(tmp_path), ["a", "b"]) == {"a": range(2), "b": range(2, 4)}
    check_cores(settings(tmp_path), ["a", "b"])


def test_profile_config_replaces_the_default(tmp_path):
    write_config(tmp_path / "a/config.pbtxt", 0, 1)
    write_config(tmp_path / "b/config.pbtxt", 0, 1)
    write_config(tmp_path / "b/configs/neuron.pbtxt", 2, 2)
    check_cores(settings(tmp_path), ["a", "b"])


def test_embedding_has_the_cores_of_its_config_in_git():
    assert core_ranges(settings(CONFIGS), ["embedding"]) == {"encoder": range(2)}


def test_shared_core_is_an_error(tmp_path):
    write_config(tmp_path / "a/config.pbtxt", 0, 2)
    write_config(tmp_path / "b/config.pbtxt", 2, 3)
    with pytest.raises(UserError, match=r"a and b are both set to NeuronCore 2, .* Set other cores for b"):
        check_cores(settings(tmp_path), ["a", "b"])


def test_core_beyond_the_devices_is_an_error(tmp_path):
    write_config(tmp_path / "a/config.pbtxt", 2, 3)
    with pytest.raises(UserError, match="a is set to NeuronCores 2 to 3, but NEURON_DEVICES=1 of inf2 have only 2"):
        check_cores(settings(tmp_path, NEURON_DEVICES="1"), ["a"])
    check_cores(settings(tmp_path, NEURON_DEVICES="1", NEURON_CHIP="inf1"), ["a"])
