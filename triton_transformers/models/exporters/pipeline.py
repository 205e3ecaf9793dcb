"""Prepare checkpoints for transformers' own pipelines: copy them, and measure whether rows may share a batch."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from triton_transformers.corpus import MIXED
from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.exporters.config_writer import batched, tensor, write_config
from triton_transformers.models.exporters.generation import other_files
from triton_transformers.models.exporters.parity import TOLERANCES
from triton_transformers.models.exporters.served import served_system
from triton_transformers.models.pipeline_tasks import PIPELINE_TASKS
from triton_transformers.models.silence import quiet
from triton_transformers.models.unsupported import check_weights
from triton_transformers.settings import UserError

MAX_BATCH = 16
SECONDS = (0.9, 1.7, 1.3, 2.4)
SIZES = ((48, 64), (90, 40), (64, 64), (120, 200))
GENERATED_TOKENS = 8
# Parameters with which few examples take little time, or have answers.
EXAMPLES: dict[str, dict[str, Any]] = {
    "mask-generation": {"points_per_crop": 8},
    "object-detection": {"threshold": 0.05},
}


def assemble(job: Job) -> Outcome:
    version = job.folder / job.system / "1"
    version.mkdir(parents=True)
    for file in [*check_weights(str(job.weights), job.weights), *other_files(job)]:
        job.take(file, version)
    with quiet():
        write(job, MAX_BATCH)
        reason = changed_answers(job)
    if reason:
        write(job, 1)
    together = f"rows run alone, because {reason}" if reason else f"up to {MAX_BATCH} rows share a batch"
    return Outcome(together, {"batch_size": 1 if reason else MAX_BATCH})


def write(job: Job, batch_size: int) -> None:
    task = PIPELINE_TASKS[job.task]
    names = ["inputs", *task.fields, "parameters"]
    inputs = [tensor(name, "STRING", [1], optional=True) for name in names]
    parameters: dict[str, object] = {
        "task": job.task,
        "batch_size": batch_size,
        "fields": ",".join(f"{name}={kind}" for name, kind in task.fields.items()),
        "required_parameters": ",".join(task.required),
        "field_parameters": ",".join(task.field_parameters),
    }
    if job.trust_remote_code:
        parameters["trust_remote_code"] = 1
    config = batched("pipeline", MAX_BATCH, inputs, [tensor("outputs", "STRING", [1])], "KIND_AUTO")
    write_config(
        job.folder / job.system,
        f"{job.task}, written by `make models`: docs/backends.md",
        config,
        {name: value for name, value in parameters.items() if value},
    )


def changed_answers(job: Job) -> str:
    """Return why rows must run alone, or "". Raise UserError if the pipeline does not answer at all."""
    with served_system(job.system, job.folder) as served:
        backend = served.models[job.system].backend
        from shared.pipeline_backend import run
        from shared.pipeline_outputs import plain

        examples = list(examples_of(job.task, backend.pipe))
        column = [[json.dumps(example_parameters(job.task)).encode()]] * len(examples)
        tensors = {name: [example[name] for example in examples] for name in examples[0]}
        try:
            rows = backend.inputs.rows(tensors | {"parameters": [row[0] for row in column]})
            parameters = json.loads(rows[0].parameters)
            alone = [plain(run(backend.pipe, [row.value], parameters)[0]) for row in rows]
        except ValueError as error:
            raise UserError(f"{job.weights}: the pipeline of {job.task} does not answer an example: {error}") from error
        try:
            together = [plain(answer) for answer in run(backend.pipe, [row.value for row in rows], parameters)]
        except Exception as error:  # pipelines raise anything for what they cannot batch
            return f"the pipeline cannot batch them ({type(error).__name__})"
        tolerance = TOLERANCES[str(backend.pipe.model.dtype).removeprefix("torch.")]
        return "" if is_same(alone, together, tolerance) else "a batch changes the answers"


def is_same(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two answers differ in no text, and in no number by more than the tolerance."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other, [tolerance] * len(one)))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == other)


def example_parameters(task: str) -> dict[str, Any]:
    generates = ("any-to-any", "image-text-to-text", "text-generation")
    own: dict[str, Any] = {"max_new_tokens": GENERATED_TOKENS} if task in generates else {}
    if task in ("translation", "summarization", "text2text-generation"):
        own = {"generate_kwargs": {"max_new_tokens": GENERATED_TOKENS}}
    return PIPELINE_TASKS[task].required | own | EXAMPLES.get(task, {})


# --- made examples ----------------------------------------------------------------------------------------------------


def examples_of(task: str, pipe: Any) -> Iterator[dict[str, bytes]]:
    """Yield rows of different sizes, each with the task's own fields."""
    for number in range(len(SIZES)):
        fields = {
            name: value.encode() if isinstance(value, str) else value
            for name, kind in PIPELINE_TASKS[task].fields.items()
            if (value := example(task, name, kind, number, pipe)) is not None
        }
        yield fields


def example(task: str, name: str, kind: str, number: int, pipe: Any) -> bytes | str | None:
    text = MIXED.texts[number * 3]
    words = [[word, [10 * i % 900, 20, 10 * i % 900 + 40, 40]] for i, word in enumerate(text.split())]
    if kind == "image":
        return png(number)
    if kind == "audio":
        from shared.pipeline_classes import sampling_rate

        return None if task == "any-to-any" else wav(number, sampling_rate(pipe))
    if kind == "video":
        return video(number, pipe.model.config.num_frames)
    if kind == "images":
        import base64

        images = [base64.b64encode(png(n)).decode() for n in (number, number + 1)]
        return json.dumps(images) if task == "keypoint-matching" else None
    rows = 1 + number % 3
    if kind == "json":
        values: dict[str, Any] = {
            "table": {
                "name": ["Ada", "Grace", "Edsger"][:rows],
                "age": ["36", "85", "72"][:rows],
            },
            "word_boxes": words,
            "state": text,
            "questions": {"refund": {"type": "noul", "instructions": "Is a refund requested?"}},
        }
        return json.dumps(values[name])
    if task == "fill-mask":
        return f"{text} {pipe.tokenizer.mask_token}"
    return text


def picture(number: int) -> np.ndarray:
    random = np.random.default_rng(number)
    height, width = SIZES[number % len(SIZES)]
    blocks = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]


def png(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(number)).save(file, "PNG")
    return file.getvalue()


def wav(number: int, rate: int) -> bytes:
    import soundfile

    times = np.arange(int(SECONDS[number % len(SECONDS)] * rate)) / rate
    samples = 0.3 * np.sin(2 * np.pi * (200 + 90 * number) * times) + 0.1 * np.sin(2 * np.pi * 1234 * times)
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def video(number: int, frames: int) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        height, width = (side // 2 * 2 for side in SIZES[number % len(SIZES)])
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for step in range(frames + 2):
            shown = np.roll(picture(number)[:height, :width], 3 * step, axis=1)
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(shown), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
