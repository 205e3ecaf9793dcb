"""Terminal output, and the end of every command: an error that the user can correct is a sentence, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from scripts.common.prometheus import PrometheusError
from scripts.common.settings import UserError
from scripts.common.triton import TritonError

# No emoji: a text between colons must stay as the user wrote it.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def call(command: list[str], environment: dict[str, str]) -> int:
    """Run a command, wait until it has ended, also after Ctrl-C, which reaches it too, and return its exit code."""
    interrupted = False
    with subprocess.Popen(command, env=environment) as process:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                interrupted = True
            else:
                return 130 if interrupted else code


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit with its code: 1 after an error, 130 after Ctrl-C."""
    try:
        sys.exit(main() or 0)
    except (UserError, TritonError, PrometheusError, OSError) as error:
        err.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
