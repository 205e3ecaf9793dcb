"""Find or unpack the local runtime's programs. Nothing is installed system-wide, and nothing needs root."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton_transformers.cli import err
from triton_transformers.files import exclusive
from triton_transformers.settings import ROOT, UserError

BACKENDS = ROOT / "images/triton/backends"
GRAFANA_NAMES = ("grafana", "grafana-server")
MIN_GRAFANA = 11  # the dashboards use its schema


def triton(state: Path) -> Path:
    """Make a TRITON_HOME of links to PyPI's server, its Python backend with this Python's stub, and our backends.

    The wheel's libraries find each other by relative paths, so its layout is kept.
    """
    packages = Path(site.getsitepackages()[0])
    wheel = packages / "pytriton/tritonserver"
    stub = wheel / f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"
    if not stub.exists():
        raise UserError(f"the Triton wheel has no stub for Python {sys.version_info.major}.{sys.version_info.minor}")
    home = state / "triton/pytriton/tritonserver"
    shutil.rmtree(state / "triton", ignore_errors=True)
    python = home / "backends/python"
    shutil.copytree(wheel / "backends/python", python)
    shutil.copy(stub, python)
    # As in images/pip.sh.
    (packages / "triton-transformers.pth").write_text(f"{ROOT}\n")
    for backend in BACKENDS.glob("*/model.py"):
        (home / "backends" / backend.parent.name).symlink_to(backend.parent)
    for part in ("bin", "caches"):
        (home / part).symlink_to(wheel / part)
    # The stub's RPATH leads to this folder.
    libraries = state / "triton/nvidia_pytriton.libs"
    libraries.mkdir()
    for library in (*(packages / "nvidia_pytriton.libs").iterdir(), *filter(None, [libpython(state)])):
        (libraries / library.name).symlink_to(library)
    return home


def libpython(state: Path) -> Path | None:
    """Return the libpython that the stub links to; None if the loader finds a suitable one by itself.

    Prefer this Python's own: its modules, such as `ssl`, may need functions that another 3.11 does not have.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    soname = f"{name}.so.1.0"
    # LIBDIR is wrong if this Python was moved after it was built.
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if (own := Path(folder, soname)).exists():
            return own
    unpacked = None
    try:
        library = ctypes.CDLL(soname)
    except OSError:
        package = debian_package(name, state)
        if package is None:
            raise UserError(
                f"Triton's Python backend needs {soname}, which this machine lacks: install {name}"
            ) from None
        unpacked = next(package.rglob(soname))
        library = ctypes.CDLL(str(unpacked))
    if (release := release_of(library)) < sys.version_info[:3]:
        raise UserError(
            f"{sys.executable} is Python {platform.python_version()}, built without a shared library, and "
            f"{unpacked or soname} is of the older {'.'.join(map(str, release))}, which cannot load its modules: set "
            "PYTHON to a Python with a shared library, such as Debian's /usr/bin/python3, and remove .venv"
        )
    return unpacked


def release_of(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the release of a libpython, such as (3, 11, 2)."""
    library.Py_GetVersion.restype = ctypes.c_char_p
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", library.Py_GetVersion().decode())
    assert version
    return tuple(map(int, version.groups()))


def python_path(requirement: str, state: Path) -> str:
    """Return PYTHONPATH for programs that import transformers: the folder of TRANSFORMERS, then the user's own."""
    return os.pathsep.join(filter(None, (transformers(requirement, state), os.environ.get("PYTHONPATH"))))


def transformers(requirement: str, state: Path) -> str:
    """Install the release of transformers that the user set, and return its folder; nothing for the locked release."""
    if requirement == "transformers":
        return ""
    target = state / "transformers" / hashlib.sha256(requirement.encode()).hexdigest()[:12]
    if target.exists():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        exclusive(target.parent, "another command is installing a transformers"),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".installing-") as folder,
    ):
        if target.exists():
            return str(target)
        # uv installs its tokenizers and hub client beside it. The lock constrains its other dependencies, because the
        # server loads them from its own packages, too.
        command = ["scripts/make/locked.sh", sys.prefix, "--target", f"{folder}/packages", requirement]
        environment = os.environ | {"TRANSFORMERS": requirement, "TORCH_INDEX": ""}
        with err.status(f"TRANSFORMERS: installing {requirement}"):
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"TRANSFORMERS={requirement}: uv could not install it:\n{done.stderr.strip()[-1000:]}")
        (Path(folder) / "packages").rename(target)
    return str(target)


def prometheus_flags(binary: Path, state: Path) -> str:
    """Return the flag for the pages of an unpacked Prometheus, which looks for them where a package installs them."""
    assets = state / "debian/prometheus/usr/share/prometheus/web"
    return f"--web.local-assets={assets}/" if binary.is_relative_to(state) else ""


def prometheus(state: Path) -> Path | None:
    """Return the Prometheus on the PATH, else the one of Debian's package; None without either."""
    if on_path := shutil.which("prometheus"):
        return Path(on_path)
    unpacked = debian_package("prometheus", state)
    return unpacked and unpacked / "usr/bin/prometheus"


@dataclass(frozen=True)
class Grafana:
    """An unpacked or installed Grafana."""

    binary: Path
    home: Path

    @property
    def command(self) -> str:
        """Return the subcommand that serves: newer releases have one binary for everything."""
        return "server" if self.binary.name == "grafana" else ""

    def release(self) -> int:
        """Return the major release, 11 for 11.6.0; 0 if it does not print one."""
        try:
            version = subprocess.run([self.binary, "-v"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            return 0
        match = re.search(r"(\d+)\.\d+\.\d+", version)
        return int(match[1]) if match else 0


def grafana(home: Path | None) -> Grafana | None:
    """Return the Grafana in GRAFANA_HOME, else on the PATH; None without either. No package index has it."""
    if home:
        for name in GRAFANA_NAMES:
            if os.access(home / "bin" / name, os.X_OK):
                return Grafana(home / "bin" / name, home)
        raise UserError(f"GRAFANA_HOME={home}: there is neither bin/grafana nor bin/grafana-server in it")
    for binary in filter(None, map(shutil.which, GRAFANA_NAMES)):
        # An unpacked archive has its files beside the binary, a distribution's package elsewhere.
        for folder in (Path(binary).resolve().parents[1], Path("/usr/share/grafana")):
            if (folder / "conf/defaults.ini").exists():
                return Grafana(Path(binary), folder)
    return None


def debian_package(name: str, state: Path) -> Path | None:
    """Unpack Debian's package under the state folder without installing it; None if that is impossible here."""
    target = state / "debian" / name
    if target.exists():
        return target
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    (state / "debian").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state / "debian", prefix=".unpacking-") as folder:
        work = Path(folder)
        # A private package list, because the system's belongs to root and may be empty.
        for part in ("lists/partial", "cache/archives/partial"):
            (work / part).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
        apt += ["-o", "APT::Sandbox::User=" + ("root" if os.geteuid() == 0 else "")]
        try:
            subprocess.run([*apt, "update"], cwd=work, check=True, capture_output=True, timeout=300)
            subprocess.run([*apt, "download", name], cwd=work, check=True, capture_output=True, timeout=300)
            (package,) = work.glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True, capture_output=True, timeout=120)
        except (subprocess.SubprocessError, ValueError):
            return None
        (work / "root").rename(target)
    return target
