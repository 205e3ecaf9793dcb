"""Weights that PyTorch pickled: the library's tensors come out, and no code of theirs runs."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from export.assemble import assemble_all
from export.sources import pickles
from export.sources.pickles import pickles_of
from export.sources.source import Folder, open_weights
from tests.support.checkpoints import encoders, language
from tests.support.checkpoints.lora import merged, save_adapter
from tests.support.checkpoints.pickled import forms_of_code, pickle_weights, saved
from tests.support.checkpoints.pipelines import find_pipeline
from tests.support.served import assemble, check, request
from triton_transformers.settings import ROOT, Settings, UserError

pytestmark = pytest.mark.usefixtures("stored", "converts_in_process")

ALLOWED = Settings({"ALLOW_PICKLES": "1"})
FORMS = [*forms_of_code(Path("x"))]
slow = pytest.mark.slow


def converted(weights: Path, repository: Path, is_adapter: bool = False) -> Path:
    """Return a copy of the folder that a recipe gets."""
    repository.mkdir(exist_ok=True)
    with open_weights(Folder(weights), ALLOWED, repository, is_adapter) as own:
        assert own.movable
        copy = shutil.copytree(own.folder, repository.with_name("copy"))
    assert not list(repository.iterdir())
    return Path(copy)


def refusal(weights: Path, repository: Path, settings: Settings = ALLOWED, is_adapter: bool = False) -> str:
    repository.mkdir(exist_ok=True)
    with (
        pytest.raises(UserError) as error,
        open_weights(Folder(weights), settings, repository, is_adapter),
    ):
        pass
    assert not list(repository.iterdir())
    assert "\n" not in str(error.value)
    return str(error.value)


def reason(path: Path) -> str:
    with pytest.raises(Exception) as error:
        pickles.read(path)
    return pickles.reason(error.value)


def assert_equal(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], expected[key]) and own[key].dtype == expected[key].dtype for key in own)


# --- what the library reads -------------------------------------------------------------------------------------------


def save_marian(folder: Path) -> Path:
    find_pipeline("translation", "MarianMTModel").save(folder)
    return folder


MODELS: dict[str, tuple[Callable[[Path], Path], type]] = {
    "bert": (partial(encoders.save_bert, head="ForMaskedLM"), transformers.AutoModelForMaskedLM),
    "half precision": (partial(language.save_llama, dtype="bfloat16"), transformers.AutoModelForCausalLM),
    "marian": (save_marian, transformers.AutoModelForSeq2SeqLM),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_of_a_pickle_has_the_librarys_weights(tmp_path, name):
    """The pickle has tied weights in one memory, as torch.save writes them for a model."""
    save, library = MODELS[name]
    weights = save(tmp_path / "weights")
    state = library.from_pretrained(weights).state_dict()
    (weights / "model.safetensors").unlink()
    torch.save(state, weights / "pytorch_model.bin")
    expected = library.from_pretrained(weights).state_dict()
    copy = converted(weights, tmp_path / "models")
    assert not list(copy.rglob("*.bin"))
    assert_equal(library.from_pretrained(copy).state_dict(), expected)
    assert_equal(expected, state)


def test_names_of_old_releases_are_those_that_the_library_reads(tmp_path):
    weights = encoders.save_bert(tmp_path / "weights", "Model")
    tensors = load_file(weights / "model.safetensors")
    old = {
        f"bert.{key.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta')}": value
        for key, value in tensors.items()
    }
    (weights / "model.safetensors").unlink()
    torch.save(old | {"cls.seq_relationship.bias": torch.zeros(2)}, weights / "pytorch_model.bin")
    own = transformers.AutoModel.from_pretrained(converted(weights, tmp_path / "models")).state_dict()
    assert_equal({key: own[key] for key in tensors}, tensors)


@pytest.mark.parametrize(
    "save",
    [partial(encoders.save_sentence_transformer, layers=["Dense"]), pytest.param(encoders.save_router, marks=slow)],
)
def test_modules_of_sentence_transformers_answer_as_in_the_library(tmp_path, save):
    from sentence_transformers import SentenceTransformer

    weights = pickle_weights(save(tmp_path / "weights"))
    texts = ["Rain in the valley.", "a"]
    expected = SentenceTransformer(str(weights), device="cpu").encode(texts)
    folder = assemble(weights, tmp_path / "models", "python" if save != encoders.save_router else "onnx")
    check(folder, [request(texts)], "sentence_embedding", [expected])


def test_model_is_assembled_from_a_pickle_and_that_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()  # converts in a process of its own
    weights = pickle_weights(encoders.save_bert(tmp_path / "weights", "ForSequenceClassification"))
    repository = tmp_path / "models"
    settings = Settings.load().replace(MODEL_REPOSITORY=str(repository), SYSTEMS="x", SOURCE=str(weights))
    assemble_all(settings)
    printed = " ".join(capsys.readouterr().out.split())
    assert "pytorch_model.bin converted to safetensors, tensors only" in printed
    assert not [path for path in repository.rglob("*") if path.suffix == ".bin" or path.name.startswith(".assem")]
    assert (weights / "pytorch_model.bin").is_file()


def test_language_model_and_its_adapter_are_assembled_from_pickles(tmp_path):
    weights = language.save_llama(tmp_path / "weights")
    adapter = save_adapter(tmp_path / "adapter", weights)
    rows = torch.tensor([[1, 9, 8, 7], [1, 3, 5, 2]])
    with torch.no_grad():
        expected = merged(weights, adapter)(rows).logits
    chosen = {"SYSTEMS": "x", "SOURCE": str(pickle_weights(weights, shards=2)), "FORMAT": "python"}
    chosen["ADAPTERS"] = f"tone={pickle_weights(adapter)}"
    repository = tmp_path / "models"
    assemble_all(Settings.load().replace(MODEL_REPOSITORY=str(repository), **chosen))
    stored = repository / "x/1/adapters/tone"
    encoders.edit(stored / "adapter_config.json", rank_pattern={}, alpha_pattern={}, use_rslora=False)
    with torch.no_grad():
        own = merged(repository / "x/1", stored)(rows).logits
    torch.testing.assert_close(own, expected)
    assert not list(repository.rglob("*.bin"))


def test_tensors_of_one_memory_and_of_any_order_are_written(tmp_path):
    table = torch.arange(12.0).reshape(3, 4)
    state = {
        "table": torch.nn.Parameter(table), "tied": table, "half": table[:2].half(), "turned": table.T, "row": table[1],
        "scalar": torch.tensor(3), "empty": torch.ones(0, 2), "brain": table.bfloat16(), "steps": 7, 5: table,
        "more": {"inner": table},
    }  # fmt: skip
    torch.save(state, tmp_path / "a.bin")
    own = pickles.read(tmp_path / "a.bin")
    save_file(own, tmp_path / "a.safetensors")
    expected = {key: state[key] for key in list(state)[:8]}
    assert_equal(load_file(tmp_path / "a.safetensors"), expected)


def test_safetensors_and_whole_files_win(tmp_path):
    model, shard = "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"
    assert pickles_of([model, "model.safetensors"]) == []
    assert pickles_of([model, "model-00001-of-00002.safetensors"]) == []
    assert pickles_of([shard, model, "model.fp16.safetensors", "training_args.bin", "original/a.bin"]) == [model]
    nested = [
        "1_Dense/pytorch_model.bin",
        "vocoder/pytorch_model.bin",
        "legal/adapter_model.bin",
        "sparse_linear.pt",
    ]
    assert pickles_of([*nested, "model.safetensors", "checkpoint-5/adapter_model.bin"]) == sorted(nested)
    assert pickles_of([*nested, *(name.rpartition("/")[0] + "/model.safetensors" for name in nested)]) == [
        "legal/adapter_model.bin",
        "sparse_linear.pt",
    ]


def test_pickles_are_refused_where_they_are_not_allowed(tmp_path):
    weights = pickle_weights(encoders.save_bert(tmp_path / "weights", "Model"))
    sentence = refusal(weights, tmp_path / "models", Settings({"ALLOW_PICKLES": "0"}))
    assert "has no model.safetensors, and its pytorch_model.bin is not read, because other formats can run" in sentence


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path, form):
    (tmp_path / "a.bin").write_bytes(forms_of_code(tmp_path / "ran")[form])
    refusals = ("holds code (", "is damaged, or holds more than tensors, and nothing of it was run (")
    assert reason(tmp_path / "a.bin").startswith(refusals)
    assert not (tmp_path / "ran").exists()


def test_code_is_named(tmp_path):
    forms = forms_of_code(tmp_path / "ran")
    for form, name in {
        "reduce": "posix.system",
        "legacy file": "posix.system",
        "new object": "subprocess.Popen",
    }.items():
        (tmp_path / "a.bin").write_bytes(forms[form])
        assert name in reason(tmp_path / "a.bin")


def save_dense(folder: Path) -> Path:
    return encoders.save_sentence_transformer(folder, layers=["Dense"])


@pytest.mark.parametrize(
    ("save", "shards", "file"),
    [
        (save_dense, 1, "2_Dense/pytorch_model.bin"),
        (encoders.save_bge_m3, 1, "colbert_linear.pt"),
        (language.save_llama, 3, "pytorch_model-00002-of-00003.bin"),
    ],
)
def test_code_beside_sound_weights_is_refused_and_nothing_is_left(tmp_path, save, shards, file):
    weights = pickle_weights(save(tmp_path / "weights"), shards)
    (weights / file).write_bytes(forms_of_code(tmp_path / "ran")["nested"])
    settings = Settings.load().replace(MODEL_REPOSITORY=str(tmp_path / "models"), SYSTEMS="x", SOURCE=str(weights))
    with pytest.raises(UserError) as error:
        assemble_all(settings)
    assert f"{file} holds code (posix.system), which was not run: choose another model or, if" in str(error.value)
    assert not list((tmp_path / "models").iterdir()) and not (tmp_path / "ran").exists()


def test_code_in_an_adapter_is_refused(tmp_path, monkeypatch):
    monkeypatch.undo()  # converts in a process of its own
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "adapter/adapter_model.bin").write_bytes(forms_of_code(tmp_path / "ran")["inst"])
    sentence = refusal(tmp_path / "adapter", tmp_path / "models", is_adapter=True)
    assert "adapter_model.bin is damaged, or holds more than tensors, and nothing of it was run" in sentence
    assert not (tmp_path / "ran").exists()


def compressed(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return stream.getvalue()


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


def scripted() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.ones(1)), stream)
    return stream.getvalue()


GOOD = saved({"w": torch.ones(1000)})
DAMAGED = {
    "truncated": (GOOD[:-100], "is damaged, or holds more than tensors"),
    "empty": (b"", "is damaged"),
    "text": (b"<html>Not found</html>", "is damaged"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS"),
    "compressed": (compressed(saved({"w": torch.zeros(10**7)})), "is compressed, or a program of TorchScript"),
    "archive of torch 0.1": (tarred(), "is damaged"),
    "TorchScript": (scripted(), "is compressed, or a program of TorchScript"),
    "nested": (saved({"state_dict": {"w": torch.ones(2)}, "epoch": 3}), "has no tensors by name at its top level"),
    "list": (saved([torch.ones(2)]), "has no tensors by name"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_refused(tmp_path, name):
    content, sentence = DAMAGED[name]
    (tmp_path / "a.bin").write_bytes(content)
    assert reason(tmp_path / "a.bin").startswith(sentence)


def test_process_has_a_limit_of_time():
    code = "from export.sources import pickles; pickles.SECONDS = 1; pickles.limit(0)\nwhile True: pass"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL


def test_death_of_the_process_is_reported(tmp_path, monkeypatch):
    monkeypatch.undo()  # converts in a process of its own
    weights = pickle_weights(encoders.save_bert(tmp_path / "weights", "Model"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    sentence = refusal(weights, tmp_path / "models")
    assert "the process that converts pytorch_model.bin ended with 1: make room in memory and on the disk" in sentence


def test_file_that_declares_more_than_it_has_is_refused(tmp_path, monkeypatch):
    """A tensor may repeat one number a billion times."""
    monkeypatch.undo()  # converts in a process of its own
    weights = pickle_weights(encoders.save_bert(tmp_path / "weights", "Model"))
    torch.save({"w": torch.zeros(1).expand(1 << 33)}, weights / "pytorch_model.bin")
    assert "takes more memory than its size explains, or than is free" in refusal(weights, tmp_path / "models")
