"""Terminal output, and the end of every command: an error that the user can correct is a sentence, not a traceback."""

from __future__ import annotations

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
