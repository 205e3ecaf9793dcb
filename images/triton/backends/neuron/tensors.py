"""Models compiled elsewhere for AWS Neuron, tensors in and tensors out: what gen_triton_model.py's folders are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import triton_python_backend_utils as pb_utils

from neuron import batches
from neuron.batches import Tensors
from neuron.cores import Cores
from neuron.frameworks import BFLOAT16, FRAMEWORKS, numpy_types
from neuron.libraries import ModelFailed
from shared import serving
from shared.backend import BatchBackend
from shared.errors import ConfigError
from shared.parameters import choice_parameter, int_parameter, parameter


class TensorModel(BatchBackend):
    """A model.py may override load() and run(): what is loaded, and what becomes of a batch."""

    counters = ("runs", "padding_rows")

    def set_up(self, config, args):
        self.config = config
        self.cores = Cores.of(self.config, args)
        self.inputs = numpy_types(self.config["input"])
        self.outputs = numpy_types(self.config["output"])
        stated = self.config["input"] + self.config["output"]
        self.halves = {tensor["name"] for tensor in stated if tensor["data_type"] == BFLOAT16}
        self.compiled_rows = int_parameter(self.config, "COMPILED_BATCH_SIZE", 0)
        if self.compiled_rows < 0:
            raise ConfigError(f"COMPILED_BATCH_SIZE must be 1 or more, or 0 for not known, not {self.compiled_rows}")
        self.cores.claim()
        framework = choice_parameter(self.config, "FRAMEWORK", tuple(FRAMEWORKS), "torch-neuronx")
        self.framework = FRAMEWORKS[framework](self.config, self.cores)
        self.batch()
        self.load_all(compiled_model(self.config, args))
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: NeuronCores {self.cores.first} to {self.cores.last}")

    # --- for a model.py to override -----------------------------------------------------------------------------------

    def load(self, path: Path) -> Callable:
        """The compiled model, loaded onto the next of the instance's cores. PyTorch calls it with tensors, in order."""
        return self.framework.load(path)

    def run(self, inputs: Tensors) -> Tensors:
        """A batch, as numpy arrays by the names of config.pbtxt; one request's where they come apart."""
        if not self.compiled_rows and self.parts == 1:
            return self.call(inputs)
        rows = batches.row_count(inputs)
        full = batches.full(rows, self.compiled_rows)
        sizes = batches.sizes(full, 0 if self.framework.splits else self.compiled_rows, self.parts)
        answers = self.call_all(batches.cut(batches.filled(inputs, full), sizes))
        self.metrics.add(padding_rows=full - rows)
        for answer, size in zip(answers, sizes, strict=True):
            batches.check_rows(answer, size)
        return {name: array[:rows] for name, array in batches.joined(answers).items()}

    # --- setting up ---------------------------------------------------------------------------------------------------

    def batch(self) -> None:
        together = choice_parameter(self.config, "BATCH_REQUESTS_TO_NEURON", ("true", "false"), "true") == "true"
        self.batching = self.config["max_batch_size"] > 0
        self.merging = self.batching and together
        inputs, self.sizes = (
            {tensor["name"]: batches.stated_sizes(tensor, self.batching) for tensor in self.config[side]}
            for side in ("input", "output")
        )
        self.rows_vary = all(sizes[:1] == [-1] for sizes in [*inputs.values(), *self.sizes.values()])
        # A request that is kept apart is one core's. Where Triton never merges, one has all cores to itself.
        cut = self.framework.evenly and self.rows_vary and (self.merging or not self.batching)
        self.parts = self.cores.threads if cut else 1
        self.rows_taken: set[int] = set()  # by a model that was not said to take one number of them

    def load_all(self, path: Path) -> None:
        loaded = [self.load(path) for _ in range(self.framework.copies)]
        callers = loaded if self.framework.splits else loaded * self.cores.threads_each
        self.free: SimpleQueue = SimpleQueue()
        for model in callers:
            self.free.put(model)
        # Two, because a request that has its turn waits for the turns of its chunks.
        self.chunks_pool, self.requests_pool = ThreadPoolExecutor(len(callers)), ThreadPoolExecutor(len(callers))

    # --- serving ------------------------------------------------------------------------------------------------------

    def prepare(self, request) -> Tensors:
        return {name: self.array(request, name) for name in self.inputs}

    def array(self, request, name: str) -> np.ndarray:
        tensor = pb_utils.get_input_tensor_by_name(request, name) if name in self.halves else None
        if tensor is None:
            return serving.input_tensor(request, name)
        return self.framework.torch.from_dlpack(tensor.to_dlpack()).float().numpy()

    def run_batch(self, requests: list[Tensors]) -> list[Tensors]:
        if not self.merging:
            return list(self.requests_pool.map(self.checked_run, requests))
        rows = [batches.row_count(request) for request in requests]
        return batches.cut(self.checked_run(batches.joined(requests)), rows)

    def checked_run(self, inputs: Tensors) -> Tensors:
        outputs = self.run(inputs)
        batches.check_sizes(outputs, self.sizes)
        if self.batching:
            batches.check_rows(outputs, batches.row_count(inputs))
        return outputs

    def call_all(self, chunks: list[Tensors]) -> list[Tensors]:
        return [self.call(chunks[0])] if len(chunks) == 1 else list(self.chunks_pool.map(self.call, chunks))

    def call(self, inputs: Tensors) -> Tensors:
        rows = len(next(iter(inputs.values()))) if self.rows_vary else 0
        model = self.free.get()
        try:
            outputs = self.framework.call(model, inputs)
        except ModelFailed as error:
            if self.compiled_rows or not self.rows_vary or rows in self.rows_taken:
                raise
            hint = f"it was given {rows} row(s); if it takes another number only, say so in COMPILED_BATCH_SIZE"
            raise ModelFailed(f"{error} ({hint})") from error
        finally:
            self.free.put(model)
        self.rows_taken.add(rows)
        self.metrics.add(runs=1)
        return outputs

    def respond(self, request, outputs: Tensors):
        wanted = serving.requested_outputs(request, self.outputs)
        if missing := [name for name in wanted if name not in outputs]:
            raise RuntimeError(f"the model gave no output '{missing[0]}'")
        return pb_utils.InferenceResponse([self.tensor(name, outputs[name]) for name in wanted])

    def tensor(self, name: str, array: np.ndarray):
        array = np.atleast_1d(array).astype(self.outputs[name], copy=False)
        if name not in self.halves:
            return pb_utils.Tensor(name, array)
        half = self.framework.torch.from_numpy(np.ascontiguousarray(array)).bfloat16()
        return pb_utils.Tensor.from_dlpack(name, self.framework.torch.utils.dlpack.to_dlpack(half))


def compiled_model(config: dict, args: dict[str, str]) -> Path:
    stated = parameter(config, "COMPILED_MODEL")
    if not stated:
        raise ConfigError("parameter 'COMPILED_MODEL' is missing: where the compiled model is")
    return Path(args["model_repository"]) / stated
