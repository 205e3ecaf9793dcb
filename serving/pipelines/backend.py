"""Serves a pipeline of transformers: its inputs, parameters and answers, and rows of many clients in one call."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from serving.engines import pretrained
from serving.engines.lean_transformers import transformers
from serving.engines.positions import bound_texts, check_new_tokens, position_limit
from serving.pipelines.classes import open_pipeline, sampling_rate
from serving.pipelines.graph import GRAPH, use_graph
from serving.pipelines.inputs import Inputs, Row
from serving.pipelines.media import MediaDecoder
from serving.pipelines.outputs import encoded
from serving.triton.backend import BatchBackend
from serving.triton.parameters import flag_parameter, int_parameter, parameter
from serving.triton.types import BadRequest, InstanceArgs, ModelConfig, Tensors
from triton_transformers.torch_messages import is_of_state

OUTPUTS = "outputs"
# The errors that come from the server's state, not from a request.
OWN_ERRORS = (MemoryError, torch.OutOfMemoryError, OSError, ImportError)
# The parameters of rows that run alone: a seed gives the same answer alone only, and transformers reads the language of
# a batch from its first row.
ALONE = {"seed", "return_language"}


class Place(NamedTuple):
    """The place of a row among those of its request, where its answer goes."""

    rows: list[Any]
    number: int
    value: Any


class PipelineBackend(BatchBackend[list[Row]]):
    counters = ("runs",)

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.task = parameter(config, "task")
        # 1: rows run alone, because batching them changes answers.
        self.batch_size = int_parameter(config, "batch_size", 1)
        plan = pretrained.plan(config, args)
        with pretrained.space_for(plan, args):
            self.pipe = open_pipeline(
                self.task, plan.folder, plan.device, plan.dtype, flag_parameter(config, "trust_remote_code", False)
            )
            pretrained.copy_weights(self.pipe.model)
            bound_texts(self.pipe.model)
            self.positions = position_limit(self.pipe.model)
            graph = plan.folder / GRAPH
            if graph.is_dir() and (plan.device.type, plan.dtype) == ("cpu", torch.float32):
                use_graph(self.pipe.model, graph)
        self.pool: ThreadPoolExecutor | None = None
        # Rows that run alone run side by side, unless they need a tokenizer, which serves one thread at a time.
        if self.batch_size == 1 and self.pipe.tokenizer is None and plan.device.type == "cpu":
            self.pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=partial(torch.set_num_threads, 1))
        self.media = MediaDecoder(config)
        self.inputs = Inputs(config, self.decode)

    def decode(self, kind: str, data: bytes, where: str, field: str) -> Future[Any]:
        if kind == "audio":
            return self.media.decode(kind, data, where, field, rate=sampling_rate(self.pipe))
        if kind == "video":
            return self.media.decode(kind, data, where, field, frames=self.pipe.model.config.num_frames)
        return self.media.decode(kind, data, where, field)

    def prepare(self, request: pb_utils.InferenceRequest) -> list[Row]:
        return self.inputs.begin({tensor.name(): tensor.as_numpy().ravel().tolist() for tensor in request.inputs()})

    def run_batch(self, jobs: list[list[Row]]) -> list[Tensors | Exception]:
        """Answer the rows of all jobs. A row's error is that of its job."""
        results: list[Any] = [decoded(rows) for rows in jobs]
        groups: dict[str, list[Place]] = defaultdict(list)
        for rows in results:
            for number, row in enumerate(rows if isinstance(rows, list) else ()):
                groups[row.parameters].append(Place(rows, number, row.value))
        for parameters, places in groups.items():
            answers = self.call([place.value for place in places], json.loads(parameters))
            for place, answer in zip(places, answers, strict=True):
                place.rows[place.number] = answer
        return [tensors(rows) if isinstance(rows, list) else rows for rows in results]

    def call(self, values: list[Any], parameters: dict[str, Any]) -> Iterator[bytes | Exception]:
        """Yield the answer of each value. If a batch fails, its rows run alone, so that only one gets the error."""
        size = 1 if ALONE & parameters.keys() else self.batch_size
        batches = [values[start : start + size] for start in range(0, len(values), size)]
        each: Callable[..., Iterator[Any]] = map
        if self.pool and len(batches) > 1 and not ALONE & parameters.keys():
            each = self.pool.map
        for answers in each(lambda batch: list(self.call_together(batch, parameters)), batches):
            yield from answers

    def call_together(self, batch: list[Any], parameters: dict[str, Any]) -> Iterator[bytes | Exception]:
        self.metrics.add(runs=1)
        try:
            check_new_tokens(parameters, self.positions)
            yield from [encoded(answer) for answer in run(self.pipe, batch, parameters)]
        except Exception as error:
            if len(batch) == 1:
                yield as_request_error(error, parameters)
            else:
                for value in batch:
                    yield from self.call_together([value], parameters)

    def finalize(self) -> None:
        self.media.close()
        super().finalize()


def decoded(rows: list[Row]) -> list[Row] | Exception:
    """Return the rows of a request once their files are decoded, or the error of one."""
    try:
        return [row.decoded() for row in rows]
    except Exception as error:
        return error


def tensors(rows: list[Any]) -> Tensors | Exception:
    """Return the outputs of a request, or the error of its first row that has one."""
    if error := next((row for row in rows if isinstance(row, Exception)), None):
        return error
    return {OUTPUTS: np.array(rows, np.object_).reshape(-1, 1)}


def run(pipe: Any, values: list[Any], parameters: dict[str, Any]) -> list[Any]:
    """Return the answers of a call, in a batch if there are several values."""
    values = [ready(value) for value in values]
    parameters = copy.deepcopy(parameters)  # pipelines change what they get
    if (seed := parameters.pop("seed", None)) is not None:
        transformers.set_seed(int(seed))
    has_duration = parameters.pop("return_duration", False)
    if len(values) == 1:
        answers: list[Any] = [pipe(values[0], **parameters)]
    else:
        answers = list(pipe(values, batch_size=len(values), **parameters))
    if len(answers) != len(values):
        raise RuntimeError(f"{len(values)} rows got {len(answers)} answers")
    for value, answer in zip(values, answers, strict=True) if has_duration else ():
        answer["duration"] = len(value) / sampling_rate(pipe)
    return answers


def ready(value: Any) -> Any:
    """Return decoded images as those of Pillow, which pipelines take, and tables and chats as copies of their own."""
    from PIL import Image

    if isinstance(value, np.ndarray):
        return Image.fromarray(value) if value.ndim == 3 and value.dtype == np.uint8 else value
    if isinstance(value, dict):
        return {key: ready(part) for key, part in value.items()}
    return [ready(part) for part in value] if isinstance(value, list) else value


def as_request_error(error: Exception, parameters: Mapping[str, Any]) -> Exception:
    """Return the error for the client. At assembly the pipeline answered, so what it raises is about the request.

    Only a ValueError of transformers has a sentence for people.
    """
    of_state = isinstance(error, RuntimeError) and is_of_state(str(error))
    if of_state or isinstance(error, (BadRequest, *OWN_ERRORS)):
        return error
    names = f" with the parameters {', '.join(parameters)}" if parameters else ""
    reason = f": {' '.join(str(error).split())[:300]}" if isinstance(error, ValueError) else ""
    # transformers' own words, which name a parameter or not.
    fields = [name for name in {**parameters, **parameters.get("generate_kwargs", {})} if name in reason]
    return BadRequest(f"the pipeline does not take this input{names}{reason}", *fields)
