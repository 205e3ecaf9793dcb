"""A process that looks like the supervisord of a state folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.stack.local.supervisor import MODULE

PROGRAM = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def supervisord_stand_in(state: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the process, and the port on which its child listens."""
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", parent, PROGRAM, "-m", MODULE],
        env=os.environ | {"STATE": str(state)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()
