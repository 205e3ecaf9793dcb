"""Test text encoders on Neuron: the shapes to compile, and the compiled shape that a run takes."""

import json

import numpy as np
import pytest

from export.neuron.target import Target
from serving.engines.packing import cheapest_cut
from serving.neuron.shapes import Shapes
from serving.triton.types import BadRequest, ConfigError
from triton_transformers.settings import Settings, UserError

# (rows, tokens) -> seconds: eight rows cost three times as much as one.
SECONDS = {(1, 32): 1.0, (8, 32): 3.0, (1, 64): 2.0, (8, 64): 6.0}


def runs(lengths: list[int]) -> list[tuple[int, int]]:
    shapes = Shapes(SECONDS)
    cut = cheapest_cut(np.array(lengths), shapes.cost)
    return [shapes.shape(end - start, lengths[end - 1]) for start, end in cut]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([33], [(1, 64)]),
        ([5, 6], [(1, 32), (1, 32)]),
        ([5, 6, 7, 8], [(8, 32)]),
        ([5] * 17, [(1, 32), (8, 32), (8, 32)]),  # no more rows than the largest shape has
        ([5] * 8 + [60], [(8, 32), (1, 64)]),  # the long text does not pad the short ones
    ],
)
def test_rows_run_in_the_cheapest_shapes(lengths, expected):
    assert runs(lengths) == expected


def test_longer_shape_is_chosen_if_it_is_cheaper():
    shapes = Shapes({(4, 32): 9.0, (4, 64): 1.0})
    assert shapes.shape(2, 10) == (4, 64)


def test_text_longer_than_every_shape_is_an_error():
    with pytest.raises(BadRequest, match="a text has 65 tokens, and the model was compiled for 64 at most"):
        runs([65])


def target(**settings: str) -> Target | None:
    return Target.from_settings(Settings.load().replace(**{"PROFILE": "neuron"} | settings))


def test_lengths_double_up_to_the_maximum_of_the_model():
    assert target().lengths_up_to(256, "spam") == [32, 64, 128, 256]
    assert target().lengths_up_to(200, "spam") == [32, 64, 128, 200]
    assert target().lengths_up_to(20, "spam") == [20]
    assert target(NEURON_LENGTHS="100 20 256").lengths_up_to(256, "spam") == [20, 100, 256]
    with pytest.raises(UserError, match="NEURON_LENGTHS: 400 tokens are more than the maximum of spam, 256"):
        target(NEURON_LENGTHS="100 20 400").lengths_up_to(256, "spam")


def test_compiled_model_is_reused_unless_settings_changed():
    record = target(NEURON_BATCHES="4", NEURON_LENGTHS="32 64").record()
    assert target().matches(record)
    assert target(NEURON_BATCHES="4").matches(record)
    assert target(NEURON_LENGTHS="64 32").matches(record)
    for other in ({"NEURON_BATCHES": "1"}, {"NEURON_LENGTHS": "32"}, {"NEURON_CHIP": "trn1"}):
        assert not target(**other).matches(record)
    assert not target(NEURON_COMPILER_ARGS="--auto-cast matmult").matches(record)
    assert not target().matches(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"NEURON_CORES": "3:2"}, "NEURON_CORES=3:2: must be the first and the last NeuronCore, like 0:1"),
        ({"NEURON_BATCHES": "1 0"}, "NEURON_BATCHES=1 0: must be whole numbers from 1 to 64, separated by spaces"),
        ({"NEURON_LENGTHS": "1"}, "NEURON_LENGTHS=1: must be whole numbers from 8 to"),
        ({"PROFILE": "neurn"}, "PROFILE=neurn: must be one of cpu, cuda, neuron"),
        ({"NEURON_CHIP": "inf3"}, "NEURON_CHIP=inf3: must be one of inf1, inf2, trn1"),
        ({"NEURON_DEVICES": "some"}, "NEURON_DEVICES=some: must be a whole number"),
    ],
)
def test_wrong_setting_is_an_error(settings, message):
    with pytest.raises(UserError, match=message):
        target(**settings)


def test_wrong_manifest_is_an_error(pb_utils, tmp_path):
    from serving.neuron.text_encoder import Manifest

    right = {"inputs": ["input_ids", "attention_mask"], "shapes": [{"rows": 2, "length": 6, "file": "model.pt"}]}
    (tmp_path / "model.pt").touch()
    path, unknown = tmp_path / "neuron.json", "neuron.json is not what `make models` writes: run `make models` again"
    path.write_text(json.dumps(right))
    assert Manifest.read(path, right["inputs"]).files == {(2, 6): tmp_path / "model.pt"}
    for content, reason in (
        ("{", unknown),
        ("[]", unknown),
        (json.dumps(right | {"shapes": []}), unknown),
        (json.dumps(right | {"shapes": [{"rows": 2, "length": 6}]}), unknown),
        (json.dumps(right | {"inputs": None}), unknown),
        (json.dumps(right | {"inputs": ["input_ids"]}), "has the inputs input_ids and config.pbtxt input_ids, atten"),
        (json.dumps(right).replace("model.pt", "gone.pt"), "names gone.pt, which is not beside it: run"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            Manifest.read(path, right["inputs"])
