"""Give builds the packages that this machine's pip finds, through a pip configuration as companies use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOL_SOCKET, socket

import psutil

from tests.support.http_servers import files, serving

PORT = 8470


def pip_setting(name: str) -> list[str]:
    """Return the words of a setting of this machine's pip; none if it is not set."""
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def gateway() -> str:
    """Return this machine's address on Docker's bridge; builds reach it, other machines do not."""
    # Read it from the interface, because engine 20.10 does not name the gateway before its first restart.
    name = '{{index .Options "com.docker.network.bridge.name"}}'
    command = ["docker", "network", "inspect", "bridge", "--format", name]
    bridge = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return next(address.address for address in psutil.net_if_addrs()[bridge] if address.family == AF_INET)


def free_port() -> int:
    """Return the usual port if it is free, because Docker caches layers by this address, too."""
    with socket() as probe:
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((gateway(), PORT))
            return PORT
    return 0


@contextmanager
def pip_configuration(path: Path) -> Iterator[Path]:
    """Write the configuration, for a build's `--secret id=pip_conf,src=`, and serve its addresses meanwhile."""
    with ExitStack() as stack:
        links = pip_setting("find-links")
        for number, link in enumerate(links):
            if Path(link).is_dir():
                links[number] = stack.enter_context(serving(files(Path(link)), (gateway(), free_port()))) + "/"
        # No `cert`: Debian's pip and every pip since 24.2 trust the system's certificates; base-images.sh adds ours.
        lines = ["[global]"]
        if links:
            lines += [f"find-links = {' '.join(links)}", f"trusted-host = {gateway()}"]
        path.write_text("\n".join(lines) + "\n")
        yield path
