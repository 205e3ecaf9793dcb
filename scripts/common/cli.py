"""How every command here ends: what a person can mend is one sentence on stderr and exit code 1, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from scripts.common.prometheus import PrometheusError
from scripts.common.settings import UserError
from scripts.common.triton import TritonError

# No emoji: what users say may have colons around it.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def run(main: Callable[[], int | None]) -> None:
    try:
        sys.exit(main() or 0)
    except (UserError, TritonError, PrometheusError, OSError) as error:
        err.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
