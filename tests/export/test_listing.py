"""`make models LIST=1`, and the tables of docs/models.md."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from export.catalogue import CATALOGUE, RECIPES, SMALL_MODELS, SYSTEMS
from export.listing import print_list
from export.sources.source import Hub
from triton_transformers.model_config import CONFIGS
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.tasks.table import PIPELINE_TASKS

CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
of_a_newer_triton { field: 1 }
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1, 3 ] } ]
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "row" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def listed(tmp_path, capsys):
    def run(*names: str, loaded: Collection[str] = ()) -> str:
        settings = {"MODEL_REPOSITORY": str(tmp_path), "SYSTEMS": "embedding", "HF_MODEL": "tests/other"}
        print_list(Settings(settings | dict.fromkeys(("HF_REVISION", "SOURCE", "TASK", "FORMAT"), "")), names, loaded)
        return capsys.readouterr().out

    return run


def entry(text: str, name: str) -> str:
    """Return a system's line of the list, or its lines of the details joined, with single blanks."""
    match = re.search(rf"^{name}( .*|\n(?:  .*\n)+)", text, re.MULTILINE)
    assert match, text
    return re.sub(r"\s+", " ", match[0]).strip()


def test_list_has_a_whole_line_for_each_system_small_ones_first(listed):
    text = listed()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    for system in SYSTEMS.values():
        assert re.search(rf"^{system.name} +{system.gigabytes:g} GB +\S.*", text, re.MULTILINE)
    names = [line.split()[0] for line in lines if re.search(r"  [\d.]+ GB  ", line)]
    sizes = [SYSTEMS[name].gigabytes for name in names]
    assert names[:3] == ["embedding", "chat", "reranker"]
    assert max(sizes[:-3]) <= 1 < min(sizes[-3:])


def test_details_show_weights_licence_models_and_tensors(listed):
    text = listed(*(system.name for system in CATALOGUE))
    for system in CATALOGUE:
        lines = entry(text, system.name)
        for expected in (str(system.source), f"{system.gigabytes:g} GB, {system.licence}", "not assembled"):
            assert expected in lines
        assert f"models {' '.join(system.names)} inputs" in lines and " outputs " in lines
    outputs = "outputs input_ids INT64 [N,-1] token_count INT32 [N,1] output__0 FP32 [N,384]"
    assert f"inputs input_text BYTES [N,1] {outputs}" in entry(text, "embedding")
    outputs = "outputs token_count INT32 [N,1] score FP32 [N,-1]"
    assert f"inputs query BYTES [N,1] text BYTES [N,1] {outputs}" in entry(text, "reranker")
    assert entry(listed("ensemble_model"), "vit_ensemble")
    with pytest.raises(UserError, match="there is no system spam"):
        listed("spam")


def test_details_name_an_unreadable_configuration(listed, tmp_path):
    config = written(tmp_path / "mine/config.pbtxt", "input [ {")
    with pytest.raises(UserError, match=re.escape(str(config))):
        listed("mine")


def test_list_marks_systems_on_disk_loaded_and_own(listed, tmp_path):
    facts = {"task": "sentence-similarity", "format": "onnx", "identity": "tests/model@1", "source": "tests/model@1"}
    for name in ("embedding", "spam"):
        written(tmp_path / name / "config.pbtxt", CONFIG)
        written(tmp_path / name / "1/model.onnx", "x" * 2000)
        recipe = RECIPES[facts["task"]].version
        more = {"system": name, "also": [f"{name}_part"], "files": [f"{name}/1/model.onnx"], "recipe": recipe}
        written(tmp_path / name / "1/assembled.json", json.dumps(facts | more | {"draft": "a/b@1"}))
        written(tmp_path / f"{name}_part/config.pbtxt", CONFIG)
    shutil.copy(CONFIGS / "embedding/config.pbtxt", tmp_path / "embedding/config.pbtxt")
    written(tmp_path / "tokenizer/config.pbtxt", CONFIG)  # a step of embedding
    written(tmp_path / "mine/config.pbtxt", CONFIG)
    text = listed(loaded=("spam", "tokenizer"))
    assert entry(text, "embedding").startswith("embedding on disk all-MiniLM-L6-v2 turns")
    assert entry(text, "falcon7b").startswith("falcon7b 14.4 GB Falcon 7B")
    assert entry(text, "spam") == "spam loaded sentence-similarity, onnx, draft a/b@1"
    assert entry(text, "mine") == "mine on disk your own configuration"
    assert text.index("\nYour own:\nspam ") < text.index("\nmine ")
    details = listed("spam", "mine", loaded=("spam",))
    assert "weights tests/model@1 state loaded, on disk, 2.0 kB" in entry(details, "spam")
    lines = "inputs ids INT64 [N,-1,3] text BYTES [N,1], optional outputs row FP32 [N,4]"
    assert re.search(r"state on disk, \d+ bytes models mine " + re.escape(lines), entry(details, "mine"))


# --- docs/models.md ---------------------------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    section = (ROOT / "docs/models.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_docs_list_the_catalogue():
    documented = {row[0]: row for row in table("Serve a system of the catalogue")}
    names = {", ".join(f"`{name}`" for name in system.names): system for system in CATALOGUE}
    assert list(documented) == list(names)
    for name, system in names.items():
        source = system.source
        weights = f"{source.repository} @ {source.revision[:12]}" if isinstance(source, Hub) else str(source)
        assert documented[name][2:] == [weights, f"{system.gigabytes:g} GB", system.licence]


def test_catalogue_has_a_small_model_for_each_task(listed):
    tasks = PIPELINE_TASKS.keys() - {"image-to-text"}  # transformers 5 has models for chats with images instead
    assert {system.name: system.task for system in SMALL_MODELS} == {task: task for task in tasks}
    for system in SMALL_MODELS:
        assert isinstance(system.source, Hub)
        assert re.fullmatch(r"[0-9a-f]{40}|f4041f8|refs/pr/\d", system.source.revision)
        assert f"{system.source}, {system.gigabytes:g} GB, {system.licence}" in entry(listed(system.name), system.name)


def test_docs_list_the_tasks_and_their_formats():
    documented = {
        task: tuple(re.findall(r"`([\w-]+)`", row[1]))
        for row in table("Serve any other model")
        for task in re.findall(r"`([\w-]+)`", row[0])
        if task in RECIPES
    }
    assert documented == {task: recipe.formats for task, recipe in RECIPES.items()}
