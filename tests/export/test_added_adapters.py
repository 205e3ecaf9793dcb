"""Adapters of language models: which are refused, in which form they are stored, and what engines compute with them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub
import openvino
import openvino_genai as genai
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from export.added_adapters import adapter_changes, change_adapters, requested_adapters, set_parameter
from export.assemble import assemble_all
from export.checkpoint.adapters import CONFIG, WEIGHTS
from export.recipes.language import adapters as adapter_files
from export.recipes.language import graph
from export.sources.source import Folder, Hub, place
from scripts.stack.__main__ import remove_adapter
from scripts.stack.docker.compose import Compose
from serving.generation.adapters import AdapterFiles, adapted
from serving.generation.openvino.pipeline import NO_TOKEN, load_pipeline, tensor
from serving.triton.types import BadRequest
from tests.support.checkpoints import language
from tests.support.checkpoints.lora import merged, save_adapter
from tests.support.hub_stand_in import Published, hub_stand_in
from triton_transformers.model_config import read_config
from triton_transformers.settings import Settings, UserError

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.tensor([[1, 9, 8, 7], [1, 3, 5, 2], [1, 9, 8, 7], [1, 4, 4, 4]])
# Adapters whose scale or rank differs between layers, and their settings.
FORMS = {
    "plain": {},
    "rslora": {"use_rslora": True, "layers": "[a-z_]+_proj", "seed": 2},
    "ranks": {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "seed": 3},
    "alphas": {"alpha_pattern": {"v_proj": 32}, "seed": 4},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return language.save_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def stored(base, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Return each adapter as it was saved, and as `make add` stores it beside the weights."""
    folder = tmp_path_factory.mktemp("adapters")
    pairs = {}
    for name, options in FORMS.items():
        saved, written = folder / name, folder / "1/adapters" / name
        save_adapter(saved, base, **options)
        adapter_files.write(f"x:{name}", saved, written, base)
        pairs[name] = saved, written
    return pairs


def test_stored_adapters_have_one_form_and_the_same_answers(base, stored):
    for name, (saved, written) in stored.items():
        options = json.loads((written / CONFIG).read_text())
        assert options["r"] == options["lora_alpha"] == adapter_files.max_rank(written.parent) == 4
        shapes = {tensor.shape[0 if "lora_A" in key else 1] for key, tensor in load_file(written / WEIGHTS).items()}
        assert shapes == {4}, name
        # The names that the test's own merging reads.
        defaults = {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
        (written / CONFIG).write_text(json.dumps(options | defaults))
        expected, actual = (merged(base, folder)(TOKENS).logits for folder in (saved, written))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_a_batch_have_their_own_adapters(base, stored):
    files = AdapterFiles(stored["plain"][1].parents[1])
    names = ["plain", "rslora", "", "ranks"]
    model = merged(base, None)
    with adapted(model, [files.find(name) if name else None for name in names]):
        logits = model(TOKENS).logits
    for row, name in enumerate(names):
        expected = merged(base, stored[name][0] if name else None)(TOKENS[row : row + 1]).logits[0]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(TOKENS).logits, merged(base, None)(TOKENS).logits)  # no hook stays


def test_adapters_are_found_while_they_come_and_go(base, stored, tmp_path):
    shutil.copytree(stored["plain"][1], tmp_path / "adapters/tone")
    files = AdapterFiles(tmp_path)
    first = files.find("tone")
    assert files.find("tone") is first
    shutil.copyfile(stored["rslora"][1] / WEIGHTS, tmp_path / "adapters/tone" / WEIGHTS)
    assert len(files.find("tone")) > len(first)
    shutil.copytree(stored["ranks"][1], tmp_path / "adapters/legal")
    for name in ("more", "../adapters/tone", ""):
        with pytest.raises(BadRequest, match=rf"has no adapter '{re.escape(name)}'; it has legal, tone"):
            files.find(name)
    shutil.rmtree(tmp_path / "adapters")
    with pytest.raises(BadRequest, match="has no adapter 'tone'; it has none"):
        files.find("tone")
    assert not files.loaded


@pytest.mark.parametrize("kind", ["falcon", "gpt_oss", "phi3"])
def test_openvinos_graph_gives_each_text_of_a_batch_its_adapter(kind, tmp_path):
    base, version = language.save_decoder(tmp_path / "base", kind), tmp_path / "1"
    network = merged(base, None)
    linear = {name.rpartition(".")[2] for name, part in network.named_modules() if isinstance(part, torch.nn.Linear)}
    vocabulary, folders = network.config.vocab_size, []
    for seed, layers in enumerate(("|".join(linear), max(linear)), 1):
        saved = save_adapter(tmp_path / f"saved{seed}", base, layers=layers, seed=seed)
        folders.append(tmp_path / f"1/adapters/{seed}")
        adapter_files.write("x:tone", saved, folders[-1], base)
    # Longer than the part of a prompt that a step reads, and than a block of the prefix cache.
    prompt = [1, *range(9, 89)]
    tokens = torch.tensor([prompt])
    expected = [
        merged(base, folder)
        .generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ]
        .tolist()
        for folder in (None, tmp_path / "saved1", tmp_path / "saved2")
    ]
    assert len({tuple(text) for text in expected}) == 3
    openvino.save_model(graph.convert(network), version / "openvino_model.xml", compress_to_fp16=False)
    (version / "limits.json").write_text(json.dumps({"vocabulary": vocabulary}))
    for some, texts in ((folders, expected), (folders[1:], expected[::2]), ([], expected[:1])):
        adapter_files.write_graph("x", version, version, some)
        assert json.loads((version / "limits.json").read_text())["adapters"] == [folder.name for folder in some]
        for name in ("config.json", "generation_config.json"):
            shutil.copyfile(base / name, version / name)
        pipeline = load_pipeline(version, scheduler())
        for _ in range(2):  # the second time, the prompts are in the prefix cache
            handles = [
                pipeline.add_request(number, tensor([1 + number * vocabulary, *prompt[1:]]), six_tokens())
                for number in range(len(texts))
            ]
            while pipeline.has_non_finished_requests():
                pipeline.step()
            assert [handle.read_all()[0].generated_ids for handle in handles] == texts


def scheduler() -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size, config.enable_prefix_caching = 1, True
    config.max_num_batched_tokens, config.dynamic_split_fuse = 32, True
    return config


def six_tokens() -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = 6
    config.set_eos_token_id(NO_TOKEN)
    return config


def renamed(folder: Path, old: str, new: str) -> None:
    save_file({key.replace(old, new): value for key, value in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def cut(folder: Path) -> None:
    save_file({key: value[:, :3].contiguous() for key, value in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


REFUSED = {
    "another type": (lambda folder: None, {"peft_type": "IA3"}, "x:tone is of the type IA3, and only LORA is served"),
    "DoRA": (lambda folder: None, {"use_dora": True}, "sets use_dora in adapter_config.json"),
    "biases": (lambda folder: None, {"bias": "all"}, "sets bias in"),
    "whole layers": (lambda folder: None, {"modules_to_save": ["lm_head"]}, "sets modules_to_save in"),
    "changed base": (lambda folder: None, {"init_lora_weights": "pissa"}, "sets init_lora_weights in"),
    "parameters": (lambda folder: None, {"target_parameters": ["experts.up"]}, "sets target_parameters in"),
    "embeddings": (
        lambda folder: renamed(folder, "layers.0.self_attn.q_proj.lora_A.weight", "embed_tokens.lora_embedding_A"),
        {},
        "embed_tokens.lora_embedding_A', which changes no linear layer of LlamaForCausalLM",
    ),
    "another architecture": (
        lambda folder: renamed(folder, "model.layers", "transformer.h"),
        {},
        "which changes no linear layer of LlamaForCausalLM: merge it into its model (merge_and_unload in peft), and "
        "serve that as a system of its own. It was made for tests/base",
    ),
    "another size": (cut, {}, "x:tone does not fit 'model.layers.0.self_attn.q_proj' of its model"),
    "another rank": (lambda folder: None, {"r": 8}, "does not fit 'model.layers.0.self_attn.q_proj'"),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS), {}, "changes no layer"),
    "half a file": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:99]), {}, "is damaged",
    ),
    "zero rank": (
        lambda folder: save_file(
            {key: value[:0] if "_A" in key else value[:, :0].contiguous() for key, value in weights(folder).items()},
            folder / WEIGHTS,
        ),
        {"r": 0}, "x:tone has r=0 and lora_alpha=8 for",
    ),
    "scale that is no number": (lambda folder: None, {"lora_alpha": "much"}, "has r=4 and lora_alpha=much for"),
    "infinite scale": (lambda folder: None, {"lora_alpha": float("inf")}, "has infinite or undefined numbers for"),
    "undefined weights": (
        lambda folder: save_file({key: value * torch.nan for key, value in weights(folder).items()}, folder / WEIGHTS),
        {}, "has infinite or undefined numbers for",
    ),
    "two names of a layer": (
        lambda folder: save_file(
            weights(folder) | {key.removeprefix("base_model.model."): own for key, own in weights(folder).items()},
            folder / WEIGHTS,
        ),
        {}, "twice, under different names",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), {}, "has no adapter_model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_adapter_that_does_not_fit_is_refused_in_a_sentence(base, tmp_path, spoil, options, reason):
    folder = save_adapter(tmp_path / "tone", base)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | options))
    spoil(folder)
    with pytest.raises(UserError, match=re.escape(reason)):
        adapter_files.write("x:tone", folder, tmp_path / "written", base)
    assert not (tmp_path / "written").exists()


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings.load().replace(MODEL_REPOSITORY=str(tmp_path / "models"))


def test_names_and_sources_of_adapters(settings, tmp_path):
    empty_adapter(tmp_path / "own")
    asked = f"tone={tmp_path}/own legal=organisation/name old=organisation/name@v1.0 gone="
    adapters = requested_adapters(settings.replace(ADAPTERS=asked))
    assert adapters == {
        "tone": Folder(tmp_path / "own"),
        "legal": Hub("organisation/name"),
        "old": Hub("organisation/name", "v1.0"),
        "gone": None,
    }
    assert " ".join(f"{name}={place(source)}" for name, source in adapters.items()) == asked
    for wrong in ("tone", "a:b=organisation/name", "a/b=organisation/name"):
        with pytest.raises(UserError, match=re.escape(f"ADAPTERS: '{wrong}' must be a name and its weights")):
            requested_adapters(settings.replace(ADAPTERS=wrong))
    for wrong, reason in (
        ("tone=/", "/ has no adapter_config.json: name a folder"),
        (f"{'a' * 300}=organisation/name", "has 300 characters; a name has at most 128"),
        ("tone=organisation/name tone=organisation/other", "ADAPTERS names 'tone' twice"),
    ):
        with pytest.raises(UserError, match=reason):
            requested_adapters(settings.replace(ADAPTERS=wrong))


def empty_adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / CONFIG).write_text("{}")


def test_docker_mounts_the_folders_of_adapters(settings, tmp_path):
    empty_adapter(tmp_path / "own")
    asked = f"tone={tmp_path}/own legal=organisation/name@v1.0 gone="
    compose = Compose(settings.replace(ADAPTERS=asked, LOCAL_STATE=str(tmp_path / "state"), PROFILE="cpu"))
    assert compose.files[-1] == str(compose.written_file)
    (mount,) = yaml.safe_load(compose.written_file.read_text())["services"]["exporter"]["volumes"]
    assert mount == f"{tmp_path}/own:{tmp_path}/own:ro"
    assert not Compose(settings.replace(PROFILE="cpu")).files


def test_removal_of_an_unknown_adapter_names_the_others(settings, base):
    system(settings, base, adapters={"tone": "a/b@c"})
    for name, others in (("x", "there is x:tone"), ("y", "there is none")):
        with pytest.raises(UserError, match=f"there is no adapter {name}:legal; {others}"):
            remove_adapter(settings, name, "legal")


def system(settings: Settings, base: Path, name: str = "x", **fields: object) -> Path:
    """Assemble a system of the base, as far as adapters need it."""
    version = settings.model_repository / name / "1"
    shutil.copytree(base, version)
    for model in (name, f"{name}_stream"):
        (settings.model_repository / model).mkdir(exist_ok=True)
        (settings.model_repository / model / "config.pbtxt").write_text('backend: "generation"\n')
    record = {
        "system": name, "also": [f"{name}_stream"], "task": "text-generation", "format": "python", "recipe": "1",
        "files": [f"{name}/1/config.json"], "source": "own", "identity": "own",
    }  # fmt: skip
    (version / "assembled.json").write_text(json.dumps(record | fields))
    return version


def record_of(version: Path) -> dict:
    return json.loads((version / "assembled.json").read_text())


def test_adapters_are_added_replaced_and_removed_with_their_records(settings, base, tmp_path, capsys):
    version = system(settings, base)
    repository, saved = settings.model_repository, save_adapter(tmp_path / "saved", base)

    def change(adapters: str) -> dict:
        change_adapters("x", settings.replace(ADAPTERS=adapters), repository)
        names = sorted(path.name for path in (version / "adapters").glob("*"))
        assert read_config(repository / "x/config.pbtxt").parameters.get("adapters", "").split() == names
        record = record_of(version)
        for file in record["files"]:
            assert (repository / file).is_file()
        assert sorted({file.split("/")[3] for file in record["files"] if "/adapters/" in file}) == names
        return record.get("adapters", {})

    assert [*change(f"tone={saved}")] == ["tone"]
    assert f"x:tone: adapter of {saved}" in " ".join(capsys.readouterr().out.split())
    assert [*change(f"legal={saved}")] == ["tone", "legal"]  # the others stay
    settled = settings.replace(ADAPTERS=f"tone={saved} gone=")
    assert adapter_changes("x", settled, repository) == {}
    before = record_of(version)["adapters"]["tone"]
    save_adapter(tmp_path / "other", base, seed=5)
    shutil.copyfile(tmp_path / "other" / WEIGHTS, saved / WEIGHTS)
    assert change(f"tone={saved}")["tone"] != before
    assert [*change("tone=")] == ["legal"]
    assert change("legal=") == {}
    assert not (version / "adapters").exists()
    assert (repository / "x/config.pbtxt").read_text() == 'backend: "generation"\n'


def test_adapter_that_does_not_fit_changes_nothing(settings, base, tmp_path):
    version = system(settings, base)
    save_adapter(tmp_path / "good", base)
    cut(save_adapter(tmp_path / "bad", base))
    before = {path: path.read_bytes() for path in settings.model_repository.rglob("*") if path.is_file()}
    for adapters in (f"tone={tmp_path}/good legal={tmp_path}/bad", f"tone={tmp_path}/nowhere"):
        with pytest.raises(UserError, match=r"x:legal does not fit|nowhere: there is no such folder"):
            change_adapters("x", settings.replace(ADAPTERS=adapters), settings.model_repository)
    after = {path: path.read_bytes() for path in settings.model_repository.rglob("*") if path.is_file()}
    assert after == before
    assert record_of(version)["recipe"] == "1"


@pytest.mark.parametrize("form", ["python", "openvino-fp32"])
def test_full_disk_changes_nothing_and_says_what_to_do(settings, base, tmp_path, form):
    version, saved = system(settings, base, format=form), save_adapter(tmp_path / "saved", base)
    if form != "python":
        openvino.save_model(graph.convert(merged(base, None)), version / "openvino_model.xml")
        (version / "limits.json").write_text(json.dumps({"vocabulary": 64}))
    sizes = {"python": 1000, "openvino-fp32": 40_000}  # the weights of the adapter do not fit, and those of the graph
    before = {path: path.read_bytes() for path in settings.model_repository.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[form], hard))
    try:
        with pytest.raises(OSError, match=r"File too large|iostream"):
            change_adapters("x", settings.replace(ADAPTERS=f"tone={saved}"), settings.model_repository)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after = {path: path.read_bytes() for path in settings.model_repository.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("adapters", "after"),
    [("tone={}/new", "legal tone"), ("more={}/new", "legal more tone"), ("tone=", "legal")],
    ids=["replaced", "added", "removed"],
)
def test_interrupted_change_is_repeated_by_the_next_command(settings, base, tmp_path, monkeypatch, adapters, after):
    """Stop the change before each of the files that it moves or deletes."""
    own = settings.replace(SYSTEMS="x", SOURCE=str(base), TASK="text-generation", FORMAT="python")
    for seed, name in enumerate(("old", "new")):
        save_adapter(tmp_path / name, base, seed=seed)
    changed = own.replace(ADAPTERS=adapters.format(tmp_path))
    for steps in range(4):
        assemble_all(own.replace(ADAPTERS=f"tone={tmp_path}/old legal={tmp_path}/old more="))
        with monkeypatch.context() as patch:
            for module, function in ((os, "replace"), (os, "unlink")):
                patch.setattr(module, function, interrupted_after(steps, getattr(module, function)))
            with contextlib.suppress(KeyboardInterrupt):
                assemble_all(changed)
        assemble_all(changed)
        version = settings.model_repository / "x/1"
        assert sorted(path.name for path in (version / "adapters").iterdir()) == after.split()
        assert sorted(record_of(version)["adapters"]) == after.split()
        assert record_of(version)["recipe"] != "unfinished"


def interrupted_after(steps: int, function: Callable[..., None]) -> Callable[..., None]:
    calls = itertools.count()

    def run(*args: object, **options: object) -> None:
        if next(calls) == steps:
            raise KeyboardInterrupt
        function(*args, **options)

    return run


def test_other_systems_have_no_adapters(settings, base, tmp_path):
    system(settings, base, "images", task="image-classification", format="onnx")
    (settings.model_repository / "own").mkdir()
    for name, kind in (("images", "image-classification (onnx)"), ("own", "a model of your own")):
        with pytest.raises(UserError, match=re.escape(f"ADAPTERS: {name} is {kind}; adapters are for text-generation")):
            change_adapters(name, settings.replace(ADAPTERS="tone=a/b"), settings.model_repository)


def test_adapter_of_the_hub_is_recorded_at_its_commit(settings, base, tmp_path, monkeypatch):
    version = system(settings, base)
    saved = save_adapter(tmp_path / "saved", base)
    (saved / "README.md").write_text("not needed")
    with hub_stand_in({"tests/tone": Published(saved), "tests/model": Published(base)}) as hub:
        monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=hub.url))
        own = settings.replace(ADAPTERS="tone=tests/tone")
        change_adapters("x", own, settings.model_repository)
        assert record_of(version)["adapters"] == {"tone": f"tests/tone@{Published(saved).commit}"}
        assert {file for file, _ in hub.served} == {CONFIG, WEIGHTS}
        assert adapter_changes("x", own, settings.model_repository) == {}
        with pytest.raises(UserError, match=r"tests/model has no adapter_config.json with adapter_model.safetensors"):
            change_adapters("x", settings.replace(ADAPTERS="tone=tests/model"), settings.model_repository)


def test_parameter_replaces_only_its_own_line(tmp_path):
    path = tmp_path / "config.pbtxt"
    path.write_text(before := '# A comment\nparameters { key: "max_batch" value { string_value: "4" } }\n')
    for names in (["tone", "legal"], ["legal"], []):
        set_parameter(path, names)
        parameters = {"max_batch": "4"} | ({"adapters": " ".join(sorted(names))} if names else {})
        assert read_config(path).parameters == parameters
    assert path.read_text() == before
