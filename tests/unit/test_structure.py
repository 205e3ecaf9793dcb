"""Rules of this repository that no linter checks: names of modules, links, and imports of the backends."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from triton_transformers.settings import ROOT

# Names that Python, pytest and Triton prescribe.
PRESCRIBED = {"__init__.py", "__main__.py", "conftest.py", "model.py", "sitecustomize.py"}
# Folders whose modules mirror each other: one runtime and the other, an exporter and the backend or checkpoints of its
# task, a unit test and the test of the same subject on a real server, what the comparison, the search and the soak
# show, clients, tensors, images.
MIRRORS = (
    {"scripts/stack/local", "scripts/stack/docker"},
    {"triton_transformers/models/exporters", "images/triton/backends/neuron", "images/triton/backends/shared"}
    | {"tests/support/checkpoints", "tests/support"},
    {"tests/unit", "tests/stack", "tests/docker"},
    {"loadtest", "loadtest/tune", "drills/soak"},
    {"bench", "drills"},
    {"triton_transformers", "images/triton/backends/neuron"},
    {"images/triton", "images/gateway"},
)


def modules() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Golden files are output, and the stand-ins have the names of the libraries that they stand for.
    left_out = ("tests/golden/", "tests/support/neuron_stand_in/")
    return [Path(line) for line in listed.splitlines() if not line.startswith(left_out) and (ROOT / line).exists()]


def test_modules_share_a_name_only_with_their_mirror():
    folders = defaultdict(set)
    for path in modules():
        folders[path.name].add(str(path.parent))
    shared = {name: places for name, places in folders.items() if len(places) > 1 and name not in PRESCRIBED}
    assert {name: places for name, places in shared.items() if not any(places <= mirror for mirror in MIRRORS)} == {}


def test_links_in_the_docs_lead_to_files():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 100
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_faults_of_triton_and_the_code_link_to_each_other():
    page = (ROOT / "docs/triton-faults.md").read_text()
    sections = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)", page, re.M)
    }
    command = ["git", "grep", "-hoE", r"triton-faults\.md#[a-z0-9-]+"]
    linked, named = (
        {line.partition("#")[2] for line in subprocess.check_output([*command, "--", *at], cwd=ROOT, text=True).split()}
        for at in (["docs", "README.md"], [".", ":!docs", ":!CHANGELOG.md"])
    )
    assert named == sections
    assert linked <= sections
    # test_links_in_the_docs_lead_to_files checks the files themselves.
    assert len(re.findall(r"^\| .* \| .* \| .*\]\(.* \| .* \| .* \|$", page, re.M)) == len(sections)


def test_backends_import_each_other_in_one_direction():
    backends = ROOT / "images/triton/backends"
    imported = {}
    for path in backends.rglob("*.py"):
        code = path.read_text()
        names = re.findall(r"^\s*from ((?:shared|neuron)\.\w+) import", code, re.M)
        for package, several in re.findall(r"^\s*from (shared|neuron) import (.+)", code, re.M):
            names += [f"{package}.{name.strip()}" for name in several.split(",")]
        imported[".".join(path.relative_to(backends).with_suffix("").parts)] = names
    order = [*TopologicalSorter(imported).static_order()]  # raises CycleError
    assert order.index("shared.types") < order.index("shared.backend") < order.index("packed_onnx.model")


@pytest.mark.slow
def test_backends_import_transformers_without_scikit_learn():
    backends = ROOT / "images/triton/backends"
    direct = [
        path.name
        for path in backends.rglob("*.py")
        if re.search(r"^\s*(import|from) transformers\b", path.read_text(), re.MULTILINE)
    ]
    assert direct == ["lean_transformers.py"]
    script = """
import sys
from shared.lean_transformers import transformers
transformers.AutoModelForCausalLM
assert "sklearn" not in sys.modules
import sklearn.exceptions
"""
    subprocess.run([sys.executable, "-c", script], cwd=backends, check=True)
