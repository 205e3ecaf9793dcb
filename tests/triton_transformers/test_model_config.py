"""Reading config.pbtxt: our part of Triton's schema, the configurations of the repository, and broken files."""

from __future__ import annotations

import re

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.git import files_in_git
from triton_transformers.model_config import (
    CONFIGS,
    SCHEMA,
    ModelConfig,
    Tensor,
    _message_class,
    find_config,
    load_config,
    parse_config,
    read_config,
    with_steps,
)
from triton_transformers.protocol import ENGINE
from triton_transformers.settings import UserError


def test_schema_is_a_part_of_tritons():
    compared = set()

    def compare(ours, triton) -> None:
        compared.add(ours.name)
        for field in ours.fields:
            counterpart = triton.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (
                counterpart.number,
                counterpart.type,
                counterpart.is_repeated,
            ), f"{ours.name}.{field.name}"
            if field.message_type:
                compare(field.message_type, counterpart.message_type)
            if field.enum_type:
                assert numbers(field.enum_type) == numbers(counterpart.enum_type)

    compare(_message_class().DESCRIPTOR, model_config_pb2.ModelConfig.DESCRIPTOR)
    assert compared == set(SCHEMA)


def numbers(enum) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


@pytest.mark.parametrize(
    "path", files_in_git("model_repository/*.pbtxt"), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_configs_in_git_read_the_same_with_tritons_schema(path):
    config = read_config(path)
    expected = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    for field in ("name", "platform", "backend", "default_model_filename", "max_batch_size"):
        assert getattr(config, field) == getattr(expected, field)
    for ours, theirs in ((config.inputs, expected.input), (config.outputs, expected.output)):
        assert [spelled(tensor) for tensor in ours] == [
            (tensor.name, tensor.data_type, list(tensor.dims), getattr(tensor, "optional", False)) for tensor in theirs
        ]
    steps = [step.model_name for step in expected.ensemble_scheduling.step]
    engines = [value.string_value for key, value in expected.parameters.items() if key == ENGINE]
    assert list(config.steps) == steps + engines
    assert config.parameters == {key: value.string_value for key, value in expected.parameters.items()}
    assert config.decoupled == expected.model_transaction_policy.decoupled


def spelled(tensor: Tensor) -> tuple:
    number = model_config_pb2.DataType.Value(f"TYPE_{tensor.data_type}")
    return tensor.name, number, list(tensor.dims), tensor.optional


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", ModelConfig()),
        ('name: \'m\' backend: "python" # backend: "other"', ModelConfig(name="m", backend="python")),
        (
            'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: 3 dims: -1 } input: [{name: "b", '
            'data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } optional: true }] output [ { name: "c" } ]',
            ModelConfig(
                max_batch_size=4,
                inputs=(Tensor("a", "FP32", (3, -1)), Tensor("b", "STRING", (1,), True)),
                outputs=(Tensor("c"),),
            ),
        ),
        (
            'ensemble_scheduling { step [ { model_name: "a" }, { model_name: "b" }, { model_name: "a" } ] }',
            ModelConfig(steps=("a", "b")),
        ),
        (
            'parameters [ { key: "a" value { string_value: "1" } } ] parameters: { key: "b" value: {} }',
            ModelConfig(parameters={"a": "1", "b": ""}),
        ),
        ("model_transaction_policy { decoupled: True }", ModelConfig(decoupled=True)),
        # Fields that we do not read, and that a newer Triton may add.
        (
            'instance_group [ { count: 1 kind: KIND_CPU secondary_devices [ { device_id: 0 } ] } ] name: "m"\n'
            'sequence_batching { control_input [ { name: "[" control [ { fp32_false_true: [ 0, 1 ] } ] } ] } # [ {\n'
            'of_a_newer_triton [ { list [ "x" ] }, <> ] version_policy: { latest { num_versions: 1 } }',
            ModelConfig(name="m"),
        ),
    ],
)
def test_config_is_read_however_it_is_written(text, config):
    assert parse_config(text) == config


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'name: "m"\ninput [ {', r'line 2, is not a model configuration: Expected "}"'),
        (b'\n\nmax_batch_size: "many"', "line 3, is not a model configuration: .*Couldn't parse integer"),
        (b'name: "m"\nname: "n"', 'line 2, is not .* should not have multiple "name" fields'),
        (b'{"name": "m"}', "line 1, is not a model configuration"),
        (b'name: "\xff"', "is not a model configuration: it is not text in UTF-8"),
    ],
)
def test_error_names_file_line_and_problem(tmp_path, content, problem):
    path = tmp_path / "config.pbtxt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{problem}"):
        read_config(path)


def test_profile_config_comes_before_config_pbtxt(tmp_path):
    (tmp_path / "m/configs").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "a"')
    (tmp_path / "m/configs/neuron.pbtxt").write_text('backend: "b"')
    assert load_config("m", tmp_path).backend == load_config("m", tmp_path, "cpu").backend == "a"
    assert load_config("m", tmp_path, "neuron").backend == "b"


def test_repository_comes_before_git(tmp_path):
    assert find_config("encoder", tmp_path) == CONFIGS / "encoder/config.pbtxt"
    assert find_config("encoder", tmp_path, "neuron") == CONFIGS / "encoder/configs/neuron.pbtxt"
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.pbtxt").touch()
    assert find_config("encoder", tmp_path, "neuron") == tmp_path / "encoder/config.pbtxt"
    assert find_config("nowhere", tmp_path) is None
    assert load_config("nowhere", tmp_path) == ModelConfig()


def test_steps_of_steps_are_included_once(tmp_path):
    step = 'ensemble_scheduling {{ step [ {{ model_name: "{}" }}, {{ model_name: "tokenizer" }} ] }}'
    for model, other in (("a", "b"), ("b", "a")):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.pbtxt").write_text(step.format(other))
    assert with_steps("a", tmp_path) == ["a", "b", "tokenizer"]
