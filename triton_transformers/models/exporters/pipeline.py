"""Prepare checkpoints for transformers' own pipelines: copy them, and measure whether rows may share a batch."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from triton_transformers.corpus import MIXED
from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.exporters.config_writer import batched, tensor, write_config
from triton_transformers.models.exporters.generation import other_files
from triton_transformers.models.exporters.parity import TOLERANCES
from triton_transformers.models.exporters.served import served_system
from triton_transformers.models.pipeline_tasks import NEEDS, PIPELINE_TASKS, TEXTS
from triton_transformers.models.silence import quiet
from triton_transformers.models.tasks import architectures_of, read_config
from triton_transformers.models.unsupported import check_weights
from triton_transformers.settings import UserError

MAX_BATCH = 16
VOCODER = "vocoder"  # also in shared/pipeline_classes.py
SECONDS = (0.9, 1.7, 1.3, 2.4)
SIZES = ((48, 64), (90, 40), (64, 64), (120, 200))
GENERATED_TOKENS = 8
# The names of English and French in the tokenizers of NLLB, mBART, M2M100 and SeamlessM4T.
LANGUAGES = (("eng_Latn", "fra_Latn"), ("en_XX", "fr_XX"), ("en", "fr"), ("eng", "fra"))
# Parameters with which few examples take little time, or have answers.
EXAMPLES: dict[str, dict[str, Any]] = {
    "mask-generation": {"points_per_crop": 8},
    "object-detection": {"threshold": 0.05},
}


def assemble(job: Job) -> Outcome:
    with quiet():
        check_network(job)
    version = job.folder / job.system / "1"
    version.mkdir(parents=True)
    for file in [*check_weights(str(job.weights), job.weights), *other_files(job)]:
        job.take(file, version)
    if (vocoder := job.weights / VOCODER).is_dir():
        shutil.copytree(vocoder, version / VOCODER, ignore=shutil.ignore_patterns("*.bin"))
    with quiet():
        write(job, MAX_BATCH)
        reason, languages = changed_answers(job)
    if reason:
        write(job, 1)
    together = f"rows run alone, because {reason}" if reason else f"up to {MAX_BATCH} rows share a batch"
    return Outcome(together, {"batch_size": 1 if reason else MAX_BATCH} | ({NEEDS: languages} if languages else {}))


def check_network(job: Job) -> None:
    """Raise if the weights lack a part of the network of config.json: transformers would draw it at random.

    The network is built without memory, because a config.json without sizes means one of billions of weights.
    """
    import transformers

    (architecture, *_) = *architectures_of(read_config(job.weights)), ""
    network: Any = getattr(transformers, architecture, None)
    if network is None:  # of the model's own code
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES as SPECTROGRAMS

    if architecture in SPECTROGRAMS.values() and not (job.weights / VOCODER / "model.safetensors").is_file():
        raise UserError(
            f"{job.weights} is a {architecture}, which makes spectrograms, and a vocoder turns them into sound: save "
            f"one (SpeechT5HifiGan, FastSpeech2ConformerHifiGan) with save_pretrained into its folder {VOCODER}, and "
            "set SOURCE"
        )
    _, found = network.from_pretrained(
        job.weights, device_map="meta", output_loading_info=True, local_files_only=True, ignore_mismatched_sizes=True
    )
    different = sorted(name for name, *_ in found["mismatched_keys"])
    reads_pooler = "SequenceClassification" in architecture
    missing = sorted(name for name in found["missing_keys"] if reads_pooler or "pooler" not in name)
    if names := different or missing:
        lack = "has other sizes than" if different else "is missing in"
        raise UserError(
            f"{job.weights} is damaged, or of two models: '{names[0]}' of the {architecture} that its config.json "
            f"describes {lack} the weights. Save the model again with save_pretrained, or choose another one"
        )


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
        f"{job.task}, written by `make models`: docs/pipelines.md",
        config,
        {name: value for name, value in parameters.items() if value},
    )


def changed_answers(job: Job) -> tuple[str, dict[str, Any]]:
    """Return why rows must run alone, or "", and the parameters that each request to this model needs.

    Raise UserError if the pipeline does not answer at all.
    """
    with served_system(job.system, job.folder) as served:
        backend = served.models[job.system].backend
        from shared.pipeline_backend import run
        from shared.pipeline_outputs import plain

        examples = list(examples_of(job.task, backend.pipe))
        languages = example_languages(backend.pipe)
        sent = json.dumps(example_parameters(job.task) | languages).encode()
        tensors = {name: [example[name] for example in examples] for name in examples[0]}
        try:
            rows = backend.inputs.rows(tensors | {"parameters": [sent] * len(examples)})
            parameters = json.loads(rows[0].parameters)
            alone = [plain(run(backend.pipe, [row.value], parameters)[0]) for row in rows]
        except ValueError as error:
            raise UserError(f"{job.weights}: the pipeline of {job.task} does not answer an example: {error}") from error
        try:
            together = [plain(answer) for answer in run(backend.pipe, [row.value for row in rows], parameters)]
        except Exception as error:  # pipelines raise anything for what they cannot batch
            return f"the pipeline cannot batch them ({type(error).__name__})", languages
        tolerance = TOLERANCES[str(backend.pipe.model.dtype).removeprefix("torch.")]
        return "" if is_same(alone, together, tolerance) else "a batch changes the answers", languages


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
    if task in TEXTS:
        own = {"generate_kwargs": {"max_new_tokens": GENERATED_TOKENS}}
    return PIPELINE_TASKS[task].required | own | EXAMPLES.get(task, {})


def example_languages(pipe: Any) -> dict[str, str]:
    """Return the parameters for a translation from English, if the model must be told its languages."""
    if pipe.task != "translation" or not hasattr(pipe.tokenizer, "_build_translation_inputs"):
        return {}
    for source, target in LANGUAGES:
        with contextlib.suppress(KeyError, ValueError):  # for a language that the tokenizer does not know
            chosen = {"src_lang": source, "tgt_lang": target}
            made = pipe.tokenizer._build_translation_inputs("", return_tensors="pt", **chosen)
            if pipe.tokenizer.unk_token_id not in (made["forced_bos_token_id"], *made["input_ids"].flatten().tolist()):
                return chosen
    return {}


# --- made examples ----------------------------------------------------------------------------------------------------


def examples_of(task: str, pipe: Any) -> Iterator[dict[str, bytes]]:
    """Yield rows of different sizes, each with the task's own fields."""
    for number in range(len(SIZES)):
        yield {
            name: value.encode() if isinstance(value, str) else value
            for name, kind in PIPELINE_TASKS[task].fields.items()
            if (value := example(task, name, kind, number, pipe)) is not None
        }


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
