"""Text encoders compiled for some shapes: texts of any length, packed into the cheapest of them."""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from neuron.cores import Cores
from neuron.frameworks import call_torchscript, load_torchscript
from neuron.libraries import imported, loading
from neuron.shapes import Shapes
from shared.errors import ConfigError
from shared.packed_encoder import Encoder, PackedEncoder
from shared.parameters import version_file

TIMED = 3  # runs of each shape, of which the best counts


class TextEncoder(PackedEncoder):
    """Task `text-encoder`: what scripts/neuron/compile.py makes."""

    def load_encoder(self, config: dict, args: dict[str, str]) -> Encoder:
        cores = Cores.of(config, args)
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
            cost=shapes.cost,
            shape=shapes.shape,
        )


@dataclass(frozen=True)
class Manifest:
    """neuron.json: the inputs in the artifacts' order, and which artifact takes which rows and tokens."""

    inputs: list[str]
    files: dict[tuple[int, int], Path]

    @classmethod
    def read(cls, path: Path, stated: list[str]) -> Manifest:
        again = "run `make models` again"
        try:
            said = json.loads(path.read_text())
            inputs = [str(name) for name in said["inputs"]]
            files = {(each["rows"], each["length"]): path.with_name(each["file"]) for each in said["shapes"]}
            if not files or not all(isinstance(size, int) and size > 0 for shape in files for size in shape):
                raise ValueError
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ConfigError(f"{path} is not what `make models` writes: {again}") from None
        if set(inputs) != set(stated):
            both = f"{path} has the inputs {', '.join(inputs)} and config.pbtxt {', '.join(stated)}"
            raise ConfigError(f"{both}: {again}")
        if missing := [file.name for file in files.values() if not file.is_file()]:
            raise ConfigError(f"{path} names {missing[0]}, which is not beside it: {again}")
        return cls(inputs, files)


class CompiledEncoder:
    """Every artifact on every core of the instance."""

    def __init__(self, manifest: Manifest, outputs: list[str], cores: Cores) -> None:
        self.torch = imported("torch")
        imported("torch_neuronx")  # with it, what torch loads runs on Neuron
        self.manifest = manifest
        self.outputs = outputs
        self.cores = cores
        # Each load goes to the next core, so that the first of each shape shares the first core, and so on.
        self.replicas = {
            shape: [load_torchscript(self.torch, file, cores) for _ in range(cores.count)]
            for shape, file in manifest.files.items()
        }
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(cores.threads_each):
            for core in range(cores.count):
                self.free.put(core)

    def run(self, wanted: list[str] | None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Of a shape that there is, on a core that has nothing to do."""
        tensors = [self.torch.from_numpy(feed[name]) for name in self.manifest.inputs]
        core = self.free.get()
        try:
            found = call_torchscript(self.torch, self.replicas[tensors[0].shape][core], tensors, self.outputs)
        finally:
            self.free.put(core)
        return [found[name].astype(np.float32, copy=False) for name in wanted or self.outputs]

    def seconds(self, shape: tuple[int, int]) -> float:
        feed = {name: np.ones(shape, np.int64) for name in self.manifest.inputs}
        times = []
        for _ in range(TIMED):
            start = time.perf_counter()
            with loading(self.manifest.files[shape], self.cores):
                self.run(None, feed)
            times.append(time.perf_counter() - start)
        return min(times)
