"""Checks before anything starts or restarts: whatever this machine lacks becomes one sentence with the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

from scripts.common.settings import Settings, UserError

# One of these has to be importable, or no model runs on Neuron.
NEURON_LIBRARIES = ("torch_neuronx", "torch_neuron")


def check_device(settings: Settings) -> None:
    if settings["PROFILE"] == "cuda" and not gpu_count():
        raise UserError(
            "PROFILE=cuda: CUDA finds no GPU on this machine. Install NVIDIA's driver if it has one, or set PROFILE=cpu"
        )
    if settings["PROFILE"] == "cuda" and not has_cuda_build():
        raise UserError(
            "PROFILE=cuda: neither ONNX Runtime nor PyTorch is installed with CUDA here. Set RUNTIME=docker, whose "
            "image has both, or set PROFILE=cpu"
        )
    if settings["PROFILE"] == "neuron" and not any(map(importlib.util.find_spec, NEURON_LIBRARIES)):
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


def check_paths(*paths: object) -> None:
    for path in map(str, paths):
        if not re.fullmatch(r"[\w./+@-]+", path):
            raise UserError(
                f"'{path}': Triton starts its Python backends through a shell that splits such a path. Use one of "
                "letters, digits and . _ - + @ /"
            )
