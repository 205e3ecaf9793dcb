"""The files of a winner of `make tune`: what they contain, and what becomes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from loadtest.tune.winner import winner_files
from tests.support.git import files_in_git
from triton_transformers.model_config import CONFIGS, check_edits, find_config, is_outdated, tuned_configs
from triton_transformers.settings import UserError

GROUP = {"name": "m", "kind": "KIND_CPU", "count": 1, "gpus": [], "secondary_devices": [], "passive": False}
BATCHER = {"preferred_batch_size": [64], "max_queue_delay_microseconds": 0, "preserve_ordering": False}
# A configuration as the server completes it.
SERVED = {
    "name": "m",
    "platform": "",
    "backend": "onnxruntime",
    "max_batch_size": 64,
    "instance_group": [GROUP],
    "dynamic_batching": BATCHER,
}
SMALLER = {"m": {"max_batch_size": 8}}


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "m/config.pbtxt"
    path.parent.mkdir()
    path.write_text(
        '# Why.\nbackend: "onnxruntime"\nmax_batch_size: 64\ndynamic_batching { }\n'
        'parameters [ { key: "a" value: { string_value: "1" } }, { key: "b" value: { string_value: "2" } } ]\n'
    )
    return path


def written(repository: Path, changes: dict, original: dict = SERVED, profile: str = "cpu") -> tuple[Path, str]:
    """Write the file of the only model, as APPLY=1 does; return it and what differs."""
    ((name, text),), diff = (
        part.items() if isinstance(part, dict) else part
        for part in winner_files(changes, dict.fromkeys(changes, original), repository, profile)
    )
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path, diff


def content(path: Path) -> dict:
    message = text_format.Parse(path.read_text(), ModelConfig())
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def test_winner_has_the_changes_and_nothing_else_that_the_server_completed(config, tmp_path):
    changes = {
        "max_batch_size": 16,
        "dynamic_batching": BATCHER | {"preferred_batch_size": [], "max_queue_delay_microseconds": 500},
        "instance_group": [GROUP | {"count": 2}],
        "parameters": {"b": {"string_value": "3"}, "c": {"string_value": "4"}},
    }
    path, diff = written(tmp_path, {"m": changes})
    assert content(path) == {
        "backend": "onnxruntime",
        "max_batch_size": 16,
        "dynamic_batching": {"max_queue_delay_microseconds": "500"},
        "instance_group": [{"name": "m", "kind": "KIND_CPU", "count": 2}],
        "parameters": {key: {"string_value": value} for key, value in {"a": "1", "b": "3", "c": "4"}.items()},
    }
    assert diff.startswith("--- m/config.pbtxt\n+++ m/configs/cpu.pbtxt\n")
    assert "\n-max_batch_size: 64\n+max_batch_size: 16\n" in diff
    assert find_config("m", tmp_path, "cpu") == path
    assert tuned_configs(config.parent) == [path]
    assert not is_outdated(path)


def test_model_without_a_file_gets_one(tmp_path):
    path, diff = written(tmp_path, {"m": {"instance_group": [{"name": "m", "count": 2}]}})
    expected = {"name": "m", "backend": "onnxruntime", "max_batch_size": 64}
    assert content(path) == expected | {"instance_group": [{"name": "m", "count": 2}]}
    assert diff.startswith("--- /dev/null\n")


def test_batching_stays_off_where_triton_would_complete_it(tmp_path, config):
    """Triton turns batching on if it completes the inputs or outputs."""
    config.write_text('backend: "onnxruntime"\ndynamic_batching { }\n')
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]}]
    original = SERVED | {"max_batch_size": 4, "input": tensors, "output": tensors}
    path, _ = written(tmp_path, {"m": {"dynamic_batching": None}}, original)
    assert content(path) == {"backend": "onnxruntime", "max_batch_size": 4, "input": tensors, "output": tensors}


@pytest.mark.parametrize("model", [path.parent.name for path in files_in_git("model_repository/*/config.pbtxt")])
def test_configurations_in_git_can_be_written_anew(tmp_path, model):
    own = text_format.Parse((CONFIGS / model / "config.pbtxt").read_text(), ModelConfig())
    path, _ = written(tmp_path, {model: {"max_batch_size": 8}})
    own.max_batch_size = 8
    assert text_format.Parse(path.read_text(), ModelConfig()) == own


@pytest.mark.parametrize("text", [b'name: "\xff"', b"of_a_newer_release: 1", b"max_batch_size: {"])
def test_configuration_that_would_lose_a_field_is_an_error(config, tmp_path, text):
    config.write_bytes(text)
    with pytest.raises(UserError, match=re.escape(f"{config}: this configuration cannot be written anew")):
        written(tmp_path, SMALLER)


def test_edit_of_the_ignored_file_is_refused_until_it_is_in_force(config, tmp_path):
    path, _ = written(tmp_path, SMALLER)
    check_edits("m", tmp_path, "cpu")
    config.write_text(config.read_text().replace("64", "32"))
    with pytest.raises(UserError, match=rf"{config} was changed after `make tune` wrote {path}, .* delete {path}"):
        check_edits("m", tmp_path, "cpu")
    check_edits("m", tmp_path, "cuda")  # another profile uses config.pbtxt
    path.write_text(re.sub("# SHA-256.*\n", "", path.read_text()))  # the user keeps both
    check_edits("m", tmp_path, "cpu")
    path.unlink()
    check_edits("m", tmp_path, "cpu")


def test_second_search_changes_the_tuned_file(config, tmp_path):
    first, _ = written(tmp_path, SMALLER)
    second, diff = written(tmp_path, {"m": {"dynamic_batching": None, "input": [], "output": []}})
    assert first == second
    assert diff.startswith("--- m/configs/cpu.pbtxt\n")
    assert content(second)["max_batch_size"] == 64  # the server's, because the file has no inputs
    assert tuned_configs(config.parent) == [second] and not is_outdated(second)


def test_own_file_of_a_profile_stays_the_users(config, tmp_path):
    """It is as those in git for AWS Neuron: config.pbtxt was not in force before either."""
    own = config.parent / "configs/neuron.pbtxt"
    own.parent.mkdir()
    own.write_text("max_batch_size: 4")
    path, _ = written(tmp_path, SMALLER, profile="neuron")
    assert path == own and content(path) == {"max_batch_size": 8}
    assert tuned_configs(config.parent) == []
    config.write_text("max_batch_size: 2")
    check_edits("m", tmp_path, "neuron")
