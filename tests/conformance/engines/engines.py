"""The engines that continue texts, as the suite runs them: vLLM is a stand-in on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import python_backend
from tests.support.served import assemble
from triton_transformers.engines import OPENVINO, TRANSFORMERS, VLLM, TextEngine
from triton_transformers.settings import ROOT

# vLLM's backend sets them for the whole process.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
)


@dataclass(frozen=True)
class Engine:
    """A row of the contract, and what tests need to run it."""

    row: TextEngine
    form: str = ""  # the FORMAT that the suite assembles
    stand_in: str = ""  # folder below tests/support
    packages: tuple[str, ...] = ()  # that the stand-in has
    kind: str = "CPU"
    cached_tokens: tuple[int | None, int | None] = (0, 0)  # of the same prompt, sent twice

    def load(self, assembled: Path, tokens: int, **parameters: object) -> Any:
        """Return a backend that has loaded the model."""
        config = {"model_transaction_policy": {"decoupled": True}}
        values = {"cache_gigabytes": 1, "max_new_tokens": tokens, "client_grammars": 1} | parameters
        backend = getattr(importlib.import_module(self.row.module), self.row.backend)()
        backend.initialize(
            python_backend.instance_args(
                assembled / "m", config | python_backend.parameters(**values), model_instance_kind=self.kind
            )
        )
        return backend

    def make(self, weights: Path, folder: Path) -> None:
        assemble(weights, folder, self.form)


ENGINES = (
    Engine(OPENVINO, "openvino-fp32", cached_tokens=(None, None)),
    Engine(TRANSFORMERS, "python"),
    Engine(VLLM, "vllm", "vllm_stand_in", ("vllm",), "GPU", cached_tokens=(0, 48)),
)


@contextlib.contextmanager
def world(engine: Engine) -> Iterator[None]:
    """Put the engine's stand-in on the path, and pretend that there is its hardware."""
    if not engine.stand_in:
        yield
        return
    forget(engine.packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests/support" / engine.stand_in)
        for name in ENVIRONMENT:
            patch.setenv(name, "")  # so that monkeypatch removes it afterwards
            patch.delenv(name)
        if engine.kind == "GPU":
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9, 80e9))
        yield
    forget(engine.packages)


def forget(packages: tuple[str, ...]) -> None:
    for name in [name for name in sys.modules if name.startswith(packages)]:
        del sys.modules[name]
    importlib.invalidate_caches()
