"""Test gen_triton_model.py: the folders of the published command lines, and the message of each wrong argument."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from scripts.neuron import gen_triton_model
from triton_transformers.settings import ROOT

SCRIPT = ROOT / "scripts/neuron/gen_triton_model.py"
GOLDEN = ROOT / "tests/golden/neuron"
BERT_TENSORS = (
    "--triton_input INPUT__0,INT64,4x384 INPUT__1,INT64,4x384 INPUT__2,INT64,4x384 "
    "--triton_output OUTPUT__0,INT64,4x384 OUTPUT__1,INT64,4x384 "
)
# As published. The tests replace /home/ubuntu.
PUBLISHED = {
    "bert_large_inf1": f"--model_type pytorch {BERT_TENSORS}"
    "--compiled_model /home/ubuntu/bert_large_mlperf_neuron_hack_bs1_dynamic.pt --neuron_core_range 0:3 "
    "--triton_model_dir bert-large-mlperf-bs1x4",
    "bert_large_inf2": f"--inf2 --model_type pytorch {BERT_TENSORS}"
    "--compiled_model bert_large_mlperf_neuron_hack_bs1_dynamic.pt --neuron_core_range 0:3 "
    "--triton_model_dir bert-large-mlperf-bs1x4",
    "resnet50_tensorflow": "--model_type tensorflow --compiled_model "
    "/home/ubuntu/inferentia-poc-2.0/scripts-rn50-tf-native/resnet50_mlperf_opt_fp16_compiled_b5_nc1/1 "
    "--neuron_core_range 0:3  --triton_model_dir rn50-1neuroncores-bs1x1",
}
OURS = {
    "dynamic_batching": "--inf2 --model_type pytorch --compiled_model /home/ubuntu/bert.pt --neuron_core_range 4:7 "
    "--triton_input tokens__0,INT64,384 --triton_input mask__1,INT64,384 --triton_output out__0,FP32,-1x2 "
    "--max_batch_size 16 --enable_dynamic_batching --preferred_batch_size 4 8 --preferred_batch_size 16 "
    "--max_queue_delay_microseconds 100 --compiled_batch_size 4 --threads_per_core 2 "
    "--triton_model_instance_count 2 --triton_model_dir bert --model_version 3",
    "separate_requests": "--model_type pytorch --compiled_model /home/ubuntu/bert.pt --neuron_core_range 0:0 "
    "--triton_input INPUT__0,INT64,384 --triton_output OUTPUT__0,FP32,2 --max_batch_size 8 --enable_dynamic_batching "
    "--disable_batch_requests_to_neuron --triton_model_dir bert",
    "tensorflow_tensors": "--model_type tensorflow --compiled_model /home/ubuntu/resnet50 --neuron_core_range 0:1 "
    "--triton_input image,BYTES,1 --triton_output classes,INT64,1 --max_batch_size 4 --tag_set serve,gpu "
    "--signature_def_key predict --triton_model_dir resnet50",
    "language_model": "--inf2 --model_type transformers --compiled_model opt-125m-tp12 --neuron_core_range 0:11 "
    "--model_class transformers_neuronx.opt.model.OPTForSampling --tp_degree 12 --batch_size 4 --n_positions 2048 "
    "--amp bf16 --unroll none --triton_model_dir opt",
    "language_model_defaults": "--inf2 --model_type transformers --compiled_model llama --neuron_core_range 0:1 "
    "--model_class neuronx_distributed_inference.models.llama.modeling_llama.NeuronLlamaForCausalLM "
    "--triton_model_dir llama8b",
}
FINE = (
    "--model_type pytorch --compiled_model {home}/bert.pt --neuron_core_range 0:3 --triton_input INPUT__0,INT64,4x384 "
    "--triton_output OUTPUT__0,FP32,4x384 --triton_model_dir m"
)
FULL = OSError(errno.ENOSPC, "No space left on device")
FINE_LANGUAGE = (
    "--inf2 --model_type transformers --compiled_model llama --neuron_core_range 0:3 --model_class a.Model "
    "--triton_model_dir m"
)
FINE_TENSORFLOW = (
    "--model_type tensorflow --compiled_model {home}/resnet50 --neuron_core_range 0:3 --triton_model_dir m "
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Create the compiled models, and run the commands beside them."""
    home = tmp_path / "home/ubuntu"
    for name in ("bert.pt", "bert_large_mlperf_neuron_hack_bs1_dynamic.pt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("TorchScript")
    resnet = home / "inferentia-poc-2.0/scripts-rn50-tf-native/resnet50_mlperf_opt_fp16_compiled_b5_nc1/1"
    save_model(resnet, inputs={"input": ["DT_HALF", [5, 224, 224, 3]]}, outputs={"ArgMax": ["DT_INT64", [5]]})
    save_model(home / "resnet50", inputs={}, outputs={})
    for name in ("opt-125m-tp12", "llama"):
        (home / name).mkdir()
        (home / name / "weights").write_text(name)
    monkeypatch.chdir(home)
    return home


def save_model(folder: Path, tags: tuple[str, ...] = ("serve",), key: str = "serving_default", **sides: dict) -> None:
    """Write a SavedModel for the stand-in of tensorflow."""
    folder.mkdir(parents=True)
    (folder / "saved_model.pb").write_text(json.dumps({"tags": tags, "signatures": {key: sides}}))


@pytest.fixture
def tensorflow(monkeypatch):
    """Stand in for tensorflow: read a SavedModel from JSON. tests/stack/test_neuron.py has the real one."""

    def parsed(content: bytes) -> SimpleNamespace:
        model = json.loads(content)
        signatures = {
            key: SimpleNamespace(**{
                side: {name: tensor(*info) for name, info in infos.items()} for side, infos in signature.items()
            })
            for key, signature in model["signatures"].items()
        }  # fmt: skip
        graph = SimpleNamespace(meta_info_def=SimpleNamespace(tags=model["tags"]), signature_def=signatures)
        return SimpleNamespace(meta_graphs=[graph])

    def tensor(kind: str, dims: list[int] | None) -> SimpleNamespace:
        shape = SimpleNamespace(unknown_rank=dims is None, dim=[SimpleNamespace(size=size) for size in dims or []])
        return SimpleNamespace(dtype=kind, tensor_shape=shape)

    parts = {
        "core.protobuf": {"saved_model_pb2": SimpleNamespace(SavedModel=SimpleNamespace(FromString=parsed))},
        "core.framework": {"types_pb2": SimpleNamespace(DataType=SimpleNamespace(Name=lambda kind: kind))},
    }
    for name in ("tensorflow", "tensorflow.core", *(f"tensorflow.{part}" for part in parts)):
        module = ModuleType(name)
        module.__dict__.update(parts.get(name.partition(".")[2], {}))
        monkeypatch.setitem(sys.modules, name, module)


def generate(command: str, home: Path) -> int:
    return gen_triton_model.main(command.replace("/home/ubuntu", str(home)).replace("{home}", str(home)).split())


def error(capsys) -> str:
    """Return the message of a command that failed."""
    message, last = capsys.readouterr().err.splitlines()
    assert last == "nothing was written (--help describes every option)"
    assert message.startswith("error: ")
    return message.removeprefix("error: ")


def config(folder: Path) -> ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())


def parameters(folder: Path) -> dict[str, str]:
    return {key: value.string_value for key, value in config(folder).parameters.items()}


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "folder" for path in folder.rglob("*")
    }


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*PUBLISHED, *OURS])
def test_folder_is_the_golden_one(case, home, tensorflow):
    command = (PUBLISHED | OURS)[case]
    assert generate(command, home) == 0
    folder = home / command.split("--triton_model_dir ")[1].split()[0]
    version = "3" if "--model_version 3" in command else "1"
    written = (folder / "config.pbtxt").read_text().replace(str(home), "/home/ubuntu")
    assert written == (GOLDEN / case / "config.pbtxt").read_text()
    if (golden := GOLDEN / case / "model.py").exists():
        assert (folder / version / "model.py").read_text() == golden.read_text()
    assert [path.name for path in folder.iterdir() if path.name.isdecimal()] == [version]


def test_language_model_has_the_tensors_of_our_other_language_models():
    generated, falcon = config(GOLDEN / "language_model"), config(ROOT / "model_repository/falcon7b")
    inputs = [tensor for tensor in generated.input if tensor.name != "messages"]  # ours has it with a chat template
    assert (inputs, list(generated.output)) == (list(falcon.input), list(falcon.output))
    assert generated.max_batch_size == falcon.max_batch_size == 0


def test_special_characters_of_names_survive(home):
    odd = 'a"b\\n__0'
    command = ["--model_type", "pytorch", "--compiled_model", "bert.pt", "--neuron_core_range", "0:0"]
    command += ["--triton_input", f"{odd},INT64,1", "--triton_output", "größe__0,FP32,1", "--triton_model_dir", "m"]
    assert gen_triton_model.main(command) == 0
    assert (config(home / "m").input[0].name, config(home / "m").output[0].name) == (odd, "größe__0")


def test_script_runs_from_another_folder_without_packages(tmp_path, home):
    alone = tmp_path / "elsewhere" / SCRIPT.name
    alone.parent.mkdir()
    shutil.copy(SCRIPT, alone)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", alone, *FINE.replace("{home}", str(home)).split()],
        capture_output=True, text=True, check=True, env={},
    )  # fmt: skip
    assert config(home / "m").name == "m"
    assert "wrote m/config.pbtxt and m/1/model.py" in done.stdout
    assert "make up PROFILE=neuron SYSTEMS=m" in done.stdout


def test_source_is_python_3_8_with_the_standard_library():
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imported = {node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported - sys.stdlib_module_names <= {"google", "tensorflow"}


# --- the compiled model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert.pt", 'a$b":c.pt'])
def test_inf1_uses_the_absolute_path_and_prints_the_mount(name, home, capsys):
    (home / name).write_text("TorchScript")
    assert generate(f"{FINE} --compiled_model {name}", home) == 0
    assert parameters(home / "m")["COMPILED_MODEL"] == str(home / name)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"Triton loads {home / name} from that path. For a container, move it into m and run this again," in lines
    (line,) = [line for line in lines if line.startswith("services:")]
    path = str(home / name).replace("$", "$$")  # as compose has it
    volume = {"type": "bind", "source": path, "target": path, "read_only": True}
    assert yaml.safe_load(line) == {"services": {"triton-neuron": {"volumes": [volume]}}}


@pytest.mark.parametrize("path", ["m/weights/bert.pt", "{home}/m/weights/bert.pt", "link/weights/bert.pt"])
@pytest.mark.parametrize("chip", ["", "--inf2"])
def test_model_in_the_model_folder_has_a_relative_path(chip, path, home, capsys):
    (home / "m/weights").mkdir(parents=True)
    (home / "m/weights/bert.pt").write_text("TorchScript")
    (home / "link").symlink_to(home / "m")
    assert generate(f"{FINE} {chip} --compiled_model {path}", home) == 0
    assert parameters(home / "m")["COMPILED_MODEL"] == "weights/bert.pt"
    assert sorted(path.name for path in (home / "m").iterdir()) == ["1", "config.pbtxt", "weights"]
    assert "container" not in capsys.readouterr().out


def test_folder_of_a_language_model_becomes_the_model_folder(home):
    assert generate(f"{FINE_LANGUAGE} --triton_model_dir llama", home) == 0
    assert parameters(home / "llama")["COMPILED_MODEL"] == "."


def test_inf2_copies_the_model_once(home, capsys):
    command = f"{FINE} --inf2 --compiled_model bert.pt --compiled_batch_size 4"
    assert generate(command, home) == 0
    assert f"copying {home}/bert.pt into {home}/m\n" in capsys.readouterr().out
    assert parameters(home / "m")["COMPILED_MODEL"] == "bert.pt"
    assert (home / "m/bert.pt").read_text() == "TorchScript"
    before = content(home / "m")
    (home / "bert.pt").touch()
    assert generate(command, home) == 0
    printed = capsys.readouterr()
    assert ("copying" in printed.out, "kept" in printed.out, printed.err) == (False, False, "")
    (home / "bert.pt").unlink()
    assert generate(command, home) == 0
    assert content(home / "m") == before


def test_recompiled_file_is_copied_again_and_the_old_one_kept(home, capsys):
    command = f"{FINE} --inf2 --compiled_model bert.pt"
    assert generate(command, home) == 0
    times = (home / "bert.pt").stat()
    for number, old in enumerate(["bert.pt.old", "bert.pt.old.1", "bert.pt.old.2"]):
        before = content(home / "m")
        (home / "bert.pt").write_text(f"newerscrip{number}")  # of the same length
        os.utime(home / "bert.pt", ns=(times.st_atime_ns, times.st_mtime_ns))
        assert generate(command, home) == 0
        assert f"replaced files are kept as {old}\n" in capsys.readouterr().out
        changed = {"bert.pt": f"newerscrip{number}", old: before["bert.pt"]}
        assert content(home / "m") == {**before, **changed}


def test_recompiled_folder_is_replaced_as_a_whole(home, capsys):
    assert generate(FINE_LANGUAGE, home) == 0
    before = content(home / "m")
    (home / "llama/weights").rename(home / "llama/shard")
    assert generate(FINE_LANGUAGE, home) == 0
    assert "replaced files are kept as llama.old\n" in capsys.readouterr().out
    after = content(home / "m")
    assert {name for name in after if name.startswith("llama/")} == {"llama/shard"}
    assert after["llama.old/weights"] == "llama"
    assert {name for name in set(before) - set(after)} == {"llama/weights"}
    assert generate(FINE_LANGUAGE, home) == 0
    assert content(home / "m") == after


@pytest.mark.parametrize("step", ["copyfile", "replace"])
def test_failed_replacement_restores_the_old_model(step, home, monkeypatch, capsys):
    """Cover a folder and a file."""
    commands = (FINE_LANGUAGE, f"{FINE} --inf2 --compiled_model bert.pt")
    for command in commands:
        assert generate(command, home) == 0
    (home / "llama/weights").write_text("newer")
    (home / "bert.pt").write_text("newer")
    before = content(home)

    def failing(source, target, **options):
        if step == "copyfile":
            Path(target).write_text("half")
        raise FULL

    monkeypatch.setattr(shutil if step == "copyfile" else os, step, failing)
    for command in commands:
        assert generate(command, home) == 1
        assert content(home) == before
    assert capsys.readouterr().err.endswith("No space left on device: config.pbtxt was not written\n")


def test_inf2_copies_folders_and_relative_paths_only(home, monkeypatch):
    assert generate(FINE_LANGUAGE, home) == 0
    assert (home / "m/llama/weights").read_text() == "llama"
    (home / "below").mkdir()
    monkeypatch.chdir(home / "below")
    assert generate(f"{FINE} --inf2 --compiled_model ../bert.pt", home) == 0
    assert parameters(home / "below/m")["COMPILED_MODEL"] == "bert.pt"
    assert (home / "below/m/bert.pt").is_file()
    (home / "bert.pt").write_text("newer")
    assert generate(f"{FINE} --inf2 --compiled_model ../bert.pt", home) == 0
    assert (home / "below/m/bert.pt").read_text() == "newer"
    assert generate(f"{FINE} --inf2 --compiled_model {{home}}/bert.pt --triton_model_dir n", home) == 0
    assert parameters(home / "below/n")["COMPILED_MODEL"] == str(home / "bert.pt")
    assert not (home / "below/n/bert.pt").exists()


def test_inf2_leaves_a_saved_model_in_the_version_folder(home, tensorflow):
    save_model(home / "m/1", inputs={"x": ["DT_FLOAT", [1]]}, outputs={"y": ["DT_FLOAT", [1]]})
    assert generate(f"{FINE_TENSORFLOW} --inf2 --compiled_model 1", home) == 0
    assert sorted(path.name for path in (home / "m/1").iterdir()) == ["model.py", "saved_model.pb"]


# --- TensorFlow -------------------------------------------------------------------------------------------------------


def test_tensors_come_from_the_signature_unless_listed(home, tensorflow):
    sides = {
        "inputs": {"x": ["DT_FLOAT", [-1, 3]], "a": ["DT_STRING", [-1, 1]]},
        "outputs": {"y": ["DT_BFLOAT16", [-1, 2]]},
    }
    save_model(home / "model", **sides)
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model", home) == 0
    parsed = config(home / "m")
    assert [(tensor.name, list(tensor.dims)) for tensor in parsed.input] == [("a", [-1, 1]), ("x", [-1, 3])]
    assert [parsed.input[0].data_type, parsed.output[0].data_type] == [parsed.input[0].data_type, 11]
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model --max_batch_size 8 --triton_output z,INT32,7", home) == 0
    parsed = config(home / "m")
    assert [(tensor.name, list(tensor.dims)) for tensor in [*parsed.input, *parsed.output]] == [
        ("a", [1]), ("x", [3]), ("z", [7]),
    ]  # fmt: skip
    assert "COMPILED_BATCH_SIZE" not in parameters(home / "m")


def test_fixed_batch_dimension_becomes_the_compiled_batch_size(home, tensorflow):
    save_model(home / "model", inputs={"x": ["DT_FLOAT", [5, 3]]}, outputs={"y": ["DT_INT64", [5]]})
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model --max_batch_size 8", home) == 0
    assert parameters(home / "m")["COMPILED_BATCH_SIZE"] == "5"
    # One number per row: Triton has no tensors without dimensions.
    output = config(home / "m").output[0]
    assert (list(output.dims), output.HasField("reshape"), list(output.reshape.shape)) == ([1], True, [])


@pytest.mark.parametrize(("sides", "more", "message"), [
    ({"x": None}, "", "has no shape for x; set --triton_input x,FP32,-1x224x224x3, or what its shape is"),
    ({"x": [1], "kind": "DT_COMPLEX64"}, "", "x is DT_COMPLEX64, which Triton does not have"),
    ({"x": []}, "--max_batch_size 4", "--max_batch_size 4: x has no batch dimension; must be 0"),
    ({"x": [1, 3], "z": [5, 3]}, "--max_batch_size 4",
        "--max_batch_size 4: the model's tensors have batch dimensions of 1 and 5; must be 0"),
    ({"x": [5, 3]}, "--max_batch_size 8 --compiled_batch_size 4",
        "--compiled_batch_size 4: the model's own batch dimension is 5"),
])  # fmt: skip
def test_unusable_signature_is_an_error(sides, more, message, home, tensorflow, capsys):
    kind = sides.get("kind", "DT_FLOAT")
    inputs = {name: [kind, dims] for name, dims in sides.items() if name != "kind"}
    save_model(home / "model", inputs=inputs, outputs={})
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model {more}", home) == 2
    assert error(capsys).endswith(message)


def test_unknown_tags_and_keys_list_the_known_ones(home, tensorflow, capsys):
    save_model(home / "model", tags=("serve", "gpu"), key="predict", inputs={}, outputs={})
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model", home) == 2
    assert error(capsys) == f"--tag_set serve: {home}/model has no graph with these tags; it has 'gpu,serve'"
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model --tag_set serve,gpu", home) == 2
    assert error(capsys) == f"--signature_def_key serving_default: {home}/model has no such signature; it has predict"
    both = "--tag_set gpu,serve --signature_def_key predict"
    assert generate(f"{FINE_TENSORFLOW} --compiled_model model {both}", home) == 0


def test_without_tensorflow_tensors_must_be_listed(home, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert generate(FINE_TENSORFLOW, home) == 2
    message = error(capsys)
    assert "needs tensorflow, which is not installed here" in message
    assert message.endswith("install it, or set --triton_input and --triton_output")
    assert generate(f"{FINE_TENSORFLOW} --triton_input x,FP32,1 --triton_output y,FP32,1", home) == 0


def test_unreadable_saved_model_is_an_error(home, tensorflow, capsys):
    (home / "resnet50/saved_model.pb").write_text("?")
    assert generate(FINE_TENSORFLOW, home) == 2
    assert "saved_model.pb cannot be read as a SavedModel" in error(capsys)


# --- wrong arguments --------------------------------------------------------------------------------------------------

# fmt: off
WRONG = [
    (FINE, "--max_batch_size -1", "argument --max_batch_size: '-1' must be a whole number, at least 0"),
    (FINE, "--max_batch_size 2147483648",
     "argument --max_batch_size: '2147483648' must be a whole number, at most 2147483647"),
    (FINE, "--triton_model_instance_count 3",
     "--triton_model_instance_count 3: cannot share 4 cores equally; must be one of 1, 2, 4"),
    (FINE, "--neuron_core_range 3:0",
     "argument --neuron_core_range: '3:0' must be the first and the last core, such as 0:3"),
    (FINE, "--enable_dynamic_batching", "--enable_dynamic_batching: needs --max_batch_size, such as 8"),
    (FINE, "--enable_dynamic_batching --max_batch_size 4 --preferred_batch_size 4 8",
     "--preferred_batch_size 8: must be at most --max_batch_size, 4"),
    (FINE, "--triton_input INPUT__1,INT64",
     "argument --triton_input: 'INPUT__1,INT64' must be a name, a data type and a shape, such as INPUT__0,INT64,4x384"),
    (FINE, "--triton_input INPUT__1,LONG,4",
     "argument --triton_input: 'INPUT__1,LONG,4': unknown data type 'LONG'; must be one of BOOL, UINT8, UINT16, "
     "UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, BF16, FP32, FP64, STRING"),
    *((FINE, f"--triton_input INPUT__1,INT64,{shape}", f"argument --triton_input: 'INPUT__1,INT64,{shape}': invalid "
       "shape; must be sizes of at least 1, or -1 for any size, such as 4x384")
      for shape in ("", "4x0", "4x-2")),
    (FINE_TENSORFLOW, "--triton_output y,FP32,4 --triton_input x,BF16,4",
     "--triton_input x: BF16 is for PyTorch; must be FP32, which TensorFlow converts to"),
    (FINE, "--triton_input INPUT__1,BYTES,4",
     "--triton_input INPUT__1: PyTorch has no strings; must be a type of numbers"),
    (FINE, "--triton_output ANSWER,FP32,4",
     "--triton_output ANSWER: PyTorch's tensors are named <name>__<index>, such as OUTPUT__0,FP32,4x384"),
    (FINE, "--triton_input INPUT__2,INT64,4", "--triton_input: the indices are 0, 2; must be 0 to 1, each once"),
    (FINE_TENSORFLOW, "--triton_input INPUT__0,INT64,4 INPUT__0,INT64,4 --triton_output y,FP32,1",
     "--triton_input INPUT__0: appears more than once; each tensor needs a name of its own"),
    (FINE.replace("--triton_input INPUT__0,INT64,4x384", ""), "",
     "--triton_input is missing: a TorchScript model does not list its tensors. Set it, as in INPUT__0,INT64,4x384"),
    (FINE, "--compiled_model /no/where.pt", "--compiled_model /no/where.pt: /no/where.pt does not exist"),
    (FINE, "--inf2 --compiled_model nowhere.pt", "--compiled_model nowhere.pt: is neither in {home}/m nor in {home}"),
    (FINE, "--compiled_model llama", "--compiled_model llama: is a folder; must be the file that torch.jit.save wrote"),
    (FINE_TENSORFLOW, "--compiled_model llama",
     "--compiled_model llama: must be the folder of a SavedModel, which has a saved_model.pb"),
    (FINE_LANGUAGE, "--compiled_model bert.pt",
     "--compiled_model bert.pt: is not a folder; must be the folder that the model was saved in"),
    (FINE_LANGUAGE, "--compiled_model .",
     "--compiled_model .: contains --triton_model_dir, so it cannot be copied there; choose another folder"),
    (FINE, "--triton_model_dir bert.pt/m",
     "--triton_model_dir bert.pt/m: {home}/bert.pt is not a folder; choose another one, or move it away"),
    (FINE, "--triton_model_dir .hidden",
     "--triton_model_dir .hidden: its last part is the model's name: letters, digits, '_', '-' and '.'"),
    (FINE, "--tp_degree 2", "--tp_degree: goes with --model_type transformers only; leave it out"),
    (FINE_LANGUAGE, "--triton_input INPUT__0,INT64,4",
     "--triton_input: a large language model takes prompts and returns texts; leave it out"),
    (FINE_LANGUAGE, "--max_batch_size 4",
     "--max_batch_size: the backend batches prompts by itself, up to --batch_size; leave it out"),
    (FINE_LANGUAGE.replace("--model_class a.Model", ""), "",
     "--model_class is missing: the class that loads the model, such as "
     "transformers_neuronx.opt.model.OPTForSampling"),
    (FINE_LANGUAGE, "--tp_degree 4 --triton_model_instance_count 2",
     "--tp_degree 4: an instance has 2 cores; must be at most 2"),
]
# fmt: on


@pytest.mark.parametrize(("fine", "more", "message"), WRONG)
def test_wrong_argument_has_its_message(fine, more, message, home, capsys):
    before = content(home)
    assert generate(f"{fine} {more}", home) == 2
    assert error(capsys) == message.replace("{home}", str(home))
    assert content(home) == before


@pytest.mark.parametrize(("name", "message"), [
    ("../ubuntu/x/02", "would look like version 02 in the model folder; rename it, or give its absolute path"),
    ("config.pbtxt", "has the name of a file that is written into the model folder; rename it"),
    ("1/model.py", "has the name of a file that is written into the model folder; rename it"),
])  # fmt: skip
def test_reserved_name_in_the_model_folder_is_an_error(name, message, home, capsys):
    path = home / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("TorchScript")
    before = content(home)
    assert generate(f"{FINE} --inf2 --compiled_model {name}", home) == 2
    assert error(capsys) == f"--compiled_model {name}: {message}"
    assert content(home) == before
    absolute = os.path.normpath(path)
    assert generate(f"{FINE} --inf2 --compiled_model {absolute.replace(str(home), '{home}')}", home) == 0
    assert parameters(home / "m")["COMPILED_MODEL"] == absolute


def test_line_break_in_an_argument_is_an_error(home, capsys):
    command = FINE.replace("{home}", str(home)).split()
    assert gen_triton_model.main([*command, "--tag_set", 'serve\nname: "other"']) == 2
    assert error(capsys) == "'serve\\nname: \"other\"': has characters that cannot be printed"


def test_unwritable_folder_is_an_error(home, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: path != home)  # root may write anywhere
    assert generate(FINE, home) == 2
    expected = f"--triton_model_dir m: you cannot write to {home}; choose another folder, or ask its owner"
    assert error(capsys) == expected


@pytest.mark.parametrize(("fine", "more", "message"), [
    (FINE, "--preferred_batch_size 4", "--preferred_batch_size: ignored without --enable_dynamic_batching"),
    (FINE, "--max_queue_delay_microseconds 100",
        "--max_queue_delay_microseconds: ignored without --enable_dynamic_batching"),
    (FINE, "--tag_set train", "--tag_set: ignored, it goes with --model_type tensorflow"),
    (FINE_LANGUAGE, "--tp_degree 2", "--tp_degree 2: an instance has 4 cores; the others stay idle"),
    (FINE, "--inf2 --max_batch_size 8 --compiled_model {home}/bert.pt",
        "--compiled_batch_size is not set: only one of an instance's 4 cores computes at a time; set it to cut "
        "batches over the cores, or give each core an instance with --triton_model_instance_count 4"),
    (FINE,
        "--inf2 --triton_model_instance_count 2 --disable_batch_requests_to_neuron --compiled_model {home}/bert.pt",
        "--compiled_batch_size is not set: only one of an instance's 2 cores computes at a time; set it to cut "
        "batches over the cores, or give each core an instance with --triton_model_instance_count 4"),
])  # fmt: skip
def test_questionable_option_is_a_warning(fine, more, message, home, capsys):
    assert generate(f"{fine} {more}", home) == 0
    assert capsys.readouterr().err == f"warning: {message}\n"
    assert not config(home / "m").HasField("dynamic_batching")


@pytest.mark.parametrize(("fine", "more"), [
    (FINE, "--max_batch_size 8"),
    (FINE, "--inf2 --max_batch_size 8 --compiled_batch_size 4"),
    (FINE, "--inf2 --max_batch_size 8 --triton_model_instance_count 4"),
    (FINE, "--inf2 --max_batch_size 8 --enable_dynamic_batching --disable_batch_requests_to_neuron"),
    (FINE_TENSORFLOW, "--inf2 --max_batch_size 8 --triton_input x,FP32,1 --triton_output y,FP32,1"),
])  # fmt: skip
def test_no_warning_if_all_cores_compute(fine, more, home, capsys):
    assert generate(f"{fine} {more}", home) == 0
    assert capsys.readouterr().err == ""


# --- all or nothing ---------------------------------------------------------------------------------------------------


def old_folder(home: Path) -> dict[str, str]:
    """Create a folder with weights, another version, and an edited model.py."""
    assert generate(FINE, home) == 0
    (home / "m/weights.pt").write_text("weights")
    (home / "m/2").mkdir()
    (home / "m/2/model.py").write_text("of version 2")
    (home / "m/1/model.py").write_text("edited")
    return content(home)


def test_other_files_of_the_folder_stay(home, capsys):
    before = old_folder(home)
    assert generate(f"{FINE} --threads_per_core 2", home) == 0
    assert "--model_version 1: m has 2 too, which Triton prefers" in capsys.readouterr().err
    after = content(home)
    assert parameters(home / "m")["NUM_THREADS_PER_CORE"] == "2"
    assert "class TritonPythonModel" in after["m/1/model.py"]
    assert after["m/1/model.py.old"] == "edited"
    assert after["m/config.pbtxt.old"] == before["m/config.pbtxt"]
    changed = {"m/config.pbtxt", "m/1/model.py"}
    assert {name: after[name] for name in before if name not in changed} == {
        name: text for name, text in before.items() if name not in changed
    }
    assert set(after) - set(before) == {"m/config.pbtxt.old", "m/1/model.py.old"}


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("exists", [True, False])
def test_failure_while_writing_changes_nothing(exists, error, home, monkeypatch, capsys):
    """Fail at config.pbtxt, the last file."""
    before = old_folder(home) if exists else content(home)
    write_text, written = Path.write_text, []

    def failing(path, text, **options):
        write_text(path, text[:20], **options)
        written.append(path)
        if "name:" in text:
            raise error

    monkeypatch.setattr(Path, "write_text", failing)
    command = f"{FINE} --inf2 --compiled_model bert.pt --model_version 3"
    if isinstance(error, SystemExit):
        with pytest.raises(SystemExit):
            generate(command, home)
    else:
        assert generate(command, home) == (130 if isinstance(error, KeyboardInterrupt) else 1)
        assert capsys.readouterr().err.endswith(": config.pbtxt was not written\n")
    assert len(written) == 2
    assert content(home) == before


def test_files_are_replaced_at_once_and_config_pbtxt_last(home, monkeypatch):
    replace, places = os.replace, []

    def record(new, place):
        assert Path(new).exists()
        places.append(str(Path(place).relative_to(home / "m")))
        replace(new, place)

    old_folder(home)
    monkeypatch.setattr(os, "replace", record)
    assert generate(f"{FINE} --inf2 --compiled_model bert.pt", home) == 0
    assert places == ["bert.pt", "1/model.py", "config.pbtxt"]


# Run the generator as a command that prints a line before its first rename, and waits for a line on stdin.
# nohup and & start processes with SIGINT ignored, which children inherit.
HELD = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
replace = os.replace
def held(new, place):
    os.replace = replace
    print("now", flush=True)
    sys.stdin.readline()
    replace(new, place)
os.replace = held
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("exists", [True, False])
def test_signal_leaves_the_old_folder(exists, number, home):
    before = old_folder(home) if exists else content(home)
    command = [sys.executable, "-c", HELD, str(SCRIPT), *FINE.replace("{home}", str(home)).split()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as running:
        assert "now\n" in iter(running.stdout.readline, "")
        running.send_signal(number)
        _, printed = running.communicate(timeout=120)
    assert running.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert "Traceback" not in printed
    after = content(home)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) <= {"m", "m/1"}  # empty folders
