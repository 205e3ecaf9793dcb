"""Rules of this repository that no linter checks: the places of tests, links, and imports of transformers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from triton_transformers.settings import ROOT

# Tests beside the tree: they need a whole stack, Docker or Kubernetes, or put all that is of one kind through the same.
BESIDE = ("tests/stack/", "tests/docker/", "tests/kubernetes/", "tests/conformance/")


def test_tests_mirror_the_tree():
    """The test of gateway/edge/admission.py is tests/gateway/edge/test_admission.py; more words may follow the name."""
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    mirrored = [test for test in tests if len(test.parts) > 1 and not f"tests/{test}".startswith(BESIDE)]
    assert len(mirrored) > 100
    assert [str(test) for test in mirrored if not named_for(test)] == []


def named_for(test: Path) -> list[str]:
    """Return what a test is named for in the mirrored folder: files and folders whose name its own begins with."""
    names = {path.name.partition(".")[0].replace("-", "_") for path in (ROOT / test.parent).glob("[!._]*")}
    words = test.stem.removeprefix("test_")
    return [name for name in names if f"{words}_".startswith(f"{name}_")]


def test_links_in_the_docs_lead_to_files():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 100
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_faults_of_triton_and_the_code_link_to_each_other():
    page = (ROOT / "TRITON-FAULTS.md").read_text()
    sections = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)", page, re.M)
    }
    command = ["git", "grep", "-hoE", r"TRITON-FAULTS\.md#[a-z0-9-]+"]
    linked, named = (
        {line.partition("#")[2] for line in subprocess.check_output([*command, "--", *at], cwd=ROOT, text=True).split()}
        for at in (["docs", "README.md"], [".", ":!docs", ":!CHANGELOG.md", ":!README.md"])
    )
    assert named == sections
    assert linked <= sections
    # test_links_in_the_docs_lead_to_files checks the files themselves.
    assert len(re.findall(r"^\| .* \| .* \| .*\]\(.* \| .* \| .* \|$", page, re.M)) == len(sections)


@pytest.mark.slow
def test_backends_import_transformers_without_scikit_learn():
    direct = [
        path.name
        for path in (ROOT / "serving").rglob("*.py")
        if re.search(r"^\s*(import|from) transformers\b", path.read_text(), re.MULTILINE)
    ]
    assert direct == ["lean_transformers.py"]
    script = """
import sys
from serving.engines.lean_transformers import transformers
transformers.AutoModelForCausalLM
assert "sklearn" not in sys.modules
import sklearn.exceptions
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
