"""Show the progress of a build: one line that moves on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import re
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.markup import escape

from triton_transformers.cli import err, out, without_codes
from triton_transformers.settings import ROOT, UserError

# The lines of BuildKit's plain progress: a step begins, and what its command prints after some seconds.
STEP = re.compile(r"#(\d+) \[([^\]]+)\] (.+)")
DETAIL = re.compile(r"#(\d+) [\d.]+ (.*\S)")
WIDTH = 120
# The error of a failed build contains so many lines of its output.
LAST_LINES = 20
# Between two lines in a log file.
LINE_S = 10


def steps(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the newest step of a build, and what its command printed last."""
    begun: dict[str, str] = {}
    for line in lines:
        number = detail = ""
        if step := STEP.match(line):
            number = step[1]
            begun[number] = f"{step[2].removeprefix(f'{name} ')}: {step[3]}"
        elif found := DETAIL.match(line):
            number, detail = found.groups()
        if number in begun:
            text = f"{begun[number][: WIDTH // 2]} ... {detail}" if detail else begun[number]
            yield f"building {name}, step {text}"[:WIDTH]


def build(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `docker compose build` with a progress line. Raise with the end of its messages if it fails."""
    last_lines: deque[str] = deque(maxlen=LAST_LINES)

    def lines() -> Iterator[str]:
        assert process.stdout
        for line in map(without_codes, process.stdout):
            last_lines.append(line.rstrip())
            yield line

    printed = time.monotonic()
    with (
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
        err.status(f"building the image of {name}") as status,
    ):
        for text in steps(name, lines()):
            status.update(escape(text))
            if not err.is_terminal and time.monotonic() >= printed + LINE_S:
                printed = time.monotonic()
                out.print(escape(text))
    if process.returncode:
        raise UserError(f"the image of {name} could not be built:\n" + "\n".join(last_lines))
