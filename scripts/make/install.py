"""Install locked packages into a virtual environment, and show the progress.

It runs before any package is installed, so it uses the standard library only. Start it with install.sh.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

REFRESH_S = 0.25
# Between two lines in a log file.
LINE_S = 10
PROBE_S = 5
# Group that contains PyTorch -> its size on disk.
SIZES_WITH_TORCH = {
    "stack": "2 GB, or 5 with PyTorch's CUDA build",
    "all": "3 GB, or 6 with PyTorch's CUDA build",
}
# Begins the second part of the lock: all before it belongs to the group `stack`.
SECOND_HEADING = "# Other packages"
# pip's lines about one package: a name with a version, or the path of a file.
PACKAGE = re.compile(r"(?:Collecting|Processing|Requirement already satisfied:) (?:\S*/)?([\w.-]+)")


class Progress:
    """The progress of pip: its output names the packages, and its temporary folder holds its downloads."""

    def __init__(self, venv: Path, downloads: Path, total: int) -> None:
        self.venv = venv
        self.downloads = downloads
        self.total = total
        self.current = ""
        self.collected: set[str] = set()
        self.to_install: set[str] = set()
        self.started = self.printed = time.monotonic()
        self.on_terminal = sys.stdout.isatty()
        self.lock = threading.Lock()

    def read(self, output: IO[str]) -> None:
        """Follow pip's standard output until it ends."""
        for line in output:
            if packages := re.match(r"Installing collected packages: (.*)", line):
                self.to_install = {_normalized(name) for name in packages[1].split(", ")}
            elif package := PACKAGE.match(line):
                # In a file's name, -VERSION follows.
                self.current = re.sub(r"-\d.*", "", package[1])
                self.collected.add(_normalized(self.current))

    def repeat(self, errors: IO[str]) -> None:
        """Print pip's messages, each on a line of its own."""
        for line in errors:
            with self.lock:
                sys.stdout.write("\r\033[K" if self.on_terminal else "")
                sys.stdout.flush()
                sys.stderr.write(line)
                sys.stderr.flush()

    def __str__(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        if self.to_install:
            folders = self.venv.glob("lib/python3*/site-packages/*.dist-info")
            installed = {_normalized(folder.name.split("-")[0]) for folder in folders}
            state = f"installed {len(self.to_install & installed)} of {len(self.to_install)} packages"
        elif self.collected:
            total = f" of {max(self.total, len(self.collected))}" if self.total else ""
            package = f"package {len(self.collected)}{total}: {self.current}"
            state = f"downloaded {_size(self.downloads) / 1e6:.1f} MB, {package}"
        else:
            state = "starting pip"
        return f"  {minutes}:{seconds:02} {state}"

    def show(self) -> None:
        """Redraw the line of a terminal; elsewhere, print a line every LINE_S seconds."""
        with self.lock:
            if self.on_terminal:
                print(f"\r\033[K{str(self)[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            elif time.monotonic() >= self.printed + LINE_S:
                self.printed = time.monotonic()
                print(self, flush=True)

    def clear(self) -> None:
        if self.on_terminal:
            print("\r\033[K", end="", flush=True)


def pip_install(venv: Path, *arguments: str, total: int = 0) -> int:
    """Run pip with a progress line, and return its exit code."""
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(venv, Path(folder), total)
        environment = os.environ | {"TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as pip:
            assert pip.stdout and pip.stderr
            readers = [
                threading.Thread(target=progress.read, args=(pip.stdout,)),
                threading.Thread(target=progress.repeat, args=(pip.stderr,)),
            ]
            for reader in readers:
                reader.start()
            while pip.poll() is None:
                progress.show()
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(REFRESH_S)
            for reader in readers:
                reader.join()
        progress.clear()
        return pip.returncode


def install_torch(venv: Path, lock: str) -> None:
    """Install PyTorch's CPU build from TORCH_INDEX. Without it, the next step takes PyPI's.

    The index serves this one package: as an extra index of everything, it could replace any package of the lock.
    """
    pin = re.search(r"^torch==(\S+)", Path(lock).read_text(), re.MULTILINE)
    if not pin or any(venv.glob(f"lib/python3*/site-packages/torch-{pin[1]}*.dist-info")):
        return
    setting = [str(Path(__file__).with_name("setting.sh")), "TORCH_INDEX"]
    index = subprocess.run(setting, check=True, capture_output=True, text=True).stdout.strip()
    if not answers(f"{index.rstrip('/')}/torch/"):
        reason = "does not answer"
    elif pip_install(venv, "--no-deps", "--retries", "1", "--index-url", index, pin[0], total=1):
        reason = f"has no {pin[0]} for this machine"
    else:
        return
    print(f"TORCH_INDEX={index} {reason}: PyTorch comes from PyPI, perhaps with CUDA (3 GB more)", flush=True)


def answers(url: str) -> bool:
    """Return whether a page can be read within PROBE_S seconds."""
    pages = []

    def read() -> None:
        with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=PROBE_S) as page:
            pages.append(page.status)

    # A thread, because urllib's timeout does not limit the resolution of names.
    probe = threading.Thread(target=read, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return bool(pages)


def make_venv(venv: Path, group: str) -> None:
    """Create the virtual environment if it is missing, half made, or of a Python that is too new for all packages."""
    python = str(venv / "bin/python")
    with suppress(OSError):
        usable = not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
        too_new = "import sys; sys.exit(sys.version_info >= (3, 13))"
        if usable and (group not in SIZES_WITH_TORCH or not subprocess.run([python, "-c", too_new]).returncode):
            return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)


def main() -> int:
    """Install all packages of the lock, or those of one dependency group of pyproject.toml."""
    venv, lock, group = Path(sys.argv[1]), *sys.argv[2:]
    with lock_of(venv):
        return install(venv, lock, group)


@contextmanager
def lock_of(venv: Path) -> Iterator[None]:
    """Wait until no other install works on the same virtual environment."""
    with open(f"{venv}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another command installs into {venv}: waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(venv: Path, lock: str, group: str) -> int:
    packages = "all packages" if group == "all" else f"the packages of the group '{group}'"
    size = f"{SIZES_WITH_TORCH[group]}; " if group in SIZES_WITH_TORCH else ""
    print(f"installing {packages} of {lock} into {venv} ({size}once)", flush=True)
    make_venv(venv, group)
    if group in SIZES_WITH_TORCH:
        install_torch(venv, lock)
        code = pip_install(venv, "--constraint", lock, *pins(lock, group), total=len(pins(lock, group)))
    else:
        # pip knows dependency groups from 25.1 on, and Debian's is older.
        names = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"][group]
        code = pip_install(venv, "--constraint", lock, *names)
    if code:
        sys.exit(f"error: pip could not install {lock}: see its message above. Run the same command again to continue")
    return 0


def pins(lock: str, group: str) -> list[str]:
    """Return the pins of the lock: those before its second heading for the group `stack`, else all."""
    stack, _, rest = Path(lock).read_text().partition(SECOND_HEADING)
    return re.findall(r"^\w\S*==\S+$", stack if group == "stack" else stack + rest, re.MULTILINE)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _size(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip has just removed or renamed it
            sizes.append(path.lstat().st_size)
    return sum(sizes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        sys.exit(130)
