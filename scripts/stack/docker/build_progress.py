"""Show the progress of a build as the install of packages does: one line on a terminal, elsewhere one now and then."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from scripts.make.install import Progress, follow
from triton_transformers.cli import without_codes
from triton_transformers.settings import ROOT, UserError

# The lines of BuildKit's plain progress: a step begins, and what its command prints after some seconds.
STEP = re.compile(r"#(\d+) \[([^\]]+)\] (.+)")
DETAIL = re.compile(r"#(\d+) [\d.]+ (.*\S)")
WIDTH = 120
# The error of a failed build contains so many lines of its output.
LAST_LINES = 20


class BuildProgress(Progress):
    """The progress of a build: its newest step, and what the command of that step printed last."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state = f"building the image of {name}"
        self.steps: dict[str, str] = {}
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    def read(self, output: IO[str]) -> None:
        """Read what the build prints until it ends."""
        for line in map(without_codes, output):
            self.last_lines.append(line.rstrip())
            if step := STEP.match(line):
                self.steps[step[1]] = f"{step[2].removeprefix(f'{self.name} ')}: {step[3]}"
                self.show_step(step[1])
            elif (detail := DETAIL.match(line)) and detail[1] in self.steps:
                self.show_step(detail[1], detail[2])

    def show_step(self, number: str, detail: str = "") -> None:
        step = self.steps[number]
        text = f"{step[: WIDTH // 2]} ... {detail}" if detail else step
        self.state = f"building {self.name}, step {text}"[:WIDTH]


def build(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `docker compose build` with a progress line. Raise with the end of its messages if it fails."""
    progress = BuildProgress(name)
    with subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout
        follow(process, process.stdout, progress)
    if process.returncode:
        raise UserError(f"the image of {name} could not be built:\n" + "\n".join(progress.last_lines))
