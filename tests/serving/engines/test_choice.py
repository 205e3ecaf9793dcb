"""The engine of an ONNX model: the fastest one that agrees with ONNX Runtime, remembered until something changes."""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from serving.engines import choice, graphs, measurements, onnx_model
from serving.engines.graphs import OpenVinoGraph
from serving.engines.packing import RunCost
from serving.triton import parameters as settings
from serving.triton.types import BadRequest, ConfigError
from tests.support.checkpoints import encoders
from tests.support.onnx_models import save, save_identity, value
from tests.support.python_backend import InferenceRequest, instance_args, parameters
from tests.support.served import assemble

needs_bf16 = pytest.mark.skipif(not settings.has_bf16(), reason="this CPU has no bf16 instructions")
ROWS, SIZE, POSITIONS = 50, 16, 100
RANDOM = np.random.default_rng(0)


def constant(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RANDOM.standard_normal(shape, np.float32), name)


def save_matrices(path: Path) -> Path:
    """Save y = x A - x B. The two are so similar that rounding to bf16 leaves nothing of the difference."""
    a = RANDOM.standard_normal((SIZE, 8), np.float32)
    b = a + 1e-3 * RANDOM.standard_normal((SIZE, 8), np.float32)
    return save(
        path,
        [
            helper.make_node("MatMul", ["x", "a"], ["xa"]),
            helper.make_node("MatMul", ["x", "b"], ["xb"]),
            helper.make_node("Sub", ["xa", "xb"], ["y"]),
        ],
        [value("x", "FLOAT", ["n", SIZE])],
        [value("y", "FLOAT", ["n", 8])],
        [numpy_helper.from_array(a, "a"), numpy_helper.from_array(b, "b")],
    )


def save_encoder(path: Path) -> Path:
    """Save a text encoder that adds a vector of each token and one of its position, counted as RoBERTa does."""
    axis = numpy_helper.from_array(np.array(1), "axis")
    return save(
        path,
        [
            helper.make_node("CumSum", ["attention_mask", "axis"], ["position"]),
            helper.make_node("Gather", ["words", "input_ids"], ["word"]),
            helper.make_node("Gather", ["positions", "position"], ["place"]),
            helper.make_node("Add", ["word", "place"], ["per_token"]),
            helper.make_node("ReduceMean", ["per_token"], ["pooled"], axes=[1], keepdims=0),
            helper.make_node("Gather", ["per_token", "first"], ["begin"], axis=1),
        ],
        [value("input_ids", "INT64", ["n", "t"]), value("attention_mask", "INT64", ["n", "t"])],
        [
            value("per_token", "FLOAT", ["n", "t", SIZE]),
            value("pooled", "FLOAT", ["n", SIZE]),
            value("begin", "FLOAT", ["n", SIZE]),
        ],
        [
            axis,
            numpy_helper.from_array(np.array(0), "first"),
            constant("words", ROWS, SIZE),
            constant("positions", POSITIONS, SIZE),
        ],
    )


def save_distances(path: Path) -> Path:
    """Save a graph with an operator that only ONNX Runtime has."""
    graph = helper.make_graph(
        [helper.make_node("CDist", ["x", "x"], ["y"], domain="com.microsoft")],
        "test",
        [value("x", "FLOAT", ["n", SIZE])],
        [value("y", "FLOAT", ["n", "n"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def tensors(**dims: list[int]) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": "TYPE_FP32", "dims": dims} for name, dims in dims.items()]


IDS = [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in ("input_ids", "attention_mask")]
POOLED = {"max_batch_size": 8, "input": IDS, "output": tensors(pooled=[SIZE])}
MATRICES = {"max_batch_size": 8, "input": tensors(x=[SIZE]), "output": tensors(y=[8])}
DISTANCES = {"max_batch_size": 0, "input": tensors(x=[-1, SIZE]), "output": tensors(y=[-1, -1])}


class Loader:
    """Loads models as a backend does, and keeps what it logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []

    def load(self, config: dict[str, Any], ragged: bool = False, **values: str) -> onnx_model.OnnxModel:
        args = instance_args(self.folder, name="model")
        return onnx_model.OnnxModel.load(config | parameters(**values), args, self.messages.append, ragged)

    def engine(self, config: dict[str, Any], **values: str) -> str:
        model = self.load(config, **values)
        return f"{model.engine.name} {model.precision}"


@pytest.fixture
def loader(tmp_path, monkeypatch) -> Loader:
    monkeypatch.delenv("TRITON_ENGINE", raising=False)
    monkeypatch.delenv("TRITON_ENGINE_CACHE", raising=False)
    save_encoder(tmp_path / "1/model.onnx")
    return Loader(tmp_path)


@pytest.fixture
def seconds(monkeypatch) -> dict[str, float]:
    """Return the seconds that each engine seems to take."""
    times = {"onnxruntime": 1.0, "openvino-f32": 1.0, "openvino-bf16": 1.0}
    monkeypatch.setattr(choice, "fastest_runs", lambda _, names, __: {name: times[name] for name in names})
    return times


@pytest.fixture
def measured_models(monkeypatch, seconds) -> list[str]:
    """Return the names of the models that were measured so far."""
    measured: list[str] = []
    fastest_runs = choice.fastest_runs

    def count(subject, engines, feeds):
        measured.append(subject.name)
        return fastest_runs(subject, engines, feeds)

    monkeypatch.setattr(choice, "fastest_runs", count)
    return measured


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_ENGINE_CACHE", str(tmp_path / "engines"))
    return tmp_path / "engines"


@pytest.mark.parametrize(
    ("openvino", "chosen"), [(0.5, "openvino f32"), (0.95, "onnxruntime f32"), (2.0, "onnxruntime f32")]
)
def test_auto_keeps_onnxruntime_unless_another_is_clearly_faster(loader, seconds, openvino, chosen):
    seconds["openvino-f32"] = openvino
    assert loader.engine(POOLED) == chosen
    (message,) = loader.messages
    assert message.startswith(f"model_0: runs on {chosen.replace(' ', ' in ')} (")
    assert "onnxruntime 1000.0 ms; openvino-f32 " in message


@needs_bf16
def test_fastest_engine_is_refused_if_its_answers_differ(loader, seconds, tmp_path):
    save_matrices(tmp_path / "1/model.onnx")
    seconds |= {"openvino-f32": 0.5, "openvino-bf16": 0.1}
    assert loader.engine(MATRICES) == "openvino f32"
    assert "openvino-bf16 answers differently, cosine " in loader.messages[0]
    assert loader.engine(MATRICES, engine="openvino") == "openvino f32"
    assert loader.engine(MATRICES, engine="openvino-bf16") == "openvino bf16"  # not questioned


def test_cpu_without_bf16_does_not_try_it(loader, seconds, monkeypatch):
    monkeypatch.setattr(settings, "has_bf16", lambda: False)
    seconds |= {"openvino-f32": 0.5, "openvino-bf16": 0.1}
    assert loader.engine(POOLED) == "openvino f32"
    assert "bf16" not in loader.messages[0]
    with pytest.raises(ConfigError, match="requires a CPU with amx_bf16 or avx512_bf16, which this one lacks"):
        loader.load(POOLED, engine="openvino-bf16")


def test_fastest_of_the_measured_engines_is_chosen(loader):
    engine = loader.engine(POOLED)
    times = {name: float(ms) for name, ms in re.findall(r"(onnxruntime|openvino-\w+) ([\d.]+) ms", loader.messages[0])}
    assert {"onnxruntime", "openvino-f32"} <= times.keys()
    assert min(times.values()) >= 0
    allowed = 0.1  # the message rounds to tenths
    if engine == "onnxruntime f32":
        assert min(times.values()) + allowed >= choice.WORTHWHILE * times["onnxruntime"]
    else:
        chosen = times[engine.replace(" ", "-")]
        assert chosen <= min(times.values()) + allowed
        assert chosen <= choice.WORTHWHILE * times["onnxruntime"] + allowed


def test_decision_is_remembered(loader, seconds, measured_models, cache):
    seconds["openvino-f32"] = 0.5
    first = loader.engine(POOLED)
    seconds["openvino-f32"] = 2.0
    assert loader.engine(POOLED) == first == "openvino f32"
    assert measured_models == ["model-1"]
    assert "(measured before: onnxruntime 1000.0 ms; openvino-f32 500.0 ms" in loader.messages[1]


@pytest.mark.parametrize("change", ["model", "weights", "cpu", "version", "engine", "damage", "unknown engine"])
def test_decision_is_measured_again_after_a_change(loader, measured_models, cache, monkeypatch, tmp_path, change):
    loader.load(POOLED)
    if change == "model":
        save_encoder(tmp_path / "1/model.onnx")  # with other random numbers
    elif change == "weights":
        (tmp_path / "1/model.onnx.data").write_bytes(b"1")
    elif change == "cpu":
        monkeypatch.setattr(measurements, "cpu", lambda: {"model name": "another"})
    elif change == "version":
        monkeypatch.setattr(measurements.importlib.metadata, "version", lambda _: "1.0")
    elif change == "engine":
        monkeypatch.setenv("TRITON_ENGINE", "openvino")
        monkeypatch.setattr(settings, "has_bf16", lambda: True)
    elif change == "damage":
        (file,) = cache.iterdir()
        file.write_text(file.read_text()[:-9])
    else:
        (file,) = cache.iterdir()
        file.write_text(json.dumps(json.loads(file.read_text()) | {"engine": "abacus"}))
    loader.load(POOLED)
    assert measured_models == ["model-1"] * 2
    loader.load(POOLED)
    assert measured_models == ["model-1"] * 2


def test_concurrent_instances_measure_once(loader, measured_models, cache):
    barrier = threading.Barrier(4)

    def load(_: int) -> str:
        barrier.wait()
        return loader.engine(POOLED)

    with ThreadPoolExecutor(4) as instances:
        assert len(set(instances.map(load, range(4)))) == 1
    assert measured_models == ["model-1"]


@pytest.mark.parametrize("folder", ["", "/dev/null/engines", "/proc"])
def test_missing_or_unwritable_cache_measures_at_each_load(loader, measured_models, monkeypatch, folder):
    monkeypatch.setenv("TRITON_ENGINE_CACHE", folder)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    for _ in range(2):
        loader.load(POOLED)
    assert measured_models == ["model-1"] * 2


def test_model_that_openvino_cannot_read_runs_on_onnxruntime(loader, tmp_path):
    save_distances(tmp_path / "1/model.onnx")
    assert loader.engine(DISTANCES) == "onnxruntime f32"
    assert "OpenVINO cannot read the model" in loader.messages[0]
    assert "\n" not in loader.messages[0]
    for engine in ("openvino", "openvino-f32"):
        with pytest.raises(ConfigError, match=r"OpenVINO cannot read the model: .*CDist.*: choose another engine for"):
            loader.load(DISTANCES, engine=engine)


def test_types_that_openvino_computes_in_32_bits_run_on_onnxruntime(loader, tmp_path):
    save_identity(tmp_path / "1/model.onnx", {"x": ("INT64", ["n", 2])})
    config = {
        side: [{"name": name, "data_type": "TYPE_INT64", "dims": [2]}]
        for side, name in (("input", "x"), ("output", "x_out"))
    }
    assert loader.engine({"max_batch_size": 4} | config) == "onnxruntime f32"
    assert "does not run models with 'x_out' of type int64" in loader.messages[0]


def test_missing_openvino_is_an_error_only_if_it_is_required(loader, monkeypatch):
    monkeypatch.setattr(graphs.importlib.util, "find_spec", lambda _: None)
    assert loader.engine(POOLED) == "onnxruntime f32"
    assert loader.messages == ["model_0: runs on onnxruntime in f32 (the package openvino is not installed)"]
    with pytest.raises(ConfigError, match="the package openvino is not installed: choose another engine"):
        loader.load(POOLED, engine="openvino")


def test_model_that_refuses_all_samples_runs_on_onnxruntime(loader, monkeypatch):
    monkeypatch.setattr(onnx_model, "batch_samples", lambda *_: iter([[{}]]))
    assert loader.engine(POOLED) == "onnxruntime f32"
    assert "not measured, because the model refuses the sample inputs" in loader.messages[0]


def accelerator(name: str = "openvino", **parameters: str) -> dict[str, Any]:
    entry = {"name": name, "parameters": parameters}
    return {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [entry]}}}


F32 = "openvino-f32"


@pytest.mark.parametrize(
    ("setting", "config", "values", "choices"),
    [
        ("", {}, {}, ("onnxruntime", F32, "openvino-bf16")),
        ("onnxruntime", {}, {}, ("onnxruntime",)),
        ("torch-flat", {}, {}, ("onnxruntime", F32, "openvino-bf16")),
        (F32, {}, {}, (F32,)),
        ("onnxruntime", accelerator(), {}, (F32, "openvino-bf16")),
        ("onnxruntime", accelerator(precision="FP32"), {}, (F32,)),
        ("onnxruntime", accelerator(precision="bf16"), {}, ("openvino-bf16",)),
        (F32, {}, {"engine": "onnxruntime"}, ("onnxruntime",)),
        ("auto", {}, {"precision": "f32"}, ("onnxruntime", F32)),
        ("openvino-bf16", {}, {"precision": "f32"}, (F32,)),
    ],
)
def test_config_overrides_the_servers_setting(monkeypatch, setting, config, values, choices):
    monkeypatch.setattr(settings, "has_bf16", lambda: True)
    monkeypatch.setenv("TRITON_ENGINE", setting)
    assert choice.engine_choices(config | parameters(**values)) == choices


@pytest.mark.parametrize(
    ("setting", "config", "message"),
    [
        ("tensorrt", {}, "TRITON_ENGINE must be one of auto, openvino, onnxruntime, .*, not 'tensorrt'"),
        ("", parameters(engine="abacus"), "parameter 'engine' must be one of .* 'abacus'"),
        ("", accelerator("tensorrt"), "cpu_execution_accelerator must be 'openvino', not 'tensorrt'"),
        ("", accelerator(precision="FP16"), "parameter 'precision' of openvino must be f32 or bf16, not 'f16'"),
    ],
)
def test_unknown_engine_is_refused(monkeypatch, setting, config, message):
    monkeypatch.setenv("TRITON_ENGINE", setting)
    with pytest.raises(ConfigError, match=message):
        choice.engine_choices(config)


@pytest.mark.parametrize("engine", ["onnxruntime", F32])
def test_index_outside_its_table_is_refused(loader, engine):
    """OpenVINO itself would answer with zeros."""
    model = loader.load(POOLED, engine=engine)
    ids, mask = RANDOM.integers(-ROWS, ROWS, (2, 99)), np.ones((2, 99), np.int64)
    reference = loader.load(POOLED, engine="onnxruntime").engine.run(
        ["pooled"], {"input_ids": ids, "attention_mask": mask}
    )
    answer = model.engine.run(["pooled"], {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(answer[0], reference[0], atol=1e-5)
    refusals = BadRequest if engine == F32 else Exception
    for wrong in (ROWS, -ROWS - 1, 2**32 + 1):
        ids[1, 5] = wrong
        with pytest.raises(refusals):
            model.engine.run(["pooled"], {"input_ids": ids, "attention_mask": mask})
    longer = np.ones((1, 101), np.int64)
    with pytest.raises(refusals):
        model.engine.run(["pooled"], {"input_ids": longer, "attention_mask": longer})


def test_threads_share_an_engine(loader):
    model = loader.load(POOLED, ragged=True, engine=F32)
    feeds = [
        {"input_ids": RANDOM.integers(0, ROWS, (rows, 9)), "attention_mask": np.ones((rows, 9), np.int64)}
        for rows in range(1, 65)
    ]
    alone = [model.engine.run(["pooled"], feed)[0] for feed in feeds]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda feed: model.engine.run(["pooled"], feed)[0], feeds))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_lone_run_uses_all_threads(loader):
    model = loader.load(POOLED, ragged=True, engine=F32, intra_op_thread_count="2")
    lone = model.engine.alone()
    for engine, streams in ((model.engine, 2), (lone, 1)):
        names = ("NUM_STREAMS", "INFERENCE_NUM_THREADS")
        assert [engine.compiled.get_property(name) for name in names] == [streams, 2]
    assert lone.alone() is lone
    together = loader.load(POOLED, ragged=True, engine="onnxruntime", intra_op_thread_count="2").engine
    sessions = [engine.session.get_session_options() for engine in (together, together.alone())]
    assert [options.intra_op_num_threads for options in sessions] == [1, 2]
    feed = {name: np.full((1, 5), 3) for name in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(lone.run(["pooled"], feed)[0], model.engine.run(["pooled"], feed)[0], atol=1e-6)


def test_quantized_graph_is_int8(loader, tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    path = save_matrices(tmp_path / "matrices.onnx")
    quantize_dynamic(path, tmp_path / "1/model.onnx")
    assert loader.engine(MATRICES, engine="onnxruntime") == "onnxruntime int8"
    assert loader.load(MATRICES, engine="onnxruntime").labels == {"engine": "onnxruntime", "precision": "int8"}


@pytest.fixture
def packed(pb_utils, tmp_path):
    """Return a function that starts packed_onnx with the encoder of the tests, whose vectors of tokens differ by place.

    The instances end with the test, because they all report the same metrics.
    """
    module = importlib.import_module("serving.backends.packed_onnx")
    started = []

    def start(engine: str, threads: str = "2") -> Any:
        config = POOLED | {
            "output": [*tensors(per_token=[-1, SIZE]), *tensors(begin=[SIZE])],
            **parameters(engine=engine, intra_op_thread_count=threads),
        }
        started.append(module.TritonPythonModel())
        started[-1].initialize(instance_args(tmp_path, config, "model"))
        return started[-1]

    yield start
    for backend in started:
        backend.finalize()


@pytest.fixture
def measured_costs(monkeypatch) -> list[int]:
    """Return the maximum number of rows of each measurement of the cost of a run so far."""
    measured: list[int] = []
    measure = RunCost.measure

    def count(seconds_of, max_rows):
        measured.append(max_rows)
        return measure(seconds_of, max_rows)

    monkeypatch.setattr(RunCost, "measure", count)
    return measured


def test_cost_of_a_run_is_remembered(packed, tmp_path, cache, measured_costs):
    save_encoder(tmp_path / "1/model.onnx")
    costs = {packed("onnxruntime").plan.cost for _ in range(2)}
    assert len(measured_costs) == len(costs) == 1


@pytest.mark.parametrize("content", ["", "7", "[7, {}]", "[" * 100_000])
def test_unreadable_measurement_is_replaced(tmp_path, monkeypatch, content):
    monkeypatch.setenv("TRITON_ENGINE_CACHE", str(tmp_path))

    def recalled(seconds: int) -> int:
        measured = measurements.recall_or_measure("m", lambda: {"n": 1}, lambda: {"s": seconds}, lambda kept: kept["s"])
        return measured["s"]

    assert recalled(7) == 7
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert [recalled(8), recalled(9)] == [8, 8]


@pytest.mark.parametrize("change", ["model", "cpu", "engine", "threads", "damage", "no folder"])
def test_cost_of_a_run_is_measured_again_after_a_change(packed, tmp_path, cache, measured_costs, monkeypatch, change):
    save_encoder(tmp_path / "1/model.onnx")
    packed("onnxruntime")
    if change == "model":
        save_encoder(tmp_path / "1/model.onnx")  # with other random numbers
    elif change == "cpu":
        monkeypatch.setattr(measurements, "cpu", lambda: {"model name": "another"})
    elif change == "damage":
        (file,) = cache.glob("model-1-cost-*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"per_token": None}))
    elif change == "no folder":
        monkeypatch.delenv("TRITON_ENGINE_CACHE")
    packed(F32 if change == "engine" else "onnxruntime", "3" if change == "threads" else "2")
    assert len(measured_costs) == 2
    # A comparison switches between numbers of threads again and again.
    packed("onnxruntime")
    assert len(measured_costs) == (3 if change == "no folder" else 2)


def test_packed_runs_of_openvino_have_few_lengths(packed, pb_utils, tmp_path):
    """Their answers equal those of ONNX Runtime, also for texts of the maximum length."""
    save_encoder(tmp_path / "1/model.onnx")
    longest = POSITIONS - 1  # positions count from 1
    lengths = [1, 3, 5, 9, 9, 10, 14, 33, longest - 2, longest]
    ids = [RANDOM.integers(0, ROWS, (1, length)) for length in lengths]
    answers = {}
    for engine in ("onnxruntime", F32):
        backend = packed(engine)
        run, shapes = backend.encoder.run, []

        def record(outputs, feed, run=run, shapes=shapes):
            shapes.append(feed["input_ids"].shape)
            return run(outputs, feed)

        backend.plan.encoder = replace(backend.encoder, run=record, run_alone=record)
        backend.plan.cost = RunCost(per_run=1e-3, per_token=1e-5)
        backend.long_requests.seconds = np.inf  # no text leaves its batch
        requests = [
            InferenceRequest(["per_token", "begin"], input_ids=row, attention_mask=np.ones_like(row)) for row in ids
        ]
        responses = backend.execute(requests) + backend.execute(requests[:1])
        assert [response.error for response in responses] == [None] * (len(ids) + 1)
        answers[engine] = [response.outputs for response in responses]
        backend.finalize()
        assert pb_utils.metrics["transformers_engine"] == 0
        if engine == F32:
            assert shapes[-1] == (1, 1)
            assert all(rows == 1 or length % 8 == 0 or length > 64 for rows, length in shapes)
    for a, b in zip(*answers.values(), strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=1e-5)


def test_lone_run_stays_on_its_thread(packed, tmp_path):
    save_encoder(tmp_path / "1/model.onnx")
    backend = packed("onnxruntime")
    threads = []
    run = backend.encoder.run_alone
    backend.plan.encoder = replace(
        backend.encoder, run_alone=lambda *arguments: (threads.append(threading.current_thread()), run(*arguments))[1]
    )
    row = np.ones((1, 4), np.int64)
    backend.execute([InferenceRequest(["begin"], input_ids=row, attention_mask=row)])
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize(
    ("expected", "actual", "agrees"),
    [
        ([[1.0, 2.0]], [[1.001, 2.0]], True),
        ([[1.0, 2.0], [1.0, 0.0]], [[1.0, 2.0], [0.0, 1.0]], False),
        ([[100.0], [1.0]], [[100.0], [0.0]], True),  # single numbers: small against the largest
        ([[1.0], [2.0]], [[1.1], [2.0]], False),
        ([[0.0, 0.0]], [[0.0, 0.0]], True),
        ([[1.0, 2.0]], [[np.nan, 2.0]], False),
        ([[1.0, 2.0]], [[1.0]], False),
        (np.zeros((0, 3)), np.zeros((0, 3)), True),
    ],
)
def test_answers_agree(expected, actual, agrees):
    candidate = choice.Candidate.compared([[np.array(expected)]], [[np.array(actual)]])
    assert candidate.agrees == agrees


# --- the graph for OpenVINO ------------------------------------------------------------------------------------------


def test_matmul_transposes_the_keys_of_attention(tmp_path):
    path = save(
        tmp_path / "model.onnx",
        [
            helper.make_node("Transpose", ["query"], ["q"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["key"], ["k"], perm=[0, 2, 3, 1]),
            helper.make_node("MatMul", ["q", "k"], ["scores"]),
        ],
        [value("query", "FLOAT", ["rows", "tokens", 2, 8]), value("key", "FLOAT", ["rows", "tokens", 2, 8])],
        [value("scores", "FLOAT", ["rows", 2, "tokens", "tokens"])],
    )
    graph = OpenVinoGraph(path, ["scores"])
    steps = [node for node in graph.graph.get_ordered_ops() if node.get_type_name() in ("Transpose", "MatMul")]
    orders = [node.input_value(1).get_node().data.tolist() for node in steps if node.get_type_name() == "Transpose"]
    assert orders == [[0, 2, 1, 3]] * 2
    query, key = (np.random.default_rng(i).normal(size=(3, 5, 2, 8)).astype(np.float32) for i in range(2))
    (scores,) = graph.compile("f32", 1, 1).run(["scores"], {"query": query, "key": key})
    np.testing.assert_allclose(scores, np.einsum("rqhd,rkhd->rhqk", query, key), rtol=1e-5)


@pytest.mark.usefixtures("stored")
def test_exported_attention_is_recognised(tmp_path):
    assemble(encoders.save_bert(tmp_path / "weights", "ForSequenceClassification"), tmp_path)
    graph = OpenVinoGraph(tmp_path / "m_encoder/1/model.onnx", ["logits"]).graph
    softmaxes = [node for node in graph.get_ordered_ops() if node.get_type_name() == "Softmax"]
    products = [node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"]
    of_heads = [node for node in products if node.get_output_partial_shape(0).rank.get_length() == 4]
    assert sum(node.get_attributes()["transpose_b"] for node in of_heads) == len(softmaxes) > 0
