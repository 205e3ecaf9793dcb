"""docs/troubleshooting.md quotes what the programs print, with … for what varies."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from triton_transformers.settings import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
ROOMS = ("triton_transformers", "serving", "export", "gateway", "loadtest", "scripts")
# A table's first two columns quote messages: code with a space.
QUOTES = [quote for row in re.findall(r"^\|(.*?\|.*?)\|", PAGE, re.MULTILINE) for quote in re.findall(r"`(.+?)`", row)]
OF_OTHERS = ("make ", "apt ", "curl ", "not loaded")


def literals() -> list[str]:
    """Return the texts of the product: those of Python's literals, with … between the parts of an f-string."""
    texts = [path.read_text() for path in (ROOT / "scripts/make").glob("*.sh")]
    files = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in files.split():
        if file.endswith(".py"):
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return texts


PRINTED = literals()
MESSAGES = [quote for quote in QUOTES if " " in quote.strip("… ") and not quote.startswith(OF_OTHERS)]


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_that_a_program_prints(message):
    parts = [part.strip(" …") for part in message.split("…")]
    missing = [part for part in parts if part and not any(part in text for text in PRINTED)]
    assert missing == []


def test_page_has_its_tables():
    assert len(MESSAGES) > 35
