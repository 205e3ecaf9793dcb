"""Checks before anything starts or restarts: whatever this machine lacks becomes one sentence with the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import resource
from importlib.metadata import PackageNotFoundError, version

from triton_transformers.settings import ROOT, Settings, UserError

# One of these has to be importable, or no model runs on Neuron.
NEURON_LIBRARIES = ("torch_neuronx", "torch_neuron")
# supervisord's default of `minfds`.
MIN_OPEN_FILES = 1024


def check_device(settings: Settings) -> None:
    if settings.profile == "cuda" and not gpu_count():
        raise UserError(
            "PROFILE=cuda: CUDA finds no GPU on this machine. Install NVIDIA's driver if it has one, or set PROFILE=cpu"
        )
    if settings.profile == "cuda" and not has_cuda_build():
        raise UserError(
            "PROFILE=cuda: neither ONNX Runtime nor PyTorch is installed with CUDA here. Set RUNTIME=docker, whose "
            "image has both, or set PROFILE=cpu"
        )
    if settings.profile == "neuron" and not any(map(importlib.util.find_spec, NEURON_LIBRARIES)):
        raise UserError(
            f"PROFILE=neuron: Python finds neither {' nor '.join(NEURON_LIBRARIES)} here. Put AWS Neuron's libraries "
            "on PYTHONPATH, set RUNTIME=docker, whose image has them, or set PROFILE=cpu"
        )


def gpu_count() -> int:
    """Return how many GPUs the CUDA driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def has_cuda_build() -> bool:
    """Return whether a build for CUDA is installed, without the seconds that an import takes."""
    torch = installed_version("torch")
    return bool(installed_version("onnxruntime-gpu") or (torch and ("+" not in torch or "+cu" in torch)))


def installed_version(package: str) -> str:
    """Return the package's version, or an empty string if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


def check_paths(settings: Settings) -> None:
    """Raise UserError if Triton's Python processes do not start from these paths. They read paths as ASCII.

    scripts/make/install.sh checks the checkout's path by the same rule, before it installs anything.
    """
    paths = {"": ROOT} | {name: settings.value(name) for name in ("LOCAL_STATE", "MODEL_REPOSITORY")}
    for name, path in paths.items():
        if not re.fullmatch(r"[\w./+@-]+", str(path), re.ASCII):
            raise UserError(
                f"{f'{name}=' if name else ''}{path}: Triton starts its Python backends through a shell that splits "
                f"such a path, or cannot read it. {f'Set {name}' if name else 'Move this checkout'} to a path of ASCII "
                "letters, digits and . _ - + @ /"
            )


def make_folders(settings: Settings, *names: str) -> None:
    """Create the folders of these settings. Raise UserError if one cannot be written."""
    for name in names:
        folder = settings.value(name)
        obstacle = "it is not writable"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            obstacle = error.strerror or obstacle
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{name}={folder} cannot be used ({obstacle}): set {name} to a folder that you may write")


def check_open_files() -> None:
    """Raise UserError if this shell forbids the number of open files that supervisord asks for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or hard >= MIN_OPEN_FILES:
        return
    try:  # root may
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, MIN_OPEN_FILES))
    except (OSError, ValueError):
        raise UserError(
            f"this shell allows a process {hard} open files (`ulimit -Hn`), and the stack needs {MIN_OPEN_FILES}: use "
            "another shell, or raise `nofile` in /etc/security/limits.conf"
        ) from None
