"""Parse queries for their metrics, and read the committed rules."""

from __future__ import annotations

import re

import yaml

from triton_transformers.settings import ROOT

RULES = ROOT / "monitoring/prometheus/rules"
KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}


def metrics(expr: str) -> set[str]:
    """Return the names of the metrics that the query reads."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    names = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])", bare)
    return set(names) - KEYWORDS


def rules() -> list[dict]:
    """Return every `record:` and `alert:` with its `expr:`, of all files."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]
