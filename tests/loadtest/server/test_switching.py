"""The configurations of each mode, and a switch on a server whose loads fail or are undone."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from loadtest.compare.compare import Comparison
from loadtest.measure.windows import Experiment, Plan
from loadtest.server.machine import cpu_list
from loadtest.server.switching import (
    Capacity,
    LoadRefused,
    Switch,
    Switched,
    composing,
    plan,
    plan_formats,
    restore_after_kill,
)
from tests.support.measured_windows import window
from triton_transformers.settings import MODES, Settings, UserError
from triton_transformers.triton import TritonError

ENSEMBLE = {"max_batch_size": 64, "ensemble_scheduling": {"step": [{"model_name": "a"}]}}
GROUP = {"name": "a_0", "kind": "KIND_CPU", "count": 1, "gpus": []}
TWO = ("none", "dynamic")
STEP = {"max_batch_size": 64, "dynamic_batching": {"preferred_batch_size": [64], "max_queue_delay_microseconds": 100}}


class StandIn:
    """A Triton of one model. `after_load` holds what happens after each load: None, a stale config, or an error."""

    name = "stand-in"

    def __init__(self, *after_load):
        self.current = copy.deepcopy(STEP)
        self.after_load = list(after_load)
        self.loads = 0

    def config(self, model):
        return self.current

    def load(self, model, config):
        self.loads += 1
        event = self.after_load.pop(0) if self.after_load else None
        if isinstance(event, TritonError):
            raise event
        self.current = event or config


def switch_on(triton, folder):
    return Switch(triton, plan({"a": STEP}, None, MODES, 2), folder)


def test_only_dynamic_batching_differs_between_the_modes():
    (step,) = plan({"e": ENSEMBLE, "a": STEP}, None, TWO)
    assert step.name == "a"
    assert "dynamic_batching" not in step.modes["none"]
    assert step.modes["dynamic"] == STEP == step.original
    assert {**step.modes["none"], "dynamic_batching": STEP["dynamic_batching"]} == step.modes["dynamic"]


def test_model_without_dynamic_batching_gets_tritons_default():
    (step,) = plan({"a": {"max_batch_size": 8}}, None, TWO)
    assert step.modes["dynamic"]["dynamic_batching"] == {"preferred_batch_size": []}
    assert step.original == step.modes["none"] == {"max_batch_size": 8}


def test_instances_have_one_thread_and_do_not_batch():
    (step,) = plan(
        {"a": STEP | {"instance_group": [GROUP, GROUP], "parameters": {"x": {"string_value": "y"}}}}, None, MODES, 4
    )
    assert step.modes["none"]["instance_group"] == step.modes["dynamic"]["instance_group"] == [GROUP, GROUP]
    assert step.modes["instances"] == step.modes["none"] | {
        "instance_group": [GROUP | {"count": 4}],
        "parameters": {"x": {"string_value": "y"}, "intra_op_thread_count": {"string_value": "1"}},
    }


@pytest.mark.parametrize(
    ("backend", "parameter"), [("pytorch", "INTRA_OP_THREAD_COUNT"), ("openvino", "INFERENCE_NUM_THREADS")]
)
def test_instances_of_tritons_own_backends_have_one_thread(backend, parameter):
    (step,) = plan({"a": STEP | {"backend": backend}}, None, MODES, 4)
    assert step.modes["instances"]["parameters"] == {parameter: {"string_value": "1"}}


def test_step_that_cannot_batch_gets_more_instances():
    """Give it more, or it would delay the others in the mode `instances` alone."""
    last = {"max_batch_size": 0, "instance_group": [GROUP]}
    _, step = plan({"a": STEP, "last": last}, None, MODES, 4)
    assert not step.batches
    assert step.modes["none"] == step.modes["dynamic"] == last
    assert step.modes["instances"]["instance_group"] == [GROUP | {"count": 4}]
    assert [model.name for model in plan({"a": STEP, "last": last}, None, TWO)] == ["a"]


def test_max_batch_changes_in_all_modes_ensemble_first():
    ensemble, step = plan({"e": ENSEMBLE, "a": STEP}, 8, MODES, 2)
    assert [ensemble.name, step.name] == ["e", "a"]
    assert {config["max_batch_size"] for m in (ensemble, step) for config in m.modes.values()} == {8}
    assert step.modes["dynamic"]["dynamic_batching"]["preferred_batch_size"] == []


def test_models_that_cannot_batch_are_not_switched():
    batches = {"max_batch_size": 4}
    switched = plan(
        {"a": batches, "b": {"max_batch_size": 0}, "c": {"max_batch_size": 4, "sequence_batching": {}}}, None, TWO
    )
    assert [model.name for model in switched] == ["a"]


@pytest.mark.parametrize("config", [{"max_batch_size": 0}, {"max_batch_size": 1}])
def test_system_that_cannot_batch_is_an_error(config):
    with pytest.raises(UserError, match="nothing here can batch"):
        plan({"a": config}, None, MODES)


class Ensemble(StandIn):
    """A Triton of an ensemble of two steps; it refuses an ensemble that may batch more than its steps."""

    def __init__(self):
        super().__init__()
        steps = [{"model_name": "a"}, {"model_name": "b"}]
        ensemble = {"max_batch_size": 64, "ensemble_scheduling": {"step": steps}}
        self.configs = {"e": ensemble, "a": STEP, "b": STEP}

    def config(self, model):
        return self.configs[model]

    def load(self, model, config):
        self.configs = self.configs | {model: config}
        sizes = {name: config["max_batch_size"] for name, config in self.configs.items()}
        assert sizes["e"] <= min(sizes["a"], sizes["b"]), "the ensemble is gone"


def test_switch_never_lets_an_ensemble_batch_more_than_its_steps(tmp_path):
    triton = Ensemble()
    original = triton.configs
    models = [Switched(name, config, {}, batches=True) for name, config in original.items()]
    with Switch(triton, models, tmp_path) as switch:
        for number, sizes in enumerate([(8, 8, 64), (64, 64, 64), (8, 128, 8), (32, 32, 32), (4, 16, 4)]):
            changed = zip(original.items(), sizes, strict=True)
            switch.add(str(number), {name: config | {"max_batch_size": size} for (name, config), size in changed})
            switch.to(str(number))
    assert triton.configs == original


WITHOUT = {key: value for key, value in STEP.items() if key != "dynamic_batching"}
NO_MEMORY, NOT_HEALTHY = TritonError("no memory", 400), TritonError("Stub process 'a_0' is not healthy.", 400)
NOT_RESTORED = r"failed: no memory. The server's configurations are not restored"


@pytest.mark.parametrize(
    ("after_load", "error", "left"),
    [
        ([STEP], None, []),  # another client's load was waiting in Triton behind the first load of the switch
        ([NO_MEMORY] * 2, None, []),
        ([NOT_HEALTHY] * 7, None, []),
        ([None, None, NOT_HEALTHY], None, []),  # at the restore
        ([STEP] * 6, "another client keeps loading a with another configuration", []),
        ([TritonError("Forbidden", 403)] * 2, "TRITON_ADMIN_KEY is not the one", []),
        ([None, None, *[NO_MEMORY] * 3], NOT_RESTORED, ["a"]),
        # A reload undoes the first load of the next comparison.
        ([None, None, *[NO_MEMORY] * 3, WITHOUT, WITHOUT], NOT_RESTORED, ["a"]),
    ],
)
def test_switch_and_restore_hold_or_the_next_comparison_restores(tmp_path, after_load, error, left):
    triton = StandIn(*after_load)
    with pytest.raises(UserError, match=error) if error else nullcontext(), switch_on(triton, tmp_path) as switch:
        switch.to("none")
        assert "dynamic_batching" not in triton.current
        assert switch.in_force()
    # A wrong key is an error at the first load of the switch, and at that of the restore.
    assert (triton.loads == 2) == bool(error and "KEY" in error)
    assert restore_after_kill(triton, tmp_path) == left
    assert triton.current == STEP
    assert list(tmp_path.iterdir()) == []


def test_other_instances_are_no_mode_of_ours(tmp_path):
    """Somebody else may change them during a window."""
    triton = StandIn()
    with switch_on(triton, tmp_path) as switch:
        switch.to("instances")
        assert switch.in_force()
        triton.current = triton.current | {"instance_group": [GROUP | {"count": 3}]}
        assert not switch.in_force()
    assert triton.current == STEP


def tensor(name: str, dims: list[int], data_type: str = "TYPE_FP32") -> dict:
    return {"name": name, "dims": dims, "data_type": data_type}


def test_format_answers_in_place_of_the_system_with_the_systems_outputs(tmp_path):
    original = {
        "name": "a",
        "max_batch_size": 64,
        "input": [],
        "output": [tensor("output__0", [384]), tensor("x", [1])],
    }
    outputs = [tensor("vector", [384]), tensor("y", [1]), tensor("z", [1])]
    ensemble = ENSEMBLE | {"name": "a.onnx", "max_batch_size": 32, "input": [tensor("text", [1])], "output": outputs}
    (model,) = plan_formats(original, {"onnx": {"a.onnx": ensemble, "a.onnx_encoder": STEP}})
    front = model.modes["onnx"]
    (step,) = front["ensemble_scheduling"]["step"]
    assert (step["model_name"], step["input_map"], step["output_map"]) == (
        "a.onnx", {"text": "text"}, {"vector": "output__0"}
    )  # fmt: skip
    assert (front["name"], front["max_batch_size"], front["output"]) == ("a", 32, original["output"][:1])
    triton = StandIn()
    triton.current = original
    with Switch(triton, [model], tmp_path) as switch:
        switch.to("onnx")
        assert triton.current == front
        assert switch.counted() == {"encoder": "a.onnx_encoder"}
    assert triton.current == original


@pytest.mark.parametrize("mode", MODES)
def test_killed_comparison_is_undone_in_every_mode(tmp_path, mode):
    triton = StandIn()
    switch_on(triton, tmp_path).__enter__().to(mode)
    assert restore_after_kill(triton, tmp_path) == ([] if mode == "dynamic" else ["a"])
    assert triton.current == STEP


def test_refused_load_is_distinct_from_a_server_that_is_gone(tmp_path):
    for status, is_refusal in ((400, True), (None, False)):
        triton = StandIn(*[TritonError("no", status)] * 3)
        with pytest.raises(UserError) as caught, switch_on(triton, tmp_path) as switch:
            switch.to("instances")
        assert isinstance(caught.value, LoadRefused) == is_refusal


def test_system_that_is_not_served_is_an_error():
    class Empty(StandIn):
        url = "http://127.0.0.1:8000"

        def composing(self, system):
            raise TritonError("unknown model", 400)

    with pytest.raises(UserError, match=r"'x' is not served by http://127.0.0.1:8000"):
        composing(Empty(), "x")


# --- the mode `instances`: the cores and the memory of the server, and when the mode is left out ----------------------

ONE_STEP = {"max_batch_size": 8, "instance_group": [{"kind": "KIND_CPU", "count": 1}]}
GENERATES = {"max_batch_size": 0, "input": [{"name": "max_new_tokens"}]}
METRICS = """
# TYPE transformers_cpus gauge
transformers_cpus{model="tokenizer",version="1"} 4
transformers_cpus{model="encoder",version="1"} 4
# TYPE transformers_process_memory_bytes gauge
transformers_process_memory_bytes{model="tokenizer",version="1"} 1e+08
transformers_process_memory_bytes{model="encoder",version="1"} 4e+08
transformers_process_memory_bytes{model="unloaded",version="1"} 0
# TYPE transformers_memory_used_bytes gauge
transformers_memory_used_bytes{model="encoder",version="1"} 1e+09
transformers_memory_used_bytes{model="unloaded",version="1"} 0
# TYPE transformers_memory_limit_bytes gauge
transformers_memory_limit_bytes{model="encoder",version="1"} 3.1e+09
transformers_memory_limit_bytes{model="unloaded",version="1"} 0
# TYPE nv_inference_count counter
nv_inference_count{model="encoder",version="1"} 7
"""


def test_capacity_is_what_the_backends_report():
    capacity = Capacity.from_metrics(METRICS, cpus="", shared_memory=5 * 10**7)
    assert (capacity.cores, capacity.free_bytes) == (4, 2.1e9)
    assert capacity.process_bytes == {"tokenizer": 1.5e8, "encoder": 4.5e8}


def test_server_without_our_backends_has_the_cores_of_the_setting_or_the_machine(monkeypatch):
    monkeypatch.setattr("psutil.cpu_count", lambda: 6)
    for cpus, cores in (("0-2", 3), ("", 6)):
        capacity = Capacity.from_metrics('nv_inference_count{model="theirs"} 7\n', cpus, shared_memory=0)
        assert (capacity.cores, capacity.obstacle({"theirs": ONE_STEP})) == (cores, "")
    silent = Settings.load().replace(TRITON_METRICS_PORT="9", TRITON_CPUS="0,1")
    assert Capacity.from_server(silent) == Capacity(2)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("3", {3}), ("0-2", {0, 1, 2}), ("0,2-3", {0, 2, 3}), ("0-6:2", {0, 2, 4, 6}), ("", set())],
)
def test_cpu_list_is_read_as_taskset_reads_it(text, cpus):
    assert cpu_list(text) == cpus


def on(kind: str) -> dict:
    return {"instance_group": [{"kind": kind, "count": 1}]}


@pytest.mark.parametrize(
    ("capacity", "change", "obstacle"),
    [
        (Capacity(2), {}, ""),
        (Capacity(1), {}, "the server has one core"),
        (Capacity(2), GENERATES, "each instance of 'encoder' would hold the model's weights again"),
        (Capacity(2), {"sequence_batching": {}}, "'encoder' keeps the state of its sequences"),
        (Capacity(2), on("KIND_GPU"), "'encoder' do not run on the server's cores, but on a GPU"),
        (Capacity(2), on("KIND_MODEL"), "but where its backend puts them, as on NeuronCores"),
        (Capacity(4, 2.1e9, {"encoder": 4e8}), {}, ""),
        (Capacity(4, 2.1e9, {"encoder": 4e8, "tokenizer": 1e8}), {}, "about 2.2 GB of memory, and 2.1 GB are free"),
    ],
)
def test_obstacle_is_named(capacity, change, obstacle):
    text = capacity.obstacle({"tokenizer": ONE_STEP, "encoder": ONE_STEP | change})
    assert obstacle in text
    assert bool(text) == bool(obstacle)


def comparison(monkeypatch, cores: int, modes: str) -> Comparison:
    monkeypatch.setattr(Capacity, "from_server", classmethod(lambda cls, settings: Capacity(cores)))
    measured = Comparison(Settings.load().replace(MODES=modes))
    measured.triton = SimpleNamespace(composing=lambda system: {"encoder": ONE_STEP})
    return measured


def test_one_core_leaves_instances_out(monkeypatch):
    one = comparison(monkeypatch, 1, "none instances dynamic")
    (model,) = one.switched_models()
    assert list(model.modes) == one.modes == ["none", "dynamic"]
    assert "one core" in one.left_out["instances"]
    three = comparison(monkeypatch, 2, "none instances dynamic")
    (model,) = three.switched_models()
    assert three.modes == list(MODES)
    assert model.modes["instances"]["instance_group"][0]["count"] == 2
    assert three.left_out == {}
    alone = "MODES=instances dynamic: instances cannot be measured, because the server has"
    with pytest.raises(UserError, match=alone):
        comparison(monkeypatch, 1, "instances dynamic").switched_models()


class StubExperiment(Experiment):
    """An experiment whose windows need no server. Triton refuses the mode `instances` from a round on."""

    def __init__(self, modes, refused_from: int) -> None:
        self.plan = Plan("s", 2, None, 0, 1, None)
        self.modes, self.left_out, self.refused_from = modes, {}, refused_from
        self.users = self

    def stop(self) -> None: ...

    def window(self, number: int, mode: str):
        if mode == "instances" and number >= self.refused_from:
            raise LoadRefused("switching 'encoder' failed: no memory")
        return window(mode, number, 100)


def test_refused_instances_are_left_out_with_tritons_reason():
    experiment, windows = StubExperiment(MODES, refused_from=1), []
    experiment.run(windows.append)
    assert [(w.round, w.mode) for w in windows] == [(1, "none"), (1, "dynamic"), (2, "dynamic"), (2, "none")]
    assert experiment.left_out == {"instances": "switching 'encoder' failed: no memory"}
    # They end the run if they were measured before, or nothing would remain.
    for modes, refused_from in ((MODES, 2), (("instances", "dynamic"), 1)):
        with pytest.raises(LoadRefused):
            StubExperiment(modes, refused_from).run(lambda _: None)
