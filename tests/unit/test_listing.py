"""make models LIST=1, and the catalogue as docs/models.md has it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from scripts.common.model_config import CONFIGS
from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.catalogue import RECIPES, SYSTEMS
from scripts.models.listing import print_list
from scripts.models.sources import Hub

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
def listed(tmp_path, capsys, monkeypatch):
    def run() -> str:
        settings = {"MODEL_REPOSITORY": str(tmp_path), "SYSTEMS": "embedding", "HF_MODEL": "tests/other"}
        print_list(Settings(settings | dict.fromkeys(("HF_REVISION", "SOURCE", "TASK", "FORMAT"), "")))
        return capsys.readouterr().out

    return run


def block(text: str, name: str) -> str:
    """A system's lines of the list, joined."""
    found = re.search(rf"^[●○]\s+{name}\b.*?(?=^[●○]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, text
    return re.sub(r"\s+", " ", found[0])


def test_every_system_with_its_weights_licence_inputs_and_outputs(listed):
    text = listed()
    for system in SYSTEMS.values():
        said = block(text, system.name)
        assert said.startswith("○")
        where = [system.source.repository, system.source.revision[:12]] if isinstance(system.source, Hub) else []
        for each in (*where, *system.also, f"{system.gigabytes:g} GB, {system.licence}"):
            assert each in said
        assert " → " in said
    assert "input_text BYTES [N,1]" in block(text, "embedding")
    assert "→ output__0 FP32 [N,384]" in block(text, "embedding")


def test_it_is_readable_at_100_columns(listed, tmp_path):
    written(tmp_path / "mine/config.pbtxt", CONFIG)
    written(tmp_path / "a_rather_long_name_of_a_model_that_somebody_made/config.pbtxt", CONFIG)
    assert max(map(len, listed().splitlines()[:-2])) <= 100


def test_what_is_in_place_what_was_made_and_what_is_your_own(listed, tmp_path):
    facts = {"task": "sentence-similarity", "format": "onnx", "identity": "tests/model@1", "source": "tests/model@1"}
    for name in ("embedding", "made"):
        written(tmp_path / name / "config.pbtxt", CONFIG)
        written(tmp_path / name / "1/model.onnx", "x" * 2000)
        recipe = RECIPES[facts["task"]].version
        more = {"system": name, "also": [f"{name}_part"], "files": [f"{name}/1/model.onnx"], "recipe": recipe}
        written(tmp_path / name / "1/assembled.json", json.dumps(facts | more))
        written(tmp_path / f"{name}_part/config.pbtxt", CONFIG)
    shutil.copy(CONFIGS / "embedding/config.pbtxt", tmp_path / "embedding/config.pbtxt")
    written(tmp_path / "tokenizer/config.pbtxt", CONFIG)  # a step of it
    written(tmp_path / "mine/config.pbtxt", CONFIG)
    text = listed()
    assert block(text, "embedding").startswith("●")
    assert block(text, "falcon7b").startswith("○")
    made = block(text, "made")
    assert "sentence-similarity" in made and "onnx" in made and "tests/model@1" in made and "2.0 kB" in made
    mine = block(text, "mine")
    assert mine.startswith("●") and "your own" in mine
    for said in ("ids INT64 [N,-1,3]", "(text BYTES [N,1])", "→ row FP32 [N,4]"):
        assert said in mine
    assert re.findall(r"^[●○]  (\w+)", text, re.MULTILINE) == [*SYSTEMS, "made", "mine"]


def test_a_config_that_is_none_is_said_by_its_path(listed, tmp_path):
    config = written(tmp_path / "mine/config.pbtxt", "input [ {")
    with pytest.raises(UserError, match=re.escape(str(config))):
        listed()


# --- docs/models.md ---------------------------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    section = (ROOT / "docs/models.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_documented_catalogue_is_the_catalogue():
    documented = {row[0]: row for row in table("By name")}
    names = {", ".join(f"`{name}`" for name in (system.name, *system.also)): system for system in SYSTEMS.values()}
    assert list(documented) == list(names)
    for name, system in names.items():
        source = system.source
        weights = f"{source.repository} @ {source.revision[:12]}" if isinstance(source, Hub) else str(source)
        assert documented[name][2:5] == [weights, f"{system.gigabytes:g} GB", system.licence]


def test_the_documented_tensors_are_the_configs():
    for row in table("By name"):
        for name in re.findall(r"`(\w+)`", row[0]):
            config = (CONFIGS / name / "config.pbtxt").read_text()
            for tensor in re.findall(r"`(\w+)`", " ".join(row[5:])):
                assert f'"{tensor}"' in config


def test_the_documented_tasks_are_the_recipes():
    documented = {
        task: tuple(re.findall(r"`([\w-]+)`", row[1]))
        for row in table("Any other")
        for task in re.findall(r"`([\w-]+)`", row[0])
        if task in RECIPES
    }
    assert documented == {task: recipe.formats for task, recipe in RECIPES.items()}
