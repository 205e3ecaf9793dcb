"""Find the files that git has: a user's own models lie beside those of the project."""

from __future__ import annotations

import subprocess
from pathlib import Path

from triton_transformers.settings import ROOT


def files_in_git(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines()]
