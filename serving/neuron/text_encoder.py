"""Task `text-encoder` on AWS Neuron: packs texts of any length into the cheapest of the compiled shapes."""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders.packed import PackedEncoder
from serving.encoders.plan import SHORT, Encoder
from serving.neuron.cores import Cores
from serving.neuron.frameworks import call_torchscript, load_torchscript
from serving.neuron.libraries import imported, loading
from serving.neuron.shapes import Shapes
from serving.triton.parameters import version_file
from serving.triton.types import ConfigError, Tensors

TIMED_RUNS = 3  # of each shape; the fastest counts


class TextEncoder(PackedEncoder):
    """Serves what export/neuron/compile.py writes."""

    def load_encoder(self, config: dict, args: dict[str, str]) -> Encoder:
        cores = Cores.of_instance(config, args)
        cores.claim()
        outputs = [tensor["name"] for tensor in config["output"]]
        manifest = Manifest.read(version_file(args, "neuron.json"), [tensor["name"] for tensor in config["input"]])
        model = CompiledEncoder(manifest, outputs, cores)
        shapes = Shapes({shape: model.seconds(shape) for shape in manifest.files})
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {cores.count} NeuronCore(s) from {cores.first} on; "
            f"{len(manifest.files)} shapes, up to {shapes.rows} rows and {shapes.lengths[-1]} tokens"
        )
        return Encoder(
            inputs=dict.fromkeys(manifest.inputs, np.int64),
            outputs=outputs,
            per_token={tensor["name"] for tensor in config["output"] if int(tensor["dims"][0]) == -1},
            run=model.run,
            parallel_runs=cores.threads,
            independent_runs=cores.count,
            cost=shapes.cost,
            shape=shapes.shape,
            short=min(SHORT, shapes.lengths[-1]),
        )


@dataclass(frozen=True)
class Manifest:
    """The content of neuron.json: the inputs in the order of the artifacts, and the artifact of each shape."""

    inputs: list[str]
    files: dict[tuple[int, int], Path]  # (rows, tokens) -> TorchScript file

    @classmethod
    def read(cls, path: Path, config_inputs: list[str]) -> Manifest:
        again = "run `make models` again"
        try:
            content = json.loads(path.read_text())
            inputs = [str(name) for name in content["inputs"]]
            files = {(shape["rows"], shape["length"]): path.with_name(shape["file"]) for shape in content["shapes"]}
            if not files or not all(isinstance(size, int) and size > 0 for shape in files for size in shape):
                raise ValueError
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ConfigError(f"{path} is not what `make models` writes: {again}") from None
        if set(inputs) != set(config_inputs):
            both = f"{path} has the inputs {', '.join(inputs)} and config.pbtxt {', '.join(config_inputs)}"
            raise ConfigError(f"{both}: {again}")
        if missing := [file.name for file in files.values() if not file.is_file()]:
            raise ConfigError(f"{path} names {missing[0]}, which is not beside it: {again}")
        return cls(inputs, files)


class CompiledEncoder:
    """Every artifact, loaded on every core of the instance."""

    def __init__(self, manifest: Manifest, outputs: list[str], cores: Cores) -> None:
        self.torch = imported("torch")
        imported("torch_neuronx")  # makes torch.jit.load() load onto Neuron
        self.manifest = manifest
        self.outputs = outputs
        self.cores = cores
        # The runtime puts each load on the next core, so the first replicas of all shapes share the first core.
        self.replicas = {
            shape: [load_torchscript(self.torch, file, cores) for _ in range(cores.count)]
            for shape, file in manifest.files.items()
        }
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(cores.threads_per_core):
            for core in range(cores.count):
                self.free.put(core)

    def run(self, requested: list[str] | None, feed: Tensors) -> list[np.ndarray]:
        """Run inputs of a compiled shape on a core that is free."""
        tensors = [self.torch.from_numpy(feed[name]) for name in self.manifest.inputs]
        core = self.free.get()
        try:
            outputs = call_torchscript(self.torch, self.replicas[tensors[0].shape][core], tensors, self.outputs)
        finally:
            self.free.put(core)
        return [outputs[name].astype(np.float32, copy=False) for name in requested or self.outputs]

    def seconds(self, shape: tuple[int, int]) -> float:
        feed = {name: np.ones(shape, np.int64) for name in self.manifest.inputs}
        times = []
        for _ in range(TIMED_RUNS):
            start = time.perf_counter()
            with loading(self.manifest.files[shape], self.cores):
                self.run(None, feed)
            times.append(time.perf_counter() - start)
        return min(times)
