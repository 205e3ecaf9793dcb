"""The engines that continue texts, as the suite runs them: vLLM and Neuron's library are stand-ins on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from serving.neuron.cores import Cores
from tests.support import python_backend
from tests.support.checkpoints import language
from tests.support.served import assemble
from triton_transformers.engines import NEURON, OPENVINO, TRANSFORMERS, VLLM, TextEngine
from triton_transformers.settings import ROOT

# vLLM's backend sets them for the whole process, and Neuron's the last ones.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "NEURON_RT_VISIBLE_CORES",
)
CORES = Cores(4, 4, 1)
LLAMA = "neuronx_distributed_inference.models.llama.modeling_llama"


@dataclass(frozen=True)
class Engine:
    """A row of the contract, and what tests need to run it."""

    row: TextEngine
    form: str = ""  # the FORMAT that the suite assembles; empty: compiled by the stand-in
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


@dataclass(frozen=True)
class Neuron(Engine):
    """The backend `neuron` loads a compiled model, which runs full batches only."""

    compiled_rows: int = field(default=4)

    def make(self, weights: Path, folder: Path) -> None:
        CORES.claim()
        library = importlib.import_module(LLAMA)
        config = {"seq_len": language.CONTEXT, "batch_size": self.compiled_rows, "tp_degree": CORES.count}
        library.NeuronLlamaForCausalLM(str(weights), {"neuron_config": config}).compile(str(folder / "m"))
        (folder / "m/generation_config.json").write_text((weights / "generation_config.json").read_text())
        AutoTokenizer.from_pretrained(weights).save_pretrained(folder / "m")

    def load(self, assembled: Path, tokens: int, **parameters: object) -> Any:
        from serving.neuron import llm
        from serving.neuron.generation import NeuronGeneration

        values = {"COMPILED_MODEL": assembled / "m", "max_new_tokens": tokens, "client_grammars": 1} | parameters
        config = {"model_transaction_policy": {"decoupled": True}} | python_backend.parameters(**values)
        args = python_backend.instance_args(assembled, config)
        shape = llm.CompiledLLM.read(config, args, CORES)
        model_class = f"{LLAMA}.NeuronLlamaForCausalLM"
        backend = NeuronGeneration(shape, CORES, lambda: llm.load(model_class, shape, CORES))
        backend.initialize(args)
        return backend


ENGINES = (
    Engine(OPENVINO, "openvino-fp32", cached_tokens=(None, None)),
    Engine(TRANSFORMERS, "python"),
    Engine(VLLM, "vllm", "vllm_stand_in", ("vllm",), "GPU", cached_tokens=(0, 48)),
    Neuron(NEURON, "", "neuron_stand_in", ("stand_in_", "neuronx_distributed_inference", "optimum.neuron")),
)


@contextlib.contextmanager
def world(engine: Engine, log: Path) -> Iterator[None]:
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
        patch.setenv("NEURON_STAND_IN_LOG", str(log))
        if engine.kind == "GPU":
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9, 80e9))
        yield
    forget(engine.packages)


def forget(packages: tuple[str, ...]) -> None:
    for name in [name for name in sys.modules if name.startswith(packages)]:
        del sys.modules[name]
    importlib.invalidate_caches()
