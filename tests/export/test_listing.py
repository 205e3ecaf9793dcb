"""`make models LIST=1`, and the tables of docs/models.md."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from export.catalogue import CATALOGUE, RECIPES, SMALL_MODELS
from export.listing import interface, print_list
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
    def run(*loaded: str) -> str:
        settings = {"MODEL_REPOSITORY": str(tmp_path), "SYSTEMS": "embedding", "HF_MODEL": "tests/other"}
        print_list(Settings(settings | dict.fromkeys(("HF_REVISION", "SOURCE", "TASK", "FORMAT"), "")), loaded)
        return capsys.readouterr().out

    return run


def entry(text: str, name: str) -> str:
    """Return a system's lines of the list, joined."""
    match = re.search(rf"^{name} .*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, text
    return re.sub(r"\s+", " ", match[0]).strip()


def test_list_shows_weights_licence_inputs_and_outputs_of_every_system(listed):
    text = listed()
    for system in CATALOGUE:
        lines = entry(text, system.name)
        assert lines.startswith(f"{system.name} not assembled")
        for expected in (str(system.source), *system.companions, f"{system.gigabytes:g} GB, {system.licence}"):
            assert expected in lines
        assert " → " in lines
    of_embedding = "input_ids INT64 [N,-1], token_count INT32 [N,1], output__0 FP32 [N,384]"
    assert f"input_text BYTES [N,1] → {of_embedding}" in entry(text, "embedding")
    of_reranker = "token_count INT32 [N,1], score FP32 [N,-1]"
    assert f"query BYTES [N,1], text BYTES [N,1] → {of_reranker}" in entry(text, "reranker")


def test_list_fits_80_columns(listed, tmp_path):
    written(tmp_path / "mine/config.pbtxt", CONFIG)
    written(tmp_path / "a_rather_long_name_of_a_model_of_some_other_user/config.pbtxt", CONFIG)
    text = listed().replace(str(tmp_path), "model_repository")
    assert max(map(len, text.splitlines())) <= 80
    config = written(tmp_path / "mine/config.pbtxt", "input [ {")
    with pytest.raises(UserError, match=re.escape(str(config))):
        listed()


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
    text = listed("spam", "tokenizer")
    assert entry(text, "embedding").startswith("embedding on disk, 2.0 kB")
    assert entry(text, "falcon7b").startswith("falcon7b not assembled")
    spam = entry(text, "spam")
    assert spam.startswith("spam loaded, on disk, 2.0 kB sentence-similarity, onnx, draft a/b@1 tests/model@1")
    mine = entry(text, "mine")
    assert re.match(r"mine on disk, \d+ bytes your own", mine)
    assert "ids INT64 [N,-1,3], (text BYTES [N,1]) → row FP32 [N,4]" in mine
    assert re.findall(r"^([a-z]\w*) +(?:loaded|on disk|not)", text, re.MULTILINE) == [
        *(system.name for system in CATALOGUE),
        *("spam", "mine"),
    ]


# --- docs/models.md ---------------------------------------------------------------------------------------------------


def table(heading: str, page: str = "docs/models.md") -> list[list[str]]:
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_docs_list_the_catalogue():
    documented = {row[0]: row for row in table("Serve a system of the catalogue")}
    names = {", ".join(f"`{name}`" for name in system.names): system for system in CATALOGUE}
    assert list(documented) == list(names)
    for name, system in names.items():
        source = system.source
        weights = f"{source.repository} @ {source.revision[:12]}" if isinstance(source, Hub) else str(source)
        assert documented[name][2:5] == [weights, f"{system.gigabytes:g} GB", system.licence]
        for model in system.names:
            listed = interface(model, CONFIGS)
            for tensor in re.findall(r"`(\w+)`", " ".join(documented[name][5:])):
                assert f"{tensor} " in listed


def test_list_and_docs_have_a_small_model_for_each_task(listed):
    tasks = PIPELINE_TASKS.keys() - {"image-to-text"}  # transformers 5 has models for chats with images instead
    assert {system.name: system.task for system in SMALL_MODELS} == {task: task for task in tasks}
    documented = table("One model for each task", "docs/pipelines.md")
    lines = [line for line in listed().splitlines() if re.match(r"[\w-]+ +[\d.]+ GB ", line)]
    assert len(lines) == len(documented) == len(SMALL_MODELS)
    for system, row, line in zip(SMALL_MODELS, documented, lines, strict=True):
        assert isinstance(system.source, Hub)
        assert re.fullmatch(r"[0-9a-f]{40}|f4041f8|refs/pr/\d", system.source.revision)
        weights = f"{system.source.repository} @ {system.source.revision[:12]}"
        assert row == [f"`{system.name}`", weights, f"{system.gigabytes:g} GB", system.licence]
        assert line.startswith(f"{system.name} ") and f"{system.gigabytes:g} GB" in line and system.licence in line


def test_docs_list_the_tasks_and_their_formats():
    documented = {
        task: tuple(re.findall(r"`([\w-]+)`", row[1]))
        for row in table("Serve any other model")
        for task in re.findall(r"`([\w-]+)`", row[0])
        if task in RECIPES
    }
    assert documented == {task: recipe.formats for task, recipe in RECIPES.items()}
