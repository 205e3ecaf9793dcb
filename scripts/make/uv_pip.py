"""Run `uv pip install` with the settings of pip, which uv itself does not read.

uv_pip.py [arguments of `uv pip install`]: runs the uv of the virtual environment whose Python runs this.

It runs before any package is installed, and in builds of images, so it uses the standard library of Python 3.10 only.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

# Settings of pip for indexes and connections -> uv's variables.
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


def install_command(venv: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that installs packages with the uv of a virtual environment, and its environment."""
    settings = pip_settings(venv)
    command = [f"{venv}/bin/uv", "pip", "install"]
    for constraints in settings.get("constraint", []):
        command += ["--constraint", constraints]
    if "no-index" in settings:
        command.append("--no-index")
    environment = uv_environment(settings)
    if not has_cache(venv, environment):
        command.append("--no-cache")
    return command, environment


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


if __name__ == "__main__":
    program, variables = install_command(Path(sys.prefix))
    os.execve(program[0], [*program, *sys.argv[1:]], variables)
