"""The commands of the README work as written."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from loadtest.measure.verdicts import EXIT_CODES
from tests.support.stacks import COMMAND_S, SHORT
from triton_transformers.settings import DEFAULTS, ROOT

BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def stack(new_stack):
    """Return a stack that the README's commands start and stop."""
    return new_stack()


def run(stack, block: str, codes: tuple[int, ...] = (0,)) -> str:
    gateway = f"http://127.0.0.1:{stack.environment['GATEWAY_PORT']}"
    command = block.replace("http://localhost:8000", stack.http).replace("http://localhost:8080", gateway)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env=stack.variables(**SHORT),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def test_commands_work_as_written_in_their_order(stack):
    start, requests, own_model, triton = BLOCKS[:4]
    stack.assemble({"SYSTEMS": "chat"})
    assert start.startswith("make up ")
    output = run(stack, start, (0, 2))  # make's code for a short comparison that is not proven
    for line in ("requests/s", "latency p95, ms", "texts per batch (encoder)", "report.html", "The stack stays up"):
        assert line in output
    assert (stack.folder / "reports/latest/report.html").exists()
    assert json.loads((stack.folder / "reports/latest/results.json").read_text())["verdict"]["word"] in EXIT_CODES
    output = run(stack, requests)
    assert "Paris" in output
    assert '"object":"embedding"' in output
    assert "ready" in output
    *commands, measure = own_model.splitlines()
    assert measure.startswith("make loadtest ")  # takes minutes for a model that generates
    assert "chat runs on " in run(stack, "\n".join(commands))
    assert '"shape":[2,384]' in run(stack, triton)
    assert run(stack, "make down").endswith("stopped\n")
    assert stack.processes("tritonserver") == []


def test_pictures_exist_in_both_colour_schemes():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / "README.md").read_text())
    assert len(shown) == 4
    assert [path for path in shown if not (ROOT / path).exists()] == []


def test_no_placeholder_is_left():
    assert "@@" not in (ROOT / "README.md").read_text()


def test_every_named_setting_exists():
    named = {name for block in BLOCKS for name in re.findall(r"\b([A-Z][A-Z_]+)=", block)}
    assert named
    assert named <= DEFAULTS.keys()


def test_every_link_leads_to_a_file_and_its_heading():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for path, heading in re.findall(r"\]\(((?!https?://)[^)#]*)(?:#([^)]+))?\)", page.read_text()):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            assert not heading or heading in anchors(target.read_text()), f"{page.name}: {path}#{heading}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
