"""Changing a config.pbtxt: the result has the new values, and the rest of the text as it was."""

from __future__ import annotations

import random
import re
import subprocess

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from triton_transformers.config_editor import diff, edited, edits
from triton_transformers.model_config import CONFIGS
from triton_transformers.settings import UserError

# All that `make tune` may change.
CHANGES = {
    "max_batch_size": 7,
    "dynamic_batching": {"max_queue_delay_microseconds": 500, "preferred_batch_size": [4, 8]},
    "instance_group": [{"count": 3, "kind": "KIND_CPU"}],
    "parameters": {"intra_op_thread_count": {"string_value": "2"}, "engine": {"string_value": "openvino-bf16"}},
}


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def as_dict(text: str) -> dict:
    return json_format.MessageToDict(parsed(text), preserving_proto_field_name=True)


def changed(text: str, changes: dict) -> ModelConfig:
    """Return what the text must mean after the changes."""
    config = as_dict(text)
    parameters = config.get("parameters", {}) | (changes.get("parameters") or {})
    config |= changes
    if "parameters" in changes:
        present = {key: value for key, value in parameters.items() if value is not None}
        config["parameters"] = present if changes["parameters"] is not None else None
    return json_format.ParseDict({key: value for key, value in config.items() if value is not None}, ModelConfig())


def comments(text: str) -> list[str]:
    strings_or_comments = re.findall(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#[^\r\n]*""", text)
    return [match for match in strings_or_comments if match.startswith("#")]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.pbtxt")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_configs_in_git_keep_comments_and_other_lines(path):
    before = path.read_text()
    changes = {key: value for key, value in CHANGES.items() if "ensemble_scheduling" not in before or key[0] == "m"}
    after = edited(before, changes)
    assert parsed(after) == changed(before, changes)
    assert comments(after) == comments(before)
    kept = [line for line in before.splitlines() if line and not line.startswith(tuple(changes))]
    assert [line for line in after.splitlines() if line in kept] == kept
    # The way back ends where it began, but for the layout of what was there.
    original = as_dict(before)
    gone = {"parameters": {key: original.get("parameters", {}).get(key) for key in changes.get("parameters", {})}}
    assert parsed(edited(after, {key: original.get(key) for key in changes} | gone)) == parsed(before)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.pbtxt")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_present_values_change_no_letter(path):
    text = path.read_text()
    assert edited(text, as_dict(text)) == text


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("max_batch_size:64", {"max_batch_size": 8}, "max_batch_size:8"),
        ("max_batch_size : 64;", {"max_batch_size": 8}, "max_batch_size : 8;"),
        ("max_batch_size: 0 # none", {"max_batch_size": 8}, "max_batch_size: 8 # none"),
        ("max_batch_size: 4", {"max_batch_size": 0}, "max_batch_size: 0"),
        ("max_batch_size: 4\n", {"max_batch_size": None}, ""),
        # A comment, a string or a longer name that looks like the field.
        (
            '# max_batch_size: 1\nname: "max_batch_size: 2 # { \\" }"\nmax_batch_size: 4',
            {"max_batch_size": 8},
            '# max_batch_size: 1\nname: "max_batch_size: 2 # { \\" }"\nmax_batch_size: 8',
        ),
        ("name: 'm' '#' # it's\nmax_batch_size: 4", {"max_batch_size": 8}, "name: 'm' '#' # it's\nmax_batch_size: 8"),
        # New fields go behind those that come before them in every guide, or to the end.
        ('name: "m"\ninput [ ]\n', {"max_batch_size": 8}, 'name: "m"\nmax_batch_size: 8\ninput [ ]\n'),
        ('name: "m" # x\ninput [ ]\n', {"max_batch_size": 8}, 'name: "m" # x\nmax_batch_size: 8\ninput [ ]\n'),
        ('name: "m", input [ ]', {"max_batch_size": 8}, 'name: "m", max_batch_size: 8 input [ ]'),
        ("input [ ]", {"max_batch_size": 8}, "max_batch_size: 8\ninput [ ]"),
        ('name: "m"', {"dynamic_batching": {}}, 'name: "m"\ndynamic_batching { }'),
        ('name: "m"\n\ninput [ ] # x', {"dynamic_batching": {}}, 'name: "m"\n\ninput [ ] # x\n\ndynamic_batching { }'),
        ('name: "m"\r\n', {"dynamic_batching": {}}, 'name: "m"\r\ndynamic_batching { }\r\n'),
        # Newlines of both kinds, as after edits on two systems.
        (
            'name: "m" # x\ninput [ ]\r\n',
            {"max_batch_size": 8, "dynamic_batching": {}},
            'name: "m" # x\r\nmax_batch_size: 8\ninput [ ]\r\ndynamic_batching { }\r\n',
        ),
        ("# only a comment", {"max_batch_size": 8}, "# only a comment\nmax_batch_size: 8\n"),
        # Messages.
        (
            "dynamic_batching: {\n  # why\n  max_queue_delay_microseconds: 100 # because\n}\n",
            {"dynamic_batching": {"max_queue_delay_microseconds": 500, "preferred_batch_size": [4]}},
            "dynamic_batching: {\n  # why\n  max_queue_delay_microseconds: 500 # because\n"
            "  preferred_batch_size: [ 4 ]\n}\n",
        ),
        (
            "dynamic_batching {\n  preferred_batch_size: [ 4, # small\n 8 ]\n  max_queue_delay_microseconds: 100\n}",
            {"dynamic_batching": {"preferred_batch_size": [4, 16]}},
            "dynamic_batching {\n  preferred_batch_size: [ 4, # small\n 16 ]\n}",
        ),
        (
            "dynamic_batching { preferred_batch_size: 4 preferred_batch_size: 8 }",
            {"dynamic_batching": {"preferred_batch_size": [2]}},
            "dynamic_batching { preferred_batch_size: [ 2 ] }",
        ),
        (
            "dynamic_batching <\r\n  # nothing\r\n>",
            {"dynamic_batching": {"max_queue_delay_microseconds": "5"}},
            "dynamic_batching <\r\n  # nothing\r\n  max_queue_delay_microseconds: 5\r\n>",
        ),
        ("a\n\ndynamic_batching { } # x\n\nb", {"dynamic_batching": None}, "a\n\n# x\n\nb"),
        ("a\n\n  dynamic_batching { }\n\nb", {"dynamic_batching": None}, "a\n\nb"),
        ("a\r\n\r\ndynamic_batching { }\r\n\r\nb", {"dynamic_batching": None}, "a\r\n\r\nb"),
        ("a dynamic_batching { } b", {"dynamic_batching": None}, "a b"),
        # Groups of instances.
        (
            "instance_group [\n  { count: 1 kind: KIND_CPU } # one\n]",
            {"instance_group": [{"count": 2, "kind": "KIND_CPU"}]},
            "instance_group [\n  { count: 2 kind: KIND_CPU } # one\n]",
        ),
        (
            "instance_group [{count:1,kind:KIND_GPU,gpus:[0,1]}]",
            {"instance_group": [{"count": 2, "kind": "KIND_GPU"}]},
            "instance_group [{count:2,kind:KIND_GPU,}]",
        ),
        (
            "instance_group { count: 1 }\ninstance_group { count: 2 }\na",
            {"instance_group": [{"count": 4, "kind": "KIND_CPU"}]},
            "instance_group [ { count: 4 kind: KIND_CPU } ]\na",
        ),
        ("instance_group [ ]", {"instance_group": [{"count": 4}]}, "instance_group [ { count: 4 } ]"),
        # Parameters, one by one.
        (
            'parameters { key: "a" value { string_value: "1" } } # a\n\n# of b\n'
            "parameters: { key: 'b', value: { string_value: '{' '#' } }\na",
            {"parameters": {"b": {"string_value": '"2"'}, "c": {"string_value": "3"}}},
            'parameters { key: "a" value { string_value: "1" } } # a\n\n# of b\n'
            'parameters: { key: \'b\', value: { string_value: "\\"2\\"" } }\n'
            'parameters { key: "c" value { string_value: "3" } }\na',
        ),
        (
            'parameters [\n  { key: "a" value { string_value: "1" } } # a\n]',
            {"parameters": {"b": {"string_value": "2"}, "c": {"string_value": "3"}}},
            'parameters [\n  { key: "a" value { string_value: "1" } }, # a\n'
            '  { key: "b" value { string_value: "2" } },\n  { key: "c" value { string_value: "3" } }\n]',
        ),
        (
            'parameters [ { key: "a" } ]',
            {"parameters": {"a": {"string_value": "1"}, "b": {"string_value": "2"}}},
            'parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "2" } } ]',
        ),
        (
            'parameters [ { key: "a" }, { key: "b" }, { key: "c" } ]',
            {"parameters": {"a": None, "c": None}},
            'parameters [ { key: "b" } ]',
        ),
        (
            'parameters { key: "a" value { string_value: "1" } } parameters { key: "a" value { string_value: "2" } }',
            {"parameters": {"a": {"string_value": "3"}}},
            'parameters { key: "a" value { string_value: "3" } } parameters { key: "a" value { string_value: "3" } }',
        ),
        ('# a\nparameters { key: "a" }\n# b\n', {"parameters": {"a": None}}, "# a\n# b\n"),
        ("parameters [ ]", {"parameters": {"a": {}}}, 'parameters [ ]\nparameters { key: "a" value { } }'),
    ],
)
def test_layout_is_kept(before, changes, after):
    # The letters stand for fields that need a line of their own.
    before, after = (re.sub(r"\b([ab])$|^([ab])\b", r'name: "\1\2"', text) for text in (before, after))
    if before.count("name: ") > 1:
        before, after = (text.replace('name: "a"', 'backend: "a"') for text in (before, after))
    assert edited(before, changes) == after
    assert parsed(after) == changed(before, changes)


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        ('name: "m', {"max_batch_size": 8}, "line 1 is not understood"),
        ("\nof_a_newer_triton { x: 1 }\n", {"max_batch_size": 8}, "line 2 is not understood .*no field named"),
        (
            "max_batch_size: 4 max_batch_size: 8",
            {"max_batch_size": 8},
            "line 1 is not understood .*should not have multiple",
        ),
        ("", {"max_batch_size": "many"}, "the new value is not one of Triton's"),
        ("", {"of_a_newer_triton": 1}, "the new value is not one of Triton's"),
        ("ensemble_scheduling { }", {"dynamic_batching": {}}, "line 2 is not understood"),
    ],
)
def test_unsafe_change_is_one_sentence(text, changes, problem):
    with pytest.raises(UserError, match=f"^the configuration cannot be changed safely, because {problem}.*by hand$"):
        edited(text, changes)


class Author:
    """Writes random configurations, each in a layout of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.comments = 0

    def some(self, *choices: str) -> str:
        return self.random.choice(choices)

    def maybe(self, value: object) -> object:
        return value if self.random.random() < 0.6 else None

    def space(self) -> str:
        if self.random.random() < 0.15:
            self.comments += 1
            return f" # {self.comments} {{ 'it\"s' ] }}{self.newline}"
        return self.some(" ", " ", "  ", self.newline, self.newline + "  ", 2 * self.newline)

    def value(self, value: object) -> str:
        if isinstance(value, dict):
            opening, closing = self.some("{}", "<>")
            return opening + self.space() + self.fields(value) + closing
        if isinstance(value, str) and value.startswith(("KIND_", "MODEL_")):
            return value
        if isinstance(value, str):
            quote = self.some('"', "'")
            half = len(value) // 2
            return f"{quote}{value[:half]}{quote}{self.some('', ' ', self.newline)}{quote}{value[half:]}{quote}"
        return str(value)

    def field(self, name: str, value: object) -> str:
        if isinstance(value, list) and self.random.random() < 0.5:
            return "".join(self.field(name, element) for element in value)
        if isinstance(value, list):
            separator = "," + self.space()
            text = f"[{self.space()}{separator.join(map(self.value, value))}{self.space()}]"
        else:
            text = self.value(value)
        is_message = isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))
        colon = self.some("", ":", " : ") if is_message else ":"
        return f"{name}{colon}{self.some('', ' ')}{text}{self.some('', ',', ';')}{self.space()}"

    def fields(self, config: dict) -> str:
        entries = [{"key": key, "value": value} for key, value in (config.get("parameters") or {}).items()]
        items = [item for item in {**config, "parameters": entries}.items() if item[1] not in (None, [])]
        self.random.shuffle(items)
        return "".join(self.field(*item) for item in items)

    def config(self) -> dict:
        count = self.random.randint
        batcher = {
            "preferred_batch_size": self.maybe([count(1, 9) for _ in range(count(1, 3))]),
            "max_queue_delay_microseconds": self.maybe(count(0, 2) * 100),
            "default_queue_policy": self.maybe({"max_queue_size": count(0, 3)}),
        }
        groups = [{"count": count(1, 9), "kind": self.maybe("KIND_CPU")} for _ in range(count(0, 3))]
        parameters = {key: {"string_value": self.some("1", "{", "#", "")} for key in "abcd" if self.maybe(1)}
        return {
            "name": self.maybe("m # {"),
            "max_batch_size": self.maybe(count(0, 99)),
            "dynamic_batching": self.maybe(without_none(batcher)),
            "instance_group": self.maybe([without_none(group) for group in groups]),
            "parameters": self.maybe(parameters),
        }

    def text(self) -> tuple[dict, str]:
        self.newline = self.some("\n", "\r\n")
        config = self.config()
        text = self.space() + self.fields(config)
        return config, text.rstrip() if self.random.random() < 0.3 else text


def without_none(config: dict) -> dict:
    return {key: value for key, value in config.items() if value is not None}


def test_random_changes_of_random_texts_hold():
    for seed in range(150):
        author = Author(seed)
        _, before = author.text()
        changes = {key: value for key, value in author.config().items() if author.maybe(1)}
        if changes.get("parameters"):
            changes["parameters"] |= {key: None for key in "abcd" if not author.maybe(1)}
        after = edited(before, changes)
        assert parsed(after) == changed(before, changes), seed
        if None not in changes.values():
            assert edited(after, changes) == after, seed
        # Scalars never take a comment with them.
        scalars = {key: value for key, value in changes.items() if key in ("name", "max_batch_size")}
        assert comments(edited(before, scalars)) == comments(before), seed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "max_batch_size: 8\n"),
        ("max_batch_size: 4\n", "max_batch_size: 8\n"),
        ("max_batch_size: 4", "max_batch_size: 8"),
        ("max_batch_size: 4\r\n", "max_batch_size: 8\r\n"),
    ],
)
def test_diff_can_be_applied(tmp_path, before, after):
    path = tmp_path / "m/config.pbtxt"
    path.parent.mkdir()
    if before:
        path.write_bytes(before.encode())
    patch = tmp_path / "change.diff"
    patch.write_bytes(diff("m", before, after).encode())
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    assert path.read_bytes().decode() == after


def test_no_change_has_no_diff():
    assert diff("m", "a", "a") == ""


def live(config: dict) -> dict:
    """Return the configuration as the server completes it."""
    group = {"name": "m", "kind": "KIND_CPU", "count": 1, "gpus": [], "secondary_devices": [], "passive": False}
    batcher = {"preferred_batch_size": [64], "max_queue_delay_microseconds": 0, "preserve_ordering": False}
    return {"name": "m", "platform": "", "backend": "onnxruntime", "max_batch_size": 64} | {
        "instance_group": [group],
        "dynamic_batching": batcher,
        **config,
    }


def test_fields_that_the_server_completed_stay_out_of_the_text(tmp_path):
    (tmp_path / "m").mkdir()
    text = 'backend: "onnxruntime"\nmax_batch_size: 64\ninstance_group [ { kind: KIND_AUTO } ]\ndynamic_batching { }\n'
    (tmp_path / "m/config.pbtxt").write_text(text)
    original = live({})
    changes = {
        "max_batch_size": 16,
        "dynamic_batching": original["dynamic_batching"]
        | {"preferred_batch_size": [], "max_queue_delay_microseconds": 500},
        "instance_group": [original["instance_group"][0] | {"count": 2}],
    }
    (edit,) = edits({"m": changes}, {"m": original}, tmp_path, "cpu")
    assert edit.before == text
    assert edit.after == (
        'backend: "onnxruntime"\nmax_batch_size: 16\ninstance_group [ { kind: KIND_AUTO count: 2 } ]\n'
        "dynamic_batching { max_queue_delay_microseconds: 500 }\n"
    )
    assert edits({"m": {"dynamic_batching": live({})["dynamic_batching"]}}, {"m": original}, tmp_path, "cpu") == []


def test_model_without_a_text_gets_one(tmp_path):
    (edit,) = edits({"m": {"instance_group": [{"name": "m", "count": 2}]}}, {"m": live({})}, tmp_path, "cpu")
    assert (edit.model, edit.name, edit.before) == ("m", "config.pbtxt", "")
    assert as_dict(edit.after) == {
        "name": "m",
        "backend": "onnxruntime",
        "max_batch_size": 64,
        "instance_group": [{"count": 2}],
    }
    assert edit.diff.startswith("--- /dev/null\n+++ b/m/config.pbtxt\n")


def test_batching_stays_off_where_triton_would_complete_it(tmp_path):
    """Triton turns batching on if it completes the inputs or outputs."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.pbtxt").write_text('backend: "onnxruntime"\n')
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]}]
    original = live({"max_batch_size": 4, "input": tensors, "output": tensors})
    (edit,) = edits({"m": {"dynamic_batching": None}}, {"m": original}, tmp_path, "cpu")
    assert as_dict(edit.after) == {"backend": "onnxruntime", "max_batch_size": 4, "input": tensors, "output": tensors}


def test_config_of_the_profile_is_the_one_that_changes(tmp_path):
    for name in ("config.pbtxt", "configs/neuron.pbtxt"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text("max_batch_size: 64")
    (edit,) = edits({"m": {"max_batch_size": 8}}, {"m": live({})}, tmp_path, "neuron")
    assert edit.name == "configs/neuron.pbtxt"
    assert "+++ b/m/configs/neuron.pbtxt\n" in edit.diff


def test_config_in_git_is_changed_for_a_repository_without_it(tmp_path):
    original = live({"backend": "tokenizer"})
    (edit,) = edits({"tokenizer": {"max_batch_size": 8}}, {"tokenizer": original}, tmp_path, "cpu")
    assert (edit.name, edit.before) == ("config.pbtxt", (CONFIGS / "tokenizer/config.pbtxt").read_text())


def test_error_names_the_file(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.pbtxt").write_bytes(b'name: "\xff"')
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "m/config.pbtxt"))):
        edits({"m": {"max_batch_size": 8}}, {"m": live({})}, tmp_path, "cpu")
