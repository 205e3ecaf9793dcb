"""Prepare checkpoints for transformers' own pipelines: copy them, and measure whether rows may share a batch."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from export.catalogue import Job, Outcome
from export.check.examples import keep_pipeline_examples
from export.check.served import served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.silence import quiet
from export.checkpoint.tasks import LIST
from export.recipes.config_writer import batched, tensor, write_config
from export.recipes.language.recipe import other_files
from export.recipes.pipeline_graph import Recorder, export_graphs, recorded
from triton_transformers.answers import LIMITS, PNG, leaves
from triton_transformers.cli import err
from triton_transformers.corpus import MIXED
from triton_transformers.settings import UserError
from triton_transformers.tasks.examples import NEEDS, TRAITS, Traits
from triton_transformers.tasks.table import TASKS

MAX_BATCH = 16
VOCODER = "vocoder"  # also in serving/pipelines/classes.py and pickles.py
GRAPH = "graph"  # also in serving/pipelines/graph.py
WORTHWHILE = 1.1  # a graph must be this many times as fast
EXAMPLES = 4
# The names of English and French in the tokenizers of NLLB, mBART, M2M100 and SeamlessM4T.
LANGUAGES = (("eng_Latn", "fra_Latn"), ("en_XX", "fr_XX"), ("en", "fr"), ("eng", "fra"))


def assemble(job: Job) -> Outcome:
    check_vocoder(job.checkpoint)
    check_decision_head(job)
    version = job.folder / job.system / "1"
    version.mkdir(parents=True)
    for file in [*job.checkpoint.weights(), *other_files(job)]:
        job.take(file, version)
    if (vocoder := job.weights / VOCODER).is_dir():
        shutil.copytree(vocoder, version / VOCODER, ignore=shutil.ignore_patterns("*.bin"))
    with quiet():
        write(job, MAX_BATCH, Traits(job.task))
        trial = try_examples(job, version)
    batch_size = 1 if trial.reason else MAX_BATCH
    write(job, batch_size, trial.traits)
    together = f"rows run alone, because {trial.reason}" if trial.reason else f"up to {MAX_BATCH} rows share a batch"
    facts: dict[str, Any] = {"batch_size": batch_size, "dtype": trial.dtype}
    if trial.traits.parameters:
        facts[NEEDS] = trial.traits.parameters
    return Outcome("; ".join(filter(None, (together, trial.graph))), facts)


def check_vocoder(checkpoint: Checkpoint) -> None:
    """Raise if the model makes spectrograms, and its folder has no vocoder, which turns them into sound."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES as SPECTROGRAMS

    architecture = checkpoint.architecture
    if architecture in SPECTROGRAMS.values() and not (checkpoint.folder / VOCODER / "model.safetensors").is_file():
        raise UserError(
            f"{checkpoint.name} is a {architecture}, which makes spectrograms, and a vocoder turns them into sound: "
            "save one (SpeechT5HifiGan, FastSpeech2ConformerHifiGan) with save_pretrained into its folder "
            f"{VOCODER}, and set SOURCE"
        )


def check_decision_head(job: Job) -> None:
    """Raise if a head beside the weights makes the decisions: the network of config.json would decide without it."""
    from transformers import JevConfig

    heads = [name for name in JevConfig.extra_files if (job.weights / name).is_file()]
    if heads and job.task == "decision":
        raise UserError(f"{job.weights} decides with the head in {heads[0]}, which is not served here ({LIST})")


def write(job: Job, batch_size: int, traits: Traits) -> None:
    task = TASKS[job.task]
    names = ["inputs", *task.fields, "parameters"]
    inputs = [tensor(name, "STRING", [1], optional=True) for name in names]
    parameters: dict[str, object] = {
        "task": job.task,
        "batch_size": batch_size,
        "fields": ",".join(f"{name}={kind}" for name, kind in task.fields.items()),
        "required_parameters": ",".join(task.required),
        "field_parameters": ",".join(task.field_parameters),
        TRAITS: traits.as_parameter(),
        "speech_model": speech_model(job),
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


def speech_model(job: Job) -> str:
    """Return the kind of a model that recognizes speech, or "": the gateway offers what the kind can do."""
    if job.task != "automatic-speech-recognition":
        return ""
    if job.checkpoint.kind == "whisper":
        has_timestamps = job.checkpoint.read("generation_config.json").get("no_timestamps_token_id") is not None
        return "whisper" if has_timestamps else "whisper_without_timestamps"
    return "ctc" if any(name.endswith("ForCTC") for name in job.checkpoint.architectures) else ""


class Trial(NamedTuple):
    """The findings about a pipeline, from its answers to examples."""

    reason: str  # why rows must run alone, or ""
    traits: Traits
    dtype: str  # that the model computes in
    graph: str  # how much faster a graph is, or ""


def try_examples(job: Job, version: Path) -> Trial:
    """Send examples to the pipeline, and export its graph if it is faster. Raise UserError if it does not answer."""
    err.step("comparing batches with rows alone")
    with served_system(job.system, job.folder) as served:
        backend = served.models[job.system].backend
        traits = traits_of(job.task, backend.pipe)
        dtype = str(backend.pipe.model.dtype).removeprefix("torch.")
        examples = [example.fields for example in traits.rows(EXAMPLES, MIXED.texts[::3])]
        sent = json.dumps(traits.quick).encode()
        tensors = {name: [example[name] for example in examples] for name in examples[0]}
        with recorded(backend.pipe) as recorders:
            try:
                rows = backend.inputs.rows(tensors | {"parameters": [sent] * len(examples)})
                ask = partial(answers, backend.pipe, rows, json.loads(rows[0].parameters), dtype)
                on_pytorch = ask()
            except ValueError as error:
                raise UserError(
                    f"{job.weights}: the pipeline of {job.task} does not answer an example: {error}"
                ) from error
        keep_pipeline_examples(job, served, traits, dtype)
        tolerance = LIMITS["original", "float32"].difference
        gain, on_graph = graph_answers(backend.pipe, recorders, version, ask) if recorders else (0.0, None)
        if on_graph and gain >= WORTHWHILE and is_same(on_graph.alone, on_pytorch.alone, tolerance):
            # PyTorch must be able to run the same batches, because the graph does not run on a GPU.
            reason = on_pytorch.reason or on_graph.reason
            return Trial(reason, traits, dtype, f"OpenVINO answers {gain:.1f} times as fast as PyTorch")
        shutil.rmtree(version / GRAPH, ignore_errors=True)
        return Trial(on_pytorch.reason, traits, dtype, "")


class Answers(NamedTuple):
    """The answers to rows alone, and why the rows must not run together, or ""."""

    alone: list[Any]
    reason: str


def answers(pipe: Any, rows: list[Any], parameters: dict[str, Any], dtype: str) -> Answers:
    from serving.pipelines.backend import run
    from serving.pipelines.outputs import plain

    alone = [plain(run(pipe, [row.value], parameters)[0]) for row in rows]
    try:
        together = [plain(answer) for answer in run(pipe, [row.value for row in rows], parameters)]
    except Exception as error:  # pipelines raise anything for what they cannot batch
        return Answers(alone, f"the pipeline cannot batch them ({type(error).__name__})")
    is_right = is_same(alone, together, LIMITS["original", dtype].difference)
    return Answers(alone, "" if is_right else "a batch changes the answers")


def graph_answers(
    pipe: Any, recorders: list[Recorder], version: Path, ask: Callable[[], Answers]
) -> tuple[float, Answers | None]:
    """Let the pipeline run on graphs of OpenVINO. Return how many times as fast that is, and its answers if it can."""
    from serving.pipelines.graph import use_graph

    def seconds() -> float:
        start = time.perf_counter()
        ask()
        return time.perf_counter() - start

    err.step("exporting to OpenVINO")
    try:
        before = seconds()
        export_graphs(recorders, version / GRAPH)
        use_graph(pipe.model, version / GRAPH)
        # A short text may be the same for other numbers.
        if not all(recorder.agrees() for recorder in recorders):
            return 0, None
        on_graph = ask()  # a graph takes longer for the first call of a shape
        return before / seconds(), on_graph
    except Exception as error:  # tracing raises anything, and so do pipelines that use a network's layers one by one
        if isinstance(error, OSError) and error.errno:  # such as a full disk
            raise
        return 0, None


def is_same(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two answers differ in no text, and in no number and no grey by more than the tolerance."""
    parts, others = leaves(one), leaves(other)
    return len(parts) == len(others) and all(map(is_same_part, parts, others, [tolerance] * len(parts)))


def is_same_part(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if one != other and all(isinstance(value, str) and value.startswith(PNG) for value in (one, other)):
        return has_same_greys(one, other, tolerance)
    return bool(one == other)


def has_same_greys(one: str, other: str, tolerance: float) -> bool:
    """Return whether two images of grey pixels, such as depth, differ only by rounding.

    That is one of 255 levels, or the tolerance if it is larger. Other images must be equal.
    """
    from PIL import Image

    images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in (one, other)]
    if any(image.mode != "L" for image in images):
        return False
    pixels, others = (np.asarray(image, int) for image in images)
    return pixels.shape == others.shape and np.abs(pixels - others).max() <= max(1, 255 * tolerance)


def traits_of(task: str, pipe: Any) -> Traits:
    """Return what the examples of an open pipeline depend on."""
    return Traits(
        task,
        frames=pipe.model.config.num_frames if task == "video-classification" else 0,
        mask_token=pipe.tokenizer.mask_token if task == "fill-mask" else "",
        chats=bool(getattr(pipe.processor or pipe.tokenizer, "chat_template", None)),
        parameters=example_languages(pipe),
    )


def example_languages(pipe: Any) -> dict[str, str]:
    """Return the parameters for a translation from English, if the model must be told its languages."""
    if pipe.task != "translation" or not hasattr(pipe.tokenizer, "_build_translation_inputs"):
        return {}
    from serving.pipelines.classes import check_languages

    for source, target in LANGUAGES:
        with contextlib.suppress(ValueError):  # of a language that the tokenizer does not know
            check_languages(pipe.tokenizer, source, target)
            return {"src_lang": source, "tgt_lang": target}
    return {}
