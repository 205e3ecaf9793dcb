"""The pages of docs that code, settings and alerts name exist, with their headings."""

from __future__ import annotations

import re
import subprocess

from tests.stack.test_readme import anchors
from triton_transformers.settings import ROOT

# A release keeps the names that pages had, and tests invent alerts.
EXCEPT = (":!CHANGELOG.md", ":!tests")


def test_every_page_that_a_file_names_exists():
    command = ["git", "grep", "--untracked", "-ohE", r"docs/[a-z-]+\.md(#[a-z0-9_-]+)?", "--", ".", *EXCEPT]
    named = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert len(named) > 20
    missing = {name for name in named if not is_there(*re.split("#", name))}
    assert missing == set()


def is_there(page: str, heading: str = "") -> bool:
    path = ROOT / page
    return path.exists() and (not heading or heading in anchors(path.read_text()))
