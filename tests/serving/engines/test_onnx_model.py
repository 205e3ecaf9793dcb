"""The onnxruntime stand-in completes and refuses configs by the rules that the C++ backend documents."""

import onnxruntime as ort
import pytest

from serving.engines import onnx_model
from serving.triton.parameters import usable_cpus
from serving.triton.types import ConfigError
from tests.support.onnx_models import save_identity


@pytest.fixture(scope="module")
def batching_model(tmp_path_factory):
    path = save_identity(tmp_path_factory.mktemp("m") / "model.onnx", {"x": ("FLOAT", ["n", 4])})
    session = ort.InferenceSession(str(path))
    return onnx_model.ports(session.get_inputs()), onnx_model.ports(session.get_outputs())


@pytest.fixture(scope="module")
def fixed_model(tmp_path_factory):
    path = save_identity(tmp_path_factory.mktemp("m") / "model.onnx", {"x": ("INT64", [2, "t"])})
    session = ort.InferenceSession(str(path))
    return onnx_model.ports(session.get_inputs()), onnx_model.ports(session.get_outputs())


def test_empty_config_is_completed(batching_model):
    assert onnx_model.complete_config({}, *batching_model) == {
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "x_out", "data_type": "TYPE_FP32", "dims": [4]}],
    }


def test_completion_keeps_what_the_config_sets(batching_model):
    completed = onnx_model.complete_config({"max_batch_size": 16, "sequence_batching": {}}, *batching_model)
    assert completed["max_batch_size"] == 16
    assert "dynamic_batching" not in completed


def test_fixed_first_dimension_does_not_batch(fixed_model):
    completed = onnx_model.complete_config({}, *fixed_model)
    assert completed["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [2, -1]}]
    assert "max_batch_size" not in completed
    with pytest.raises(ConfigError, match="variable first dimension"):
        onnx_model.complete_config({"max_batch_size": 2}, *fixed_model)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"name": "y", "data_type": "TYPE_FP32", "dims": [4]}, "no input 'y'; it has x"),
        ({"name": "x", "data_type": "TYPE_INT8", "dims": [4]}, "'x' is TYPE_FP32, not TYPE_INT8"),
        ({"name": "x", "data_type": "TYPE_FP32", "dims": [5]}, r"'x' has dims \[4\], not \[5\]"),
        ({"name": "x", "data_type": "TYPE_FP32", "dims": [4], "allow_ragged_batch": True}, "packed_onnx"),
    ],
)
def test_config_that_the_graph_cannot_serve_is_refused(batching_model, tensor, message):
    with pytest.raises(ConfigError, match=message):
        onnx_model.check_config({"max_batch_size": 8, "input": [tensor], "output": []}, *batching_model)


def test_parameters_set_session_options():
    def options(**parameters):
        return onnx_model.session_options({"parameters": {k: {"string_value": v} for k, v in parameters.items()}})

    assert options(intra_op_thread_count="3").intra_op_num_threads == 3
    assert options().intra_op_num_threads == usable_cpus()
    assert options(execution_mode="1").execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options(enable_mem_arena="0").enable_cpu_mem_arena
    assert not options(enable_mem_pattern="false").enable_mem_pattern
    with pytest.raises(ConfigError, match="intra_op_thread_count"):
        options(intra_op_thread_count="two")
    with pytest.raises(ConfigError, match="execution_mode"):
        options(execution_mode="2")


@pytest.mark.parametrize(
    ("level", "expected"), [(-1, "BASIC"), (0, "ALL"), (1, "EXTENDED"), (2, "DISABLE_ALL"), (7, "ALL")]
)
def test_graph_level_sets_optimization_level(level, expected):
    options = onnx_model.session_options({"optimization": {"graph": {"level": level}}})
    assert options.graph_optimization_level.name.endswith(expected)


def test_gpu_instance_without_cuda_is_refused():
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(ConfigError, match="install onnxruntime-gpu, or set KIND_CPU"):
        onnx_model.providers("GPU", 0)


def test_broken_file_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"ONNX Runtime cannot run .*model\.onnx"):
        onnx_model.open_session({}, tmp_path / "model.onnx", "CPU", 0)


def test_threads_are_divided_among_instances():
    config = {"instance_group": [{"count": 2}, {"count": 1}]}
    assert onnx_model.intra_op_threads(config) == max(1, usable_cpus() // 3)


@pytest.mark.parametrize("threads", ["intra_op", "inter_op"])
def test_idle_threads_do_not_spin(threads):
    options = onnx_model.session_options({"parameters": {"execution_mode": {"string_value": "1"}}})
    assert options.get_session_config_entry(f"session.{threads}.allow_spinning") == "0"
