"""Install the dependency groups of pyproject.toml into a virtual environment with uv, and show the progress.

It runs before any package is installed, so it uses the standard library only. Start it with install.sh.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

REFRESH_S = 0.25
# Between two lines in a log file, and between two equal ones.
LINE_S, EQUAL_LINES_S = 10, 60
PROBE_S = 5
# Group that contains PyTorch -> its size on disk.
SIZES_WITH_TORCH = {
    "stack": "2 GB, or 5 with PyTorch's CUDA build",
    "all": "3 GB, or 6 with PyTorch's CUDA build",
}
# uv reads no configuration of pip. Settings of pip for indexes and connections -> uv's variables.
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
MEGABYTES = {"B": 1e-6, "KiB": 2**10 / 1e6, "MiB": 2**20 / 1e6, "GiB": 2**30 / 1e6}


class Progress:
    """The progress of uv: it names the larger packages when their downloads begin and end."""

    # uv's reports of progress, which the line replaces. Print all other lines: warnings and errors.
    routine = re.compile(
        r" [+~-] \S+==\S+$|Using (Python|CPython) |(Audited|Resolved|Prepared|Uninstalled|Installed) \d+ package|"
        r"Bytecode compiled |\s*(Building|Built) \S+==\S+$"
    )

    def __init__(self) -> None:
        self.state = "looking up packages"
        self.sizes: dict[str, float] = {}  # in MB
        self.downloaded: set[str] = set()
        self.started = self.printed = time.monotonic()
        self.printed_state = ""
        self.on_terminal = sys.stdout.isatty()
        self.lock = threading.Lock()

    def read(self, output: IO[str]) -> None:
        """Read uv's output until it ends, and print the lines that report no progress."""
        for line in output:
            if begun := re.match(r"Downloading (\S+) \(([\d.]+)(\w+)\)", line):
                self.sizes[begun[1]] = float(begun[2]) * MEGABYTES.get(begun[3], 0)
                self.state = self.downloads()
            elif ended := re.match(r" Downloaded (\S+)", line):
                self.downloaded.add(ended[1])
                self.state = self.downloads()
            elif installed := re.match(r"Installed \d+ packages?", line):
                self.state = f"{installed[0].lower()}, compiling their modules"
            elif not self.routine.match(line):
                self.print_message(line)

    def downloads(self) -> str:
        """Describe the downloads, the largest unfinished ones by name."""
        unfinished = sorted(set(self.sizes) - self.downloaded, key=self.sizes.__getitem__, reverse=True)
        done = sum(self.sizes[name] for name in self.downloaded & set(self.sizes))
        text = f"downloaded {done:.0f} of {sum(self.sizes.values()):.0f} MB"
        return f"{text}, now {', '.join(unfinished[:3])}" if unfinished else text

    def print_message(self, line: str) -> None:
        with self.lock:
            sys.stdout.write("\r\033[K" if self.on_terminal else "")
            sys.stdout.flush()
            sys.stderr.write(line)
            sys.stderr.flush()

    def show(self) -> None:
        """Redraw the line of a terminal; elsewhere, print a line for a new state, at most every LINE_S seconds."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        line = f"  {minutes}:{seconds:02} {self.state}"
        with self.lock:
            if self.on_terminal:
                print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            elif time.monotonic() >= self.printed + (LINE_S if self.state != self.printed_state else EQUAL_LINES_S):
                self.printed, self.printed_state = time.monotonic(), self.state
                print(line, flush=True)

    def clear(self) -> None:
        if self.on_terminal:
            print("\r\033[K", end="", flush=True)


def uv_install(venv: Path, lock: str, *arguments: str) -> int:
    """Install packages at the versions of the lock with a progress line, and return uv's exit code."""
    settings = pip_settings(venv)
    command = [f"{venv}/bin/uv", "pip", "install", "--python", f"{venv}/bin/python", "--compile-bytecode"]
    for constraints in (lock, *settings.get("constraint", [])):
        command += ["--constraint", constraints]
    if "no-index" in settings:
        command.append("--no-index")
    environment = uv_environment(settings)
    if not has_cache(venv, environment):
        command.append("--no-cache")
    progress = Progress()
    with subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True) as uv:
        assert uv.stderr
        follow(uv, uv.stderr, progress)
    return uv.returncode


def follow(process: subprocess.Popen[str], output: IO[str], progress: Progress) -> None:
    """Show the progress of a process, which its output reports, until it ends."""
    reader = threading.Thread(target=progress.read, args=(output,))
    reader.start()
    while process.poll() is None:
        progress.show()
        with suppress(subprocess.TimeoutExpired):
            process.wait(REFRESH_S)
    reader.join()
    progress.clear()


@functools.cache  # pip takes half a second
def pip_settings(venv: Path) -> dict[str, list[str]]:
    """Return the values of each setting that pip's files and variables set; variables replace files."""
    command = [f"{venv}/bin/python", "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if listed.returncode:
        sys.exit("error: pip cannot read its configuration: see its message above")
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        settings |= dict(re.findall(rf"^{section}\.([\w-]+)=(.*)$", listed.stdout, re.MULTILINE))
    if ast.literal_eval(settings.get("no-index", "''")).lower() in ("0", "false", "no", "off"):
        del settings["no-index"]
    values = {name: ast.literal_eval(value).split() for name, value in settings.items()}
    return {name: words for name, words in values.items() if words}


def uv_environment(settings: dict[str, list[str]]) -> dict[str, str]:
    """Return the environment of uv, in which pip's settings count where uv has none of its own."""
    # pip takes the best version of all indexes; uv would take the first index that has the package.
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1", "NO_COLOR": "1"}
    for bundle in ("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):  # pip reads these too
        if os.environ.get(bundle):
            environment["SSL_CERT_FILE"] = os.environ[bundle]
    for name, variable in PIP_SETTINGS.items():
        if name in settings:
            values = [os.path.expanduser(value) for value in settings[name]]
            environment[variable] = ("," if name == "find-links" else " ").join(values)
    return environment | os.environ


def has_cache(venv: Path, environment: dict[str, str]) -> bool:
    """Return whether uv can write its cache, which a read-only home does not let it."""
    command = [f"{venv}/bin/uv", "cache", "dir"]
    folder = subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def install_torch(venv: Path, lock: str) -> None:
    """Install PyTorch's CPU build from TORCH_INDEX. Without it, the next step takes PyPI's.

    The index serves this one package: as an extra index of everything, it could replace any package of the lock.
    """
    pin = pin_of(lock, "torch")
    if any(venv.glob(f"lib/python3*/site-packages/{pin.replace('==', '-')}*.dist-info")):
        return
    if "no-index" in pip_settings(venv):
        return
    setting = [str(Path(__file__).with_name("setting.sh")), "TORCH_INDEX"]
    index = subprocess.run(setting, check=True, capture_output=True, text=True).stdout.strip()
    if not answers(f"{index.rstrip('/')}/torch/"):
        reason = "does not answer"
    elif uv_install(venv, lock, "--no-deps", "--default-index", index, pin):
        reason = f"has no {pin} for this machine"
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


def make_venv(venv: Path, lock: str, group: str) -> None:
    """Create the virtual environment if it is missing, half made, or of a Python that is too new for all packages."""
    python, pin = str(venv / "bin/python"), pin_of(lock, "uv")
    usable = False
    with suppress(OSError):
        usable = not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
        too_new = "import sys; sys.exit(sys.version_info >= (3, 13))"
        usable &= group not in SIZES_WITH_TORCH or not subprocess.run([python, "-c", too_new]).returncode
    if not usable:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    if version_of(venv / "bin/uv") != pin:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall"]
        # On standard input, because pip takes hashes from files only.
        if subprocess.run([*pip, "--requirement", "/dev/stdin"], input=line_of(lock, "uv"), text=True).returncode:
            sys.exit(
                f"error: pip could not install {pin}: see its message above. Run the same command again to continue"
            )


def version_of(uv: Path) -> str:
    """Return uv's version as a pin; nothing if it does not run, as after an install that was cut off."""
    with suppress(OSError):
        words = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout.split()
        return "==".join(words[:2])
    return ""


def pin_of(lock: str, package: str) -> str:
    """Return a package with its locked version, as pip and uv take it."""
    return line_of(lock, package).split()[0]


def line_of(lock: str, package: str) -> str:
    """Return the package's line of the lock: its pin and its hashes."""
    line = re.search(rf"^{package}==.*", Path(lock).read_text(), re.MULTILINE)
    assert line, f"{lock} has no {package}"
    return line[0]


def main() -> int:
    """Install one dependency group of pyproject.toml, or all."""
    venv, lock, group = Path(sys.argv[1]), *sys.argv[2:]
    with exclusive(venv):
        return install(venv, lock, group)


@contextmanager
def exclusive(venv: Path) -> Iterator[None]:
    """Wait until no other install works on the same virtual environment, and keep others waiting."""
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
    make_venv(venv, lock, group)
    if group in SIZES_WITH_TORCH:
        install_torch(venv, lock)
    groups = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"] if group == "all" else [group]
    if uv_install(venv, lock, *(f"--group={name}" for name in groups)):
        sys.exit(f"error: uv could not install {lock}: see its message above. Run the same command again to continue")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        sys.exit(130)
