"""Test how instances share cores, how batches are split for the cores, and how the frameworks load and call models."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.neuron import batches, frameworks
from serving.neuron.cores import Cores
from serving.neuron.frameworks import FRAMEWORKS, TorchNeuron, TorchNeuronX
from serving.neuron.libraries import ModelFailed, imported, loading
from serving.triton.types import BadRequest, ConfigError


def rows(count: int, first: int = 0) -> batches.Tensors:
    numbers = np.arange(first, first + count)
    return {"a": numbers[:, None], "b": numbers.astype(np.float32)}


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "parts", "expected"),
    [
        (8, 4, 2, [4, 4]),
        (12, 4, 2, [4, 4, 4]),  # more chunks than cores
        (7, 0, 3, [3, 2, 2]),
        (2, 0, 4, [1, 1]),  # no empty chunk
        (1, 0, 1, [1]),
        (9, 0, 1, [9]),
    ],
)
def test_split_and_joined_keep_rows_in_order(count, size, parts, expected):
    assert batches.chunk_sizes(count, size, parts) == expected
    pieces = batches.split(rows(count), expected)
    assert [len(piece["a"]) for piece in pieces] == expected
    joined = batches.joined(pieces)
    np.testing.assert_array_equal(joined["a"], rows(count)["a"])
    np.testing.assert_array_equal(joined["b"], rows(count)["b"])


@pytest.mark.parametrize(("count", "size", "expected"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (5, 0, 5), (3, 1, 3)])
def test_padding_repeats_the_last_row(count, size, expected):
    assert batches.padded_count(count, size) == expected
    padded = batches.padded(rows(count, first=10), expected)
    numbers = [*range(10, 10 + count), *[9 + count] * (expected - count)]
    assert padded["a"].ravel().tolist() == numbers
    assert padded["b"].tolist() == numbers
    assert padded["b"].dtype == np.float32


def test_row_count_must_be_the_same_for_all_inputs():
    assert batches.row_count(rows(3)) == 3
    with pytest.raises(BadRequest, match="same number of rows: 'a' has 3, 'c' has 2"):
        batches.row_count({"a": np.zeros((3, 1)), "c": np.zeros(2)})
    with pytest.raises(BadRequest, match="input 'a' has no rows"):
        batches.row_count(rows(0))
    with pytest.raises(BadRequest, match="input 'a' has no rows"):
        batches.row_count({"a": np.array(1)})


@pytest.mark.parametrize("array", [np.zeros((3, 2)), np.array(1.0)])
def test_output_with_other_rows_than_the_input_is_an_error(array):
    batches.check_rows({"a": np.zeros((4, 2))}, 4)
    with pytest.raises(RuntimeError, match=r"output 'a' has the shape .* for 4 rows of input"):
        batches.check_rows({"a": array}, 4)


def test_config_shape_has_the_batch_dimension_and_reshape():
    tensor = {"dims": ["-1", "3"]}
    assert batches.config_shape(tensor, batching=False) == [-1, 3]
    assert batches.config_shape(tensor, batching=True) == [-1, -1, 3]
    assert batches.config_shape(tensor | {"reshape": {"shape": ["3", "1"]}}, batching=False) == [3, 1]
    assert batches.config_shape({"dims": ["1"], "reshape": {"shape": []}}, batching=True) == [-1]


@pytest.mark.parametrize(("shape", "sizes"), [((2, 6, 4), [-1, 3]), ((2, 4), [-1, 3]), ((2,), [-1, 3]), ((), [4])])
def test_output_with_another_shape_than_the_config_is_an_error(shape, sizes):
    batches.check_shapes({"a": np.zeros((2, 3)), "b": np.array(1.0), "more": np.zeros(2)}, {"a": [-1, 3], "b": [1]})
    batches.check_shapes({}, {"a": sizes})  # a missing output is reported only if it is requested
    with pytest.raises(RuntimeError) as error:
        batches.check_shapes({"a": np.zeros(shape)}, {"a": sizes})
    assert str(error.value) == f"output 'a' has the shape {list(shape) or [1]}, and in config.pbtxt {sizes}"


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def tensors(*names: str, data_type: str = "TYPE_FP32") -> list[dict]:
    return [{"name": name, "data_type": data_type, "dims": ["-1"]} for name in names]


def test_names_are_sorted_by_their_indices():
    assert frameworks.in_order(tensors("b__1", "a__0", "my__own__2"), "input") == ["a__0", "b__1", "my__own__2"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("INPUT",), "input 'INPUT' must be named <name>__<index>"),
        (("INPUT__x",), "must be named <name>__<index>"),
        (("__0",), "must be named <name>__<index>"),
        (("a__0", "b__2"), "no input has the index 1"),
        (("a__1",), "no input has the index 0"),
        (("a__0", "b__0"), "'a__0' and 'b__0' have the same index"),
    ],
)
def test_names_without_a_clear_order_are_an_error(names, message):
    with pytest.raises(ConfigError, match=message):
        frameworks.in_order(tensors(*names), "input")


@pytest.mark.parametrize(
    ("answer", "outputs", "expected"),
    [
        (5, ["x__0"], [5]),
        ((5, 6, 7), ["x__0", "x__1"], [5, 6]),
        ([5, 6], ["x__0", "x__1"], [5, 6]),
        (OrderedDict(last=5, pooled=6), ["x__0", "x__1"], [5, 6]),
        (OrderedDict(last=5, pooled=6), ["pooled__0", "last__1"], [6, 5]),
        (OrderedDict(last=5, pooled=6), ["pooled__0"], [6]),
    ],
)
def test_outputs_are_named_by_key_or_position(answer, outputs, expected):
    assert frameworks.named(answer, outputs) == dict(zip(outputs, expected, strict=True))


@pytest.mark.parametrize("answer", [5, (5,), {"a": 5}])
def test_fewer_outputs_than_in_config_is_an_error(answer):
    with pytest.raises(RuntimeError, match=r"the model has 1 output\(s\), config.pbtxt 2: x__0, x__1"):
        frameworks.named(answer, ["x__0", "x__1"])


def library(monkeypatch, config: dict) -> TorchNeuronX:
    monkeypatch.setattr(frameworks, "imported", lambda name: torch if name == "torch" else SimpleNamespace())
    return TorchNeuronX(config, Cores(0, 2, 1))


def test_types_of_tensors_before_and_after_a_run(monkeypatch):
    pytorch = library(monkeypatch, {"input": tensors("x__0", "y__1"), "output": tensors("z__0")})
    assert pytorch.copies == 2
    answer = pytorch.call(lambda x, y: (x - y).bfloat16(), {"y__1": np.ones(2), "x__0": np.full(2, 3.0)})
    assert answer["z__0"].tolist() == [2, 2]
    assert answer["z__0"].dtype == np.float32
    pytorch.bfloat16 = {"x__0"}
    assert pytorch.call(lambda x, y: x.dtype == torch.bfloat16 and x, {"y__1": np.ones(1), "x__0": np.ones(2)})
    with pytest.raises(RuntimeError, match="output for 'z__0' is a str, not a tensor"):
        pytorch.call(lambda x, y: ("text",), {"y__1": np.ones(2), "x__0": np.ones(2)})


def test_failed_run_reports_the_last_line(monkeypatch):
    pytorch = library(monkeypatch, {"input": tensors("x__0"), "output": tensors("z__0")})
    with pytest.raises(ModelFailed, match=r"^RuntimeError: of the wrong size$"):
        pytorch.call(fail, {"x__0": np.ones(2)})


def fail(_):
    raise RuntimeError("The following operation failed:\nTraceback\n  File x\nRuntimeError: of the wrong size\n")


@pytest.mark.parametrize(
    ("data_type", "message"), [("TYPE_STRING", "PyTorch .* has no object"), ("TYPE_X", "TYPE_X is not a type")]
)
def test_type_that_pytorch_lacks_is_an_error(monkeypatch, data_type, message):
    with pytest.raises(ConfigError, match=f"'x__0': {message}"):
        library(monkeypatch, {"input": tensors("x__0", data_type=data_type), "output": tensors("z__0")})


# --- missing libraries and files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch-neuron", "package torch_neuron is not installed where Triton runs: the image of NEURON_CHIP=inf1 has"),
        ("torch-neuronx", "package torch_neuronx is not installed .* the image of NEURON_CHIP=inf2 and trn1 has it"),
        ("tensorflow", "no image of ours has it, for AWS supports none since 2.29: install it into one of your own"),
    ],
)
def test_missing_library_names_the_image_that_has_it(monkeypatch, name, message):
    for module in ("torch_neuron", "torch_neuronx", "tensorflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        FRAMEWORKS[name]({"input": tensors("x__0"), "output": tensors("z__0")}, Cores(0, 1, 1))


def test_unrelated_folder_with_the_name_of_a_library_is_not_the_library(monkeypatch, tmp_path):
    (tmp_path / "tensorflow/models").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.delitem(sys.modules, "tensorflow")
    with pytest.raises(ConfigError, match="the Python package tensorflow is not installed"):
        imported("tensorflow")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import no_such_module", "^needy needs the Python package no_such_module, which is not installed"),
        ("import needy.more", r"needy has no module needy\.more; is it of another release\?"),
        ("raise ImportError('libnrt.so.1: no such file')", "^needy could not be imported: libnrt.so.1: no such file$"),
        ("raise OSError('libnrt.so.1: no such file')", "^needy could not be imported: libnrt.so.1: no such file$"),
        ("raise RuntimeError('first\\nNRT: no device')", "^needy could not be imported: NRT: no device$"),
    ],
)
def test_failed_import_is_one_line(monkeypatch, tmp_path, line, message):
    (tmp_path / "needy").mkdir()
    (tmp_path / "needy/__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        imported("needy")


@pytest.mark.parametrize(("raised", "message"), [
    (ValueError("not a ZIP archive"), "not a ZIP archive"),
    (RuntimeError("no file\nException raised from valid at x.cc:1:\nframe #0: c10::Error\n"), "no file"),
    (RuntimeError("NRT_FAILURE"), "NRT_FAILURE; is another model or process on them?"),
    (RuntimeError("Neuron core(s) not available\nRequested:1"), "Requested:1; is another model or process on them?"),
    (KeyError("weights"), "KeyError: 'weights'"),
    (AssertionError(), "AssertionError"),
])  # fmt: skip
def test_failed_load_is_one_line_with_the_cores(raised, message):
    with pytest.raises(ConfigError) as error, loading("/models/model.pt", Cores(2, 2, 1)):
        raise raised
    assert str(error.value) == f"/models/model.pt could not be loaded on NeuronCores 2 to 3: {message}"


def test_config_error_during_loading_is_unchanged():
    with pytest.raises(ConfigError, match=r"^there is no such signature$"), loading("model", Cores(0, 1, 1)):
        raise ConfigError("there is no such signature")


@pytest.mark.parametrize("fault", [None, RuntimeError("NRT: NeuronCore(s) not available")])
def test_inf1_model_is_wrapped_in_data_parallel(monkeypatch, tmp_path, fault):
    device_lists = []

    def data_parallel(model, device_ids):
        if fault:
            raise fault
        device_lists.append(device_ids)
        return SimpleNamespace(model=model)

    config = {"input": tensors("x__0"), "output": tensors("z__0")}
    config["parameters"] = {"COMPILED_BATCH_SIZE": {"string_value": "4"}}
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(DataParallel=data_parallel), raising=False)
    monkeypatch.setattr(frameworks, "imported", lambda name: torch if name == "torch" else SimpleNamespace())
    torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.ones(1)), tmp_path / "model.pt")
    framework = TorchNeuron(config, Cores(4, 2, 3))
    if fault:
        with pytest.raises(
            ConfigError, match=r"model\.pt could not be loaded on NeuronCores 4 to 5: NRT: .* on them\?"
        ):
            framework.load(tmp_path / "model.pt")
    else:
        model = framework.load(tmp_path / "model.pt")
        assert (device_lists, model.num_workers, model.split_size) == ([[0, 1]], 6, 4)


def test_missing_compiled_model_is_an_error(monkeypatch, tmp_path):
    pytorch = library(monkeypatch, {"input": tensors("x__0"), "output": tensors("z__0")})
    with pytest.raises(ConfigError, match=r"model\.pt, the compiled model, is missing"):
        pytorch.load(tmp_path / "model.pt")


# --- the cores of an instance ----------------------------------------------------------------------------------------


def core_config(first: int, last: int, instances: int = 1, threads: int = 1) -> dict:
    parameters = {"NEURON_CORE_START_INDEX": first, "NEURON_CORE_END_INDEX": last, "NUM_THREADS_PER_CORE": threads}
    return {
        "instance_group": [{"count": instances}],
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
    }


def instance(name: str) -> dict[str, str]:
    return {"model_instance_name": name}


@pytest.mark.parametrize(("instances", "shares"), [(1, ["4-7"]), (2, ["4-5", "6-7"]), (4, ["4", "5", "6", "7"])])
def test_instances_share_the_cores_equally(monkeypatch, instances, shares):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    for index, share in enumerate(shares):
        Cores.of_instance(core_config(4, 7, instances), instance(f"my_model_0_{index}")).claim()
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == share


def test_threads_are_per_core():
    cores = Cores.of_instance(core_config(0, 3, instances=2, threads=3), instance("m_0_1"))
    assert (cores.first, cores.last, cores.count, cores.threads_per_core, cores.threads) == (2, 3, 2, 3, 6)


def test_default_is_one_core():
    assert Cores.of_instance({"instance_group": [{"count": 1}]}, instance("my_model_0_0")) == Cores(0, 1, 1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (core_config(3, 2), "3 to NEURON_CORE_END_INDEX 2 is no range"),
        (core_config(-1, 2), "is no range"),
        (core_config(0, 3, threads=0), "NUM_THREADS_PER_CORE must be at least 1, not 0"),
        (core_config(0, 3, instances=3), "4 NeuronCores .* cannot be shared out equally among 3"),
        (core_config(0, 0, instances=2), "1 NeuronCores .* cannot be shared out equally among 2"),
        (core_config(0, 1) | {"instance_group": [{"count": 1}, {"count": 1}]}, "one instance group, not 2"),
        (core_config(0, "x"), "'NEURON_CORE_END_INDEX' must be a whole number, not 'x'"),
    ],
)
def test_invalid_cores_are_refused(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        Cores.of_instance(wrong, instance("m_0_0"))


def test_instance_name_without_a_number_is_refused():
    with pytest.raises(ConfigError, match="KIND_MODEL"):
        Cores.of_instance(core_config(0, 1, instances=2), instance("m_0_0_gpu"))
