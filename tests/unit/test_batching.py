"""What each mode posts to the server."""

import pytest

from loadtest.switching import plan
from scripts.common.settings import UserError

ENSEMBLE = {"max_batch_size": 64, "ensemble_scheduling": {"step": [{"model_name": "a"}]}}
STEP = {"max_batch_size": 64, "dynamic_batching": {"preferred_batch_size": [64], "max_queue_delay_microseconds": 100}}


def test_only_dynamic_batching_differs_between_the_modes():
    (step,) = plan({"e": ENSEMBLE, "a": STEP}, None)
    assert step.name == "a"
    assert "dynamic_batching" not in step.modes["none"]
    assert step.modes["dynamic"] == STEP == step.original
    assert {**step.modes["none"], "dynamic_batching": STEP["dynamic_batching"]} == step.modes["dynamic"]


def test_a_model_without_it_gets_tritons_default():
    (step,) = plan({"a": {"max_batch_size": 8}}, None)
    assert step.modes["dynamic"]["dynamic_batching"] == {"preferred_batch_size": []}
    assert step.original == step.modes["none"] == {"max_batch_size": 8}


def test_the_largest_batch_changes_in_both_modes_ensemble_first():
    ensemble, step = plan({"e": ENSEMBLE, "a": STEP}, 8)
    assert [ensemble.name, step.name] == ["e", "a"]
    assert {config["max_batch_size"] for m in (ensemble, step) for config in m.modes.values()} == {8}
    assert step.modes["dynamic"]["dynamic_batching"]["preferred_batch_size"] == []


def test_models_that_cannot_batch_are_left_alone():
    batches = {"max_batch_size": 4}
    switched = plan(
        {"a": batches, "b": {"max_batch_size": 0}, "c": {"max_batch_size": 4, "sequence_batching": {}}}, None
    )
    assert [model.name for model in switched] == ["a"]


@pytest.mark.parametrize("config", [{"max_batch_size": 0}, {"max_batch_size": 1}])
def test_nothing_to_compare_is_said(config):
    with pytest.raises(UserError, match="nothing here can batch"):
        plan({"a": config}, None)
