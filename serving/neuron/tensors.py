"""Task `tensors` on AWS Neuron: runs compiled models on tensors. gen_triton_model.py writes their folders."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.neuron import batches
from serving.neuron.cores import Cores
from serving.neuron.frameworks import BFLOAT16, FRAMEWORKS, numpy_types
from serving.neuron.libraries import ModelFailed
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, int_parameter, parameter
from serving.triton.types import ConfigError, Tensors


class TensorModel(BatchBackend):
    """A TritonPythonModel. A subclass may override load() and run()."""

    counters = ("runs", "padding_rows")

    def set_up(self, config, args):
        self.config = config
        self.cores = Cores.of_instance(self.config, args)
        self.inputs = numpy_types(self.config["input"])
        self.outputs = numpy_types(self.config["output"])
        tensors = config["input"] + config["output"]
        self.bfloat16 = {tensor["name"] for tensor in tensors if tensor["data_type"] == BFLOAT16}
        self.compiled_rows = int_parameter(self.config, "COMPILED_BATCH_SIZE", 0)
        if self.compiled_rows < 0:
            raise ConfigError(f"COMPILED_BATCH_SIZE must be at least 1, or 0 if unknown, not {self.compiled_rows}")
        self.cores.claim()
        framework = choice_parameter(self.config, "FRAMEWORK", tuple(FRAMEWORKS), "torch-neuronx")
        self.framework = FRAMEWORKS[framework](self.config, self.cores)
        self.set_up_batches()
        self.load_all(compiled_model(config, args))
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: NeuronCores {self.cores.first} to {self.cores.last}")

    # --- methods that a model.py may override -------------------------------------------------------------------------

    def load(self, path: Path) -> Callable:
        """Load the compiled model onto the next core. The result is called with PyTorch tensors, in their order."""
        return self.framework.load(path)

    def run(self, inputs: Tensors) -> Tensors:
        """Run a batch, or one request if requests stay apart: numpy arrays by the names of config.pbtxt."""
        if not self.compiled_rows and self.parts == 1:
            return self.call(inputs)
        rows = batches.row_count(inputs)
        padded = batches.padded_count(rows, self.compiled_rows)
        sizes = batches.chunk_sizes(padded, 0 if self.framework.splits else self.compiled_rows, self.parts)
        outputs = self.call_all(batches.split(batches.padded(inputs, padded), sizes))
        self.metrics.add(padding_rows=padded - rows)
        for chunk, size in zip(outputs, sizes, strict=True):
            batches.check_rows(chunk, size)
        return {name: array[:rows] for name, array in batches.joined(outputs).items()}

    # --- set-up -------------------------------------------------------------------------------------------------------

    def set_up_batches(self) -> None:
        merge = choice_parameter(self.config, "BATCH_REQUESTS_TO_NEURON", ("true", "false"), "true") == "true"
        self.batching = self.config["max_batch_size"] > 0
        self.merging = self.batching and merge
        inputs, self.output_shapes = (
            {tensor["name"]: batches.config_shape(tensor, self.batching) for tensor in self.config[side]}
            for side in ("input", "output")
        )
        self.rows_vary = all(shape[:1] == [-1] for shape in [*inputs.values(), *self.output_shapes.values()])
        # Requests that stay apart get one core each. If Triton never merges, a request gets all cores.
        cut = self.framework.cuts_evenly and self.rows_vary and (self.merging or not self.batching)
        self.parts = self.cores.threads if cut else 1
        self.accepted_rows: set[int] = set()  # numbers of rows that the model has run without an error

    def load_all(self, path: Path) -> None:
        loaded = [self.load(path) for _ in range(self.framework.copies)]
        callers = loaded if self.framework.splits else loaded * self.cores.threads_per_core
        self.free: SimpleQueue = SimpleQueue()
        for model in callers:
            self.free.put(model)
        # Two pools, because a request in one waits for its chunks in the other.
        self.chunks_pool, self.requests_pool = ThreadPoolExecutor(len(callers)), ThreadPoolExecutor(len(callers))

    # --- serving ------------------------------------------------------------------------------------------------------

    def prepare(self, request) -> Tensors:
        return {name: self.array(request, name) for name in self.inputs}

    def array(self, request, name: str) -> np.ndarray:
        tensor = pb_utils.get_input_tensor_by_name(request, name) if name in self.bfloat16 else None
        if tensor is None:
            return responses.input_tensor(request, name)
        return self.framework.torch.from_dlpack(tensor.to_dlpack()).float().numpy()

    def run_batch(self, requests: list[Tensors]) -> list[Tensors]:
        if not self.merging:
            return list(self.requests_pool.map(self.checked_run, requests))
        rows = [batches.row_count(request) for request in requests]
        return batches.split(self.checked_run(batches.joined(requests)), rows)

    def checked_run(self, inputs: Tensors) -> Tensors:
        outputs = self.run(inputs)
        batches.check_shapes(outputs, self.output_shapes)
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
            if self.compiled_rows or not self.rows_vary or rows in self.accepted_rows:
                raise
            hint = f"given {rows} row(s); if the model takes only another number, set it in COMPILED_BATCH_SIZE"
            raise ModelFailed(f"{error} ({hint})") from error
        finally:
            self.free.put(model)
        self.accepted_rows.add(rows)
        self.metrics.add(runs=1)
        return outputs

    def respond(self, request, outputs: Tensors):
        names = responses.requested_outputs(request, self.outputs)
        if missing := [name for name in names if name not in outputs]:
            raise RuntimeError(f"the model returned no output '{missing[0]}'")
        return pb_utils.InferenceResponse([self.tensor(name, outputs[name]) for name in names])

    def tensor(self, name: str, array: np.ndarray):
        array = np.atleast_1d(array).astype(self.outputs[name], copy=False)
        if name not in self.bfloat16:
            return pb_utils.Tensor(name, array)
        bfloat16 = self.framework.torch.from_numpy(np.ascontiguousarray(array)).bfloat16()
        return pb_utils.Tensor.from_dlpack(name, self.framework.torch.utils.dlpack.to_dlpack(bfloat16))


def compiled_model(config: dict, args: dict[str, str]) -> Path:
    path = parameter(config, "COMPILED_MODEL")
    if not path:
        raise ConfigError("parameter 'COMPILED_MODEL' is missing: set it to the path of the compiled model")
    return Path(args["model_repository"]) / path
