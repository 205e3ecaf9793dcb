"""The install: real calls of uv and pip on an index of this machine, PyTorch's index, and pip's settings."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pip
import pytest

from tests.support.http_servers import files, serving
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.slow

PYPROJECT = """[project]
name = "checkout"
version = "1"
requires-python = ">=3.11"
[dependency-groups]
install = []
tools = ["six"]
stack = ["six", "torch"]
dev = []
"""


LOCKED = """[[package]]
name = "{name}"
version = "1.0"
source = {{ registry = "https://pypi.org/simple" }}
wheels = [{{ url = "https://pypi.invalid/{name}-1.0-py3-none-any.whl", hash = "sha256:{digest}" }}]
"""
PROJECT = """[[package]]
name = "checkout"
version = "1"
source = { virtual = "." }
[package.dev-dependencies]
tools = [{ name = "six" }]
stack = [{ name = "six" }, { name = "torch" }]
"""


def is_of_installers(name):
    """Return whether a variable of this machine would change what pip and uv do."""
    return name.startswith(("PIP_", "UV_", "SSL_", "XDG_", "TRITON_SETTINGS")) or "CA_BUNDLE" in name


class Checkout:
    """A checkout with a package index of its own, whose environment already has uv."""

    def __init__(self, folder):
        self.folder = folder
        self.index = folder / "index"
        shutil.copytree(ROOT / "scripts/make", folder / "scripts/make")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        self.lock(six=self.publish("six"), torch=self.publish("torch"))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
        (packages,) = folder.glob(".venv/lib/python3*/site-packages")
        (packages / "pip").symlink_to(Path(pip.__file__).parent)
        shutil.copy(shutil.which("uv", path=f"{ROOT}/.venv/bin"), folder / ".venv/bin")
        self.pip_conf = folder / "pip.conf"

    def publish(self, name, version="1.0", index=None, text=""):
        """Write a wheel into an index, and return its digest."""
        page = (index or self.index) / name
        page.mkdir(parents=True, exist_ok=True)
        path = page / f"{name}-{version}-py3-none-any.whl"
        with ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}.py", text)
            about = f"{name}-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        links = [f'<a href="{file.name}">{file.name}</a>' for file in page.glob("*.whl")]
        (page / "index.html").write_text("".join(links))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def lock(self, **digests):
        """Write uv.lock: the packages at version 1.0, and our uv, as if PyPI had them."""
        uv = re.search(r'\[\[package\]\]\nname = "uv"\n(.+\n)*', (ROOT / "uv.lock").read_text())[0]
        packages = [LOCKED.format(name=name, digest=digest) for name, digest in digests.items()]
        head = 'version = 1\nrevision = 3\nrequires-python = ">=3.11"\n'
        (self.folder / "uv.lock").write_text("\n".join([head, *packages, uv, PROJECT]))

    def install(self, group, **variables):
        """Return the exit code and the output of an install; pip's configuration is this checkout's alone."""
        own = {name: value for name, value in os.environ.items() if not is_of_installers(name)}
        own |= {"XDG_CONFIG_DIRS": str(self.folder), "PIP_CONFIG_FILE": str(self.pip_conf), "no_proxy": "127.0.0.1"}
        own |= {"UV_CACHE_DIR": f"{self.folder}/cache", "PYTHON": sys.executable}
        own |= {"TRITON_SETTINGS_NAMES": "TORCH_INDEX"} | variables
        done = subprocess.run(
            ["scripts/make/install.sh", ".venv", group],
            cwd=self.folder,
            env=own,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def installed(self):
        return {
            "-".join(path.stem.split("-")[:2]) for path in self.folder.glob(".venv/lib/*/site-packages/*.dist-info")
        }


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    with serving(files(checkout.index)) as url:
        checkout.url = url
        checkout.pip_conf.write_text(f"[global]\nindex-url = {url}\n")
        yield checkout


def test_packages_come_at_locked_versions_from_pips_index(checkout):
    checkout.publish("six", "2.0")
    code, printed = checkout.install("tools")
    assert code == 0, printed
    assert "six-1.0" in checkout.installed()
    assert "Installed 1 package in" in printed
    assert " + six" not in printed  # the list has 125 lines
    assert re.search(r"^installed in \d+ s$", printed, re.MULTILINE)
    code, printed = checkout.install("tools")  # again
    assert code == 0, printed


def test_file_with_another_hash_is_refused(checkout):
    checkout.publish("six", text="import os")
    code, printed = checkout.install("tools")
    assert code == 1
    assert "Hash mismatch" in printed
    assert "error: uv could not install the packages: see its message above" in printed


def test_unreachable_index_is_an_error_that_names_the_next_step(checkout):
    checkout.pip_conf.write_text(f"[global]\nindex-url = http://127.0.0.1:{free_ports(1)[0]}\n")
    code, printed = checkout.install("tools", UV_HTTP_RETRIES="0")
    assert code == 1
    assert printed.endswith("Run the same command again to continue\n")


def test_only_torch_comes_from_its_index(checkout, tmp_path):
    other = tmp_path / "other"
    for name in ("torch", "six"):
        checkout.publish(name, "1.0+cpu", other)
    with serving(files(other)) as url:
        code, printed = checkout.install("stack", TORCH_INDEX=url)
    assert code == 0, printed
    assert {"torch-1.0+cpu", "six-1.0"} <= checkout.installed()


@pytest.mark.parametrize("path", [None, "empty"])
def test_torch_comes_from_the_other_index_if_its_own_fails(checkout, path):
    url = f"{checkout.url}/{path}" if path else f"http://127.0.0.1:{free_ports(1)[0]}"
    code, printed = checkout.install("stack", TORCH_INDEX=url)
    assert code == 0, printed
    assert (
        f"TORCH_INDEX={url} does not answer, or lacks torch==1.0 for this machine: PyTorch comes from PyPI" in printed
    )
    assert {"torch-1.0", "six-1.0"} <= checkout.installed()


def test_half_made_environment_is_made_again(checkout):
    (checkout.folder / ".venv/bin/python").unlink()
    (checkout.folder / ".venv/bin/uv").write_bytes(b"")
    code, printed = checkout.install("tools", UV_HTTP_RETRIES="0", PIP_RETRIES="0")
    assert (code, "pip could not install uv" in printed) == (1, True), printed  # the index of this test has no uv
    assert (checkout.folder / ".venv/bin/pip").exists()


PRINT_ENVIRONMENT = """#!/bin/sh
[ "$1" != --version ] || exec echo uv {version} x
[ "$1" != cache ] || exec echo {cache}
echo "arguments=$*"
exec env
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Return a function that returns uv's environment for a configuration of pip."""
    for name in filter(is_of_installers, [*os.environ]):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", "/home/ada")
    version = re.search(r'^name = "uv"\nversion = "(.*)"', (ROOT / "uv.lock").read_text(), re.MULTILINE)[1]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "bin/uv").write_text(PRINT_ENVIRONMENT.format(version=version, cache=tmp_path / "cache"))
    (tmp_path / "bin/uv").chmod(0o755)

    def of(configuration, **variables):
        (tmp_path / "pip.conf").write_text(configuration)
        done = subprocess.run(
            ["scripts/make/uv.sh", tmp_path, "pip", "install", "torch"],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    return of


CONFIGURATION = """
[global]
index-url = https://mirror.example/simple
extra-index-url = https://a.example/simple
find-links = /wheels
    ~/more
cert = /etc/company.pem
client-cert = /etc/client.pem
proxy = http://proxy.example:3128
trusted-host = a.example b.example
timeout = 180
no-index = true
[install]
extra-index-url = https://b.example/simple
    https://c.example/simple
"""


def test_configuration_of_pip_counts_for_uv(environment):
    expected = {
        "UV_DEFAULT_INDEX": "https://own.example/simple",
        "UV_INDEX": "https://own.example/simple https://b.example/simple https://c.example/simple",
        "UV_FIND_LINKS": "/wheels,/home/ada/more",
        "UV_INSECURE_HOST": "a.example b.example",
        "UV_HTTP_TIMEOUT": "180",
        "SSL_CERT_FILE": "/etc/company.pem",
        "SSL_CLIENT_CERT": "/etc/client.pem",
        "ALL_PROXY": "http://proxy.example:3128",
        "arguments": "pip install torch --no-index",
    }
    assert expected.items() <= environment(CONFIGURATION, UV_DEFAULT_INDEX="https://own.example/simple").items()


def test_variables_replace_the_configuration_of_pip(environment):
    configuration = "[global]\ncert = /etc/company.pem\nno-index = false\n"
    found = environment(configuration, PIP_CERT="", REQUESTS_CA_BUNDLE="/etc/bundle.pem")
    assert (found["SSL_CERT_FILE"], found["arguments"]) == ("/etc/bundle.pem", "pip install torch")


def test_cache_that_cannot_be_written_is_not_used(environment, tmp_path):
    assert "UV_NO_CACHE" not in environment("")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("a file")
    assert environment("")["UV_NO_CACHE"] == "1"


def test_wrong_configuration_of_pip_is_an_error_with_its_message(checkout):
    checkout.pip_conf.write_text("index-url = no section\n")
    code, printed = checkout.install("tools")
    assert (code, "pip.conf" in printed, "error: pip cannot read its configuration" in printed) == (1, True, True)
