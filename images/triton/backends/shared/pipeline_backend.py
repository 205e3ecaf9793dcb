"""Serves a pipeline of transformers: its inputs, parameters and answers, and rows of many clients in one call."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from shared import pretrained
from shared.backend import BatchBackend
from shared.lean_transformers import transformers
from shared.media import MediaDecoder
from shared.parameters import flag_parameter, int_parameter, parameter
from shared.pipeline_classes import open_pipeline, sampling_rate
from shared.pipeline_inputs import Inputs, Row
from shared.pipeline_outputs import encoded
from shared.types import BadRequest, InstanceArgs, ModelConfig, Tensors

OUTPUTS = "outputs"
# The errors that come from the server's state, not from a request.
OWN_ERRORS = (MemoryError, torch.OutOfMemoryError, OSError, ImportError)


@dataclass(frozen=True)
class Job:
    rows: list[Row]


class PipelineBackend(BatchBackend[Job]):
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
        self.media = MediaDecoder(config)
        self.inputs = Inputs(config, self.decode)

    def decode(self, kind: str, data: bytes, where: str) -> Future[Any]:
        if kind == "audio":
            return self.media.decode(kind, data, where, rate=sampling_rate(self.pipe))
        if kind == "video":
            return self.media.decode(kind, data, where, frames=self.pipe.model.config.num_frames)
        return self.media.decode(kind, data, where)

    def prepare(self, request: pb_utils.InferenceRequest) -> Job:
        tensors = {tensor.name(): tensor.as_numpy().ravel().tolist() for tensor in request.inputs()}
        return Job(self.inputs.rows(tensors))

    def run_batch(self, jobs: list[Job]) -> list[Tensors | Exception]:
        """Answer the rows of all jobs. A row's error is that of its job."""
        groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, job in enumerate(jobs):
            for place, row in enumerate(job.rows):
                groups[row.parameters].append((number, place))
        answers: dict[tuple[int, int], bytes | Exception] = {}
        for parameters, places in groups.items():
            values = [jobs[number].rows[place].value for number, place in places]
            answers |= zip(places, self.call(values, json.loads(parameters)), strict=True)
        return [self.tensors(job, number, answers) for number, job in enumerate(jobs)]

    def tensors(self, job: Job, number: int, answers: dict[tuple[int, int], bytes | Exception]) -> Tensors | Exception:
        rows = [answers[number, place] for place in range(len(job.rows))]
        if error := next((row for row in rows if isinstance(row, Exception)), None):
            return error
        return {OUTPUTS: np.array(rows, np.object_).reshape(-1, 1)}

    def call(self, values: list[Any], parameters: dict[str, Any]) -> Iterator[bytes | Exception]:
        """Yield the answer of each value. If a batch fails, its rows run alone, so that only one gets the error."""
        for start in range(0, len(values), self.batch_size):
            batch = values[start : start + self.batch_size]
            try:
                answers = run(self.pipe, batch, parameters)
                yield from [encoded(answer) for answer in answers]
            except Exception as error:
                if len(batch) > 1:
                    for value in batch:
                        yield from self.call_alone(value, parameters)
                else:
                    yield as_request_error(error)
            self.metrics.add(runs=1)

    def call_alone(self, value: Any, parameters: dict[str, Any]) -> Iterator[bytes | Exception]:
        try:
            yield encoded(run(self.pipe, [value], parameters)[0])
        except Exception as error:
            yield as_request_error(error)

    def finalize(self) -> None:
        self.media.close()
        super().finalize()


def run(pipe: Any, values: list[Any], parameters: dict[str, Any]) -> list[Any]:
    """Return the answers of a call, in a batch if there are several values."""
    values = [ready(value) for value in values]
    parameters = json.loads(json.dumps(parameters))  # pipelines change what they get
    if seed := parameters.pop("seed", None):
        transformers.set_seed(int(seed))
    if len(values) == 1:
        return [pipe(values[0], **parameters)]
    answers: list[Any] = list(pipe(values, batch_size=len(values), **parameters))
    if len(answers) != len(values):
        raise RuntimeError(f"{len(values)} rows got {len(answers)} answers")
    return answers


def ready(value: Any) -> Any:
    """Return decoded images as those of Pillow, which pipelines take, and tables and chats as copies of their own."""
    from PIL import Image

    if isinstance(value, np.ndarray):
        return Image.fromarray(value) if value.ndim == 3 and value.dtype == np.uint8 else value
    if isinstance(value, dict):
        return {key: ready(part) for key, part in value.items()}
    return [ready(part) for part in value] if isinstance(value, list) else value


def as_request_error(error: Exception) -> Exception:
    """Return the error for the client. At assembly the pipeline answered, so what it raises is about the request."""
    if isinstance(error, (BadRequest, *OWN_ERRORS)) or (type(error) is RuntimeError and "memory" in str(error)):
        return error
    reason = " ".join(str(error).split())[:300]
    return BadRequest(f"the pipeline does not take this input with these parameters: {type(error).__name__}: {reason}")
