"""Text encoders compiled for some shapes: texts of any length, packed into the cheapest of them."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from neuron.cores import Cores
from neuron.frameworks import imported
from neuron.shapes import Shapes
from shared.config import version_file
from shared.packed import Encoder, PackedRuns

TIMED = 3  # runs of each shape, of which the best counts


class TextEncoder:
    """Task `text-encoder`: what scripts/neuron/compile.py makes."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        cores = Cores.of(config, args)
        cores.claim()
        outputs = [tensor["name"] for tensor in config["output"]]
        model = CompiledEncoder(version_file(args, "neuron.json"), outputs, cores)
        shapes = Shapes({shape: model.seconds(shape) for shape in model.replicas})
        encoder = Encoder(
            inputs=dict.fromkeys(model.inputs, np.int64),
            outputs=outputs,
            per_token={tensor["name"] for tensor in config["output"] if int(tensor["dims"][0]) == -1},
            run=model.run,
            cost=shapes.cost,
            shape=shapes.shape,
        )
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {cores.count} NeuronCore(s) from {cores.first} on; "
            f"{len(model.replicas)} shapes, up to {shapes.rows} rows and {shapes.lengths[-1]} tokens"
        )
        self.runs = PackedRuns(args, config, encoder, at_once=cores.threads)

    def execute(self, requests):
        return self.runs.execute(requests)

    def finalize(self):
        self.runs.close()


class CompiledEncoder:
    """Every artifact on every core of the instance."""

    def __init__(self, manifest: Path, outputs: list[str], cores: Cores) -> None:
        self.torch = imported("torch")
        imported("torch_neuronx")  # with it, what torch loads runs on Neuron
        said = json.loads(manifest.read_text())
        self.inputs: list[str] = said["inputs"]
        self.outputs = outputs
        # Each load goes to the next core, so that the first of each shape shares the first core, and so on.
        self.replicas = {
            (each["rows"], each["length"]): [
                self.torch.jit.load(manifest.with_name(each["file"])) for _ in range(cores.count)
            ]
            for each in said["shapes"]
        }
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(cores.threads_each):
            for core in range(cores.count):
                self.free.put(core)

    def run(self, wanted: list[str] | None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Of a shape that there is, on a core that has nothing to do."""
        tensors = [self.torch.from_numpy(feed[name]) for name in self.inputs]
        core = self.free.get()
        try:
            with self.torch.inference_mode():
                found = self.replicas[tensors[0].shape][core](*tensors)
        finally:
            self.free.put(core)
        if isinstance(found, self.torch.Tensor):
            found = [found]
        return [found[self.outputs.index(name)].float().numpy() for name in wanted or self.outputs]

    def seconds(self, shape: tuple[int, int]) -> float:
        feed = {name: np.ones(shape, np.int64) for name in self.inputs}
        times = []
        for _ in range(TIMED):
            start = time.perf_counter()
            self.run(None, feed)
            times.append(time.perf_counter() - start)
        return min(times)
