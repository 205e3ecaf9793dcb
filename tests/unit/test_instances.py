"""The mode `instances`: the cores and the memory of the server, and when the mode is left out."""

import pytest

from loadtest.compare import Comparison
from loadtest.machine import cpu_list
from loadtest.switching import Capacity, LoadRefused
from loadtest.windows import Experiment, Plan
from tests.support.measured_windows import window
from triton_transformers.settings import MODES, Settings, UserError

STEP = {"max_batch_size": 8, "instance_group": [{"kind": "KIND_CPU", "count": 1}]}
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
        assert (capacity.cores, capacity.obstacle({"theirs": STEP})) == (cores, "")
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
        (Capacity(2), {"sequence_batching": {}}, "'encoder' keeps the state of its sequences"),
        (Capacity(2), on("KIND_GPU"), "'encoder' do not run on the server's cores, but on a GPU"),
        (Capacity(2), on("KIND_MODEL"), "but where its backend puts them, as on NeuronCores"),
        (Capacity(4, 2.1e9, {"encoder": 4e8}), {}, ""),
        (Capacity(4, 2.1e9, {"encoder": 4e8, "tokenizer": 1e8}), {}, "about 2.2 GB of memory, and 2.1 GB are free"),
    ],
)
def test_obstacle_is_named(capacity, change, obstacle):
    text = capacity.obstacle({"tokenizer": STEP, "encoder": STEP | change})
    assert obstacle in text
    assert bool(text) == bool(obstacle)


class OneModel:
    def composing(self, system: str) -> dict:
        return {"encoder": STEP}


def comparison(monkeypatch, cores: int, modes: str) -> Comparison:
    monkeypatch.setattr(Capacity, "from_server", classmethod(lambda cls, settings: Capacity(cores)))
    measured = Comparison(Settings.load().replace(MODES=modes))
    measured.triton = OneModel()
    return measured


def test_one_core_leaves_instances_out(monkeypatch):
    one = comparison(monkeypatch, 1, "none instances dynamic")
    (model,) = one._models()
    assert list(model.modes) == one.modes == ["none", "dynamic"]
    assert "one core" in one.left_out["instances"]
    three = comparison(monkeypatch, 2, "none instances dynamic")
    (model,) = three._models()
    assert three.modes == list(MODES)
    assert model.modes["instances"]["instance_group"][0]["count"] == 2
    assert three.left_out == {}
    alone = "MODES=instances dynamic: instances cannot be measured, because the server has"
    with pytest.raises(UserError, match=alone):
        comparison(monkeypatch, 1, "instances dynamic")._models()


class StubExperiment(Experiment):
    """An experiment whose windows need no server. Triton refuses the mode `instances` from a round on."""

    def __init__(self, modes, refused_from: int) -> None:
        self.plan = Plan("s", 2, None, 0, 1, None)
        self.modes, self.left_out, self.refused_from = modes, {}, refused_from
        self.users = self

    def stop(self) -> None: ...

    def _window(self, number: int, mode: str):
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
