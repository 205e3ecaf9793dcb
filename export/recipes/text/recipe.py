"""Export text encoders of any task: an ensemble of an encoder and, for most tasks, a last step."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from export.catalogue import Job, Outcome
from export.check.examples import keep_examples
from export.check.parity import largest_difference, measure_parity, of_format
from export.check.quality import DOCUMENTS
from export.check.served import Tensors, served_system, served_tokens
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.silence import quiet, without_scikit_learn
from export.checkpoint.tasks import save_labels
from export.recipes.config_writer import Config, batched, ensemble, ragged, tensor, write_config
from export.recipes.low_rank import ADAPTER
from export.recipes.onnx_export import compare_int8_batches, quantize_and_compare
from export.recipes.text.int8 import Conversion
from export.recipes.text.network import TextModel
from export.recipes.text.references import WINDOW_STRIDE
from triton_transformers.answers import LIMITS
from triton_transformers.cli import err
from triton_transformers.corpus import MIXED, QUALITY
from triton_transformers.protocol import FIRST_CORE, LAST_CORE, TOKEN_COUNT, TOKENIZED
from triton_transformers.settings import UserError
from triton_transformers.tasks.task import Axes
from triton_transformers.tasks.vectors import DPR

PARITY_TEXTS = 24
SPAN_TEXTS = 4
MAX_EXAMPLE = 1024  # tokens: the memory and the time of longer texts grow with the square of their length
PUBLISHED_WIDTH = 384
MAX_BATCH = 64
CUDA_MAX_BATCH = 256  # on PyTorch: 64 short texts are too few tokens to keep a GPU busy
MAX_WINDOWS = 256  # of the contexts of one request
ANSWERS = 5  # words for a mask
QUERIES = 40  # for which a ranker in int8 orders documents
LARGEST_OUTPUTS = 2**27  # numbers: what an encoder in int8 answers to all texts must fit into the memory
# The tasks of models that sentence-transformers reads, with the module and the class that describe such a model.
LIBRARY_MODELS = {
    "sentence-similarity": ("sentences", "SentenceModel"),
    "sparse-embedding": ("sentences", "SparseModel"),
    "text-ranking": ("ranking", "RankingModel"),
    "multi-vector-embedding": ("multi_vector", "MultiVectorModel"),
    "hybrid-embedding": ("multi_vector", "HybridModel"),
}
Parameters = dict[str, object]  # of the backend


def assemble(job: Job) -> Outcome:
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = text_model(job)
    if job.system == "embedding":
        check_published(model)
    check_ignored_adapters(model)
    for part in ("ensemble", "encoder", *model.tokenizers, *(["answers"] if model.task.has_last_step else [])):
        model.version(part).mkdir(parents=True, exist_ok=True)
    for part in model.tokenizers:
        for encoder in model.encoders.values():
            encoder.version(part).mkdir(exist_ok=True)
            save_tokenizer(encoder, encoder.version(part))
            encoder.save_prompts(encoder.version(part))
    save_answers(model)
    rows = example_rows(model)
    with quiet():
        err.step("asking the original")
        # The reference comes first: a format may move the weights away.
        requests = [model.request(*row) for row in rows] + prompt_requests(model)
        requests += [
            request | {"query": request["input_text"]} for request in requests[::4] if "query" in model.optional_inputs
        ]
        requests += span_requests(model)
        expected = [model.reference(request) for request in requests]
        write_configs(model)
        if job.format == "neuron":
            outcome = compile_and_compare(model, requests, expected)
        else:
            if job.format == "python":
                save_python(model)
            else:
                save_onnx(model, requests)
            model.forget_original()
            with of_format(job.format):
                outcome = compare(model, requests, expected)
        if job.format == "onnx-int8":
            outcome = outcome.join(convert_to_int8(model, requests))
        elif job.format == "int8":
            outcome = outcome.join(convert_for_openvino(model))
    return outcome.join(Outcome(facts={"max_length": model.max_length}))


def compare(model: TextModel, requests: list[Tensors], expected: list[Tensors]) -> Outcome:
    """Compare with the reference. If padding changes the answers, let only texts of equal length share a run."""
    parity = measure_parity(model.job, requests, expected, model.comparable)
    note = ""
    if parity.alone.size <= parity.tolerance < parity.together.size and model.job.system != "embedding":
        for encoder in (model, *model.encoders.values()):
            encoder.pads = False
        write_configs(model)
        parity = measure_parity(model.job, requests, expected, model.comparable)
        note = "; padding changes its answers, so only texts of equal length share a run"
    parity.check()
    outcome = parity.outcome("texts")
    return Outcome(f"{outcome.summary}{note}", outcome.facts)


def write_configs(model: TextModel) -> None:
    if model.job.system == "embedding":  # its configurations are in git, with comments
        return
    for part, (config, parameters) in configs(model).items():
        write_config(model.part(part), f"{model.job.task}, written by `make models`", config, parameters)


def text_model(job: Job) -> TextModel:
    if job.task not in LIBRARY_MODELS:
        return TextModel(job)
    module, name = LIBRARY_MODELS[job.task]
    if job.task == "sentence-similarity" and is_text_half(job.checkpoint):
        module, name = "half", "TextHalf"
    with without_scikit_learn():  # sentence-transformers takes seconds to import
        imported = importlib.import_module(f"export.recipes.text.{module}")
    model: TextModel = getattr(imported, name)(job)
    return model


def is_text_half(checkpoint: Checkpoint) -> bool:
    """Return whether transformers itself turns a text into a vector: models of texts and images, and DPR."""
    is_half = any(name.endswith(("TextModelWithProjection", *DPR)) for name in checkpoint.architectures)
    return not checkpoint.has_modules and (is_half or checkpoint.has_two_halves)


def check_published(model: TextModel) -> None:
    """Raise if the configurations in git do not describe these weights in this format."""
    if model.job.format == "python" or model.width != PUBLISHED_WIDTH or model.optional_inputs:
        raise UserError(
            f"embedding is ONNX with vectors of {PUBLISHED_WIDTH} and without prompts: choose another name in SYSTEMS "
            "for other weights and formats"
        )


def check_ignored_adapters(model: TextModel) -> None:
    """Raise if the graph would ignore adapters that the folder of the weights has."""
    if (folders := model.job.checkpoint.adapters) and ADAPTER not in model.token_inputs:
        names = ", ".join(folder.name for folder in folders)
        raise UserError(
            f"{model.job.system}: its adapters ({names}) are served with TASK=sentence-similarity and a plain encoder "
            f"of texts only. To serve the model without them as {model.job.task}, copy it without these folders"
        )


def save_tokenizer(model: TextModel, version: Path) -> None:
    """Save the model's tokenizer with the model's maximum length; the one in its file may be another."""
    original = model.hugging_face_tokenizer
    tokenizer = Tokenizer.from_str(original.backend_tokenizer.to_str())
    if not model.adds_special_tokens:
        tokenizer.post_processor = None
    stride = min(model.max_length // 2, WINDOW_STRIDE) if model.task.cuts_windows else 0
    tokenizer.enable_truncation(
        model.max_length, stride=stride, strategy=model.task.truncation, direction=original.truncation_side
    )
    tokenizer.enable_padding(
        direction=original.padding_side if model.fills_rows else "right",
        pad_id=original.pad_token_id or 0,
        pad_token=original.pad_token or "[PAD]",
    )
    tokenizer.save(str(version / "tokenizer.json"))


def save_answers(model: TextModel) -> None:
    if "token" in model.task.answers and model.task.has_last_step:
        encoder, *_ = model.encoders.values()
        shutil.copy(encoder.version(model.tokenizers[0]) / "tokenizer.json", model.version("answers"))
    if "label" in model.task.answers:
        save_labels(model.version("encoder" if model.task.encoder_answers else "answers"), model.labels)


# --- the encoder, in each format --------------------------------------------------------------------------------------


def save_onnx(model: TextModel, requests: list[Tensors]) -> None:
    for encoder in model.encoders.values():
        feeds = encoded(encoder, taking(encoder.route, model, requests))
        encoder.export(encoder.version("encoder") / "model.onnx", export_examples(encoder, feeds))


def save_python(model: TextModel) -> None:
    model.save_layers(model.version("encoder"))
    model.job.take_model(model.version("encoder"))


def convert_to_int8(model: TextModel, requests: list[Tensors]) -> Outcome:
    """Convert the encoder; compare it with fp32 for each text alone, and a batch with each text alone."""
    outcome = Outcome()
    for route, encoder in model.encoders.items():
        feeds = encoded(encoder, taking(route, model, requests))
        outcome = outcome.join(quantize_and_compare(encoder.version("encoder") / "model.onnx", feeds).of(route))
    return outcome.join(compare_int8_batches(model.job, requests, model.task.compared))


def convert_for_openvino(model: TextModel) -> Outcome:
    """Convert the encoders to int8 for OpenVINO, within a bound of their quality on the committed texts."""
    outcome = Outcome()
    for route, encoder in model.encoders.items():
        feeds, examples = (
            [feed for feed in encoded(encoder, quality_requests(encoder, corpus.texts)) if length(feed)]
            for corpus in (QUALITY, MIXED)
        )
        outcome = outcome.join(Conversion(encoder, feeds, examples, partial(padded, encoder)).outcome().of(route))
    with served_system(model.job.system, model.job.folder) as served:
        keep_examples(model.job, served)
    return outcome


def compile_and_compare(model: TextModel, requests: list[Tensors], expected: list[Tensors]) -> Outcome:
    from export.neuron.compile import CompiledEncoder, core_errors

    target = model.job.neuron
    assert target
    if model.routes:
        raise UserError(f"{model.job.system}: its Router has several encoders, which PROFILE=neuron does not serve")
    if target.chip == "inf1":
        raise UserError(
            "`make models` compiles for Inf2 and Trn1. For Inf1, compile with torch-neuron yourself, and write the "
            "model's folder with scripts/neuron/gen_triton_model.py"
        )
    lengths = target.lengths_up_to(model.max_length, model.job.system)
    compiled = CompiledEncoder(
        model.network, model.token_inputs, target, lengths, model.version("encoder"), model.pad_token_id
    )
    with core_errors():
        compiled.compile()
    facts = {"neuron": target.record()}
    if not target.device:
        return Outcome("not compared with the original: there is no Neuron device (NEURON_DEVICES=0)", facts)
    feeds = encoded(model, requests)
    with core_errors():
        answers = list(cut(model, feeds, compiled.run(feeds)))
    difference, tolerance = largest_difference(expected, answers), LIMITS["original", "bfloat16"].difference
    difference.check(tolerance, "in a batch")
    return Outcome(
        f"differs from the original by at most {difference.size:.0e} on {len(feeds)} texts ({tolerance} is allowed)",
        facts | {"parity_examples": len(feeds), "difference_together": difference.size, "tolerance": tolerance},
    )


def cut(model: TextModel, feeds: list[Tensors], answers: Iterator[list[np.ndarray]]) -> Iterator[Tensors]:
    """Yield each text's outputs without those of the padding."""
    for tokens, arrays in zip(feeds, answers, strict=True):
        length = tokens["input_ids"].shape[1]
        outputs = zip(model.task.outputs.items(), arrays, strict=True)
        yield {name: (array[:length] if axes[0] == "T" else array)[None] for (name, axes), array in outputs}


# --- the examples -----------------------------------------------------------------------------------------------------


def example_rows(model: TextModel) -> list[tuple[str, ...]]:
    texts = example_texts(min(model.max_length, MAX_EXAMPLE))
    if special := model.special_token:
        texts.append(f"rain {special} rain {special}{special}")  # looks like padding
    if model.takes_pairs:
        pairs: list[tuple[str, ...]] = [("Which one?", text) for text in texts]
        return [*pairs[::2], *single(model, texts)] if model.task.second_is_optional else pairs
    if model.mask:
        return [(f"{model.mask} {text}",) for text in texts]
    return single(model, texts)


def prompt_requests(model: TextModel) -> list[Tensors]:
    """Return requests for each prompt of the model, with a prompt of their own, and without any."""
    if "prompt" not in model.optional_inputs:
        return []
    prompts = [("prompt_name", name) for name in model.prompts] + [("prompt", "about rain: "), ("prompt", "")]
    texts = [*MIXED.texts[:3], "word " * min(model.max_length, MAX_EXAMPLE)]
    return [
        model.request(*(["Which one?"] if model.takes_pairs else []), text)
        | {name: np.array([[value.encode()]], np.object_)}
        for name, value in prompts
        for text in texts
    ]


def span_requests(model: TextModel) -> list[Tensors]:
    """Return requests for the vectors of both halves of a text."""
    if not model.pools_spans:
        return []
    requests = []
    for text in MIXED.texts[:SPAN_TEXTS]:
        half = len(text) // 2
        spans = np.array([[0, half], [half, len(text)]])
        # A vector is not finite if its span lies beyond the tokens that the model reads.
        if np.isfinite(model.encode_spans(text, spans)).all():
            requests.append(model.request(text) | {"spans": spans[None]})
    return requests


def single(model: TextModel, texts: list[str]) -> list[tuple[str, ...]]:
    """Return a row for each text that has tokens. Of empty texts without special tokens, only a table has vectors."""
    return [(text,) for text in texts if model.is_table or model.tokenize([text])["input_ids"].numel()]


def quality_requests(model: TextModel, texts: list[str]) -> list[Tensors]:
    """Return requests for the texts: one for each, or for a ranker documents for each of some queries."""
    if model.job.task == "text-ranking":
        documents = [texts[start : start + DOCUMENTS] for start in range(0, QUERIES * DOCUMENTS, DOCUMENTS)]
        return [
            model.request(query, text) for query, group in zip(MIXED.texts, documents, strict=False) for text in group
        ]
    outputs = model.vocabulary if model.job.task == "sparse-embedding" else 1
    return [model.request(text) for text in texts[: LARGEST_OUTPUTS // outputs]]


def example_texts(max_length: int) -> list[str]:
    """Return some of the committed texts, and edge cases: empty, one token, the maximum length, one more, far more."""
    texts = MIXED.texts
    edges = ["", " ", "a", "?", "word " * (max_length - 2), "word " * (max_length - 1), " ".join(texts[:40])]
    return [*texts[:: len(texts) // PARITY_TEXTS], *edges, "漢" * 2 * max_length]


def taking(route: str, model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the requests whose texts take this route."""
    names = [request["prompt_name"][0, 0].decode() if "prompt_name" in request else "" for request in requests]
    routes = [model.routes.get(name) or model.routes.get("", "") for name in names]
    return [request for request, own in zip(requests, routes, strict=True) if own == route]


def encoded(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the tokens that the served tokenizer makes of each request: of a long context, the first window."""
    answers = served_tokens(model.part(model.tokenizers[0]), model.route, model.token_inputs, requests)
    lengths = [tensors["attention_mask"][0].sum() for tensors in answers]
    return [
        {name: tensors[name][:1, :length] for name in model.token_inputs}
        for tensors, length in zip(answers, lengths, strict=True)
    ]


def export_examples(model: TextModel, feeds: list[Tensors]) -> list[Tensors]:
    """Return runs of these texts: two to trace; one, several of unequal length, and one beyond each sliding window."""
    short, *others = sorted((feed for feed in feeds if length(feed) > 1), key=length)
    middle, longest = others[len(others) // 2], others[-1]
    repeats = 1 + longest_window(model.config) // length(longest)
    beyond = {name: np.tile(array, repeats)[:, : model.max_length] for name, array in longest.items()}
    runs = ([short, middle], [short], others[::8], [beyond, short])
    return [padded(model, run) for run in runs]


def longest_window(config: Any) -> int:
    """Return the tokens of the longest sliding window, which the configuration may call by many names."""
    values = [value for key, value in config.to_dict().items() if "window" in key or key == "local_attention"]
    flat = (number for value in values for number in (value if isinstance(value, list) else [value]))
    return max((number for number in flat if isinstance(number, int)), default=0)


def padded(model: TextModel, feeds: list[Tensors]) -> Tensors:
    """Return one run of these rows."""
    width = max(map(length, feeds))
    fill = {"input_ids": model.pad_token_id}

    def rows(name: str) -> Iterator[np.ndarray]:
        for feed in feeds:
            yield np.pad(feed[name], ((0, 0), (0, width - length(feed))), constant_values=fill.get(name, 0))

    return {name: np.concatenate([*rows(name)]) for name in model.token_inputs}


def length(feed: Tensors) -> int:
    return feed["input_ids"].shape[1]


# --- the configurations -----------------------------------------------------------------------------------------------


def configs(model: TextModel) -> dict[str, tuple[Config, Parameters]]:
    """Return the configuration of each Triton model of the ensemble, by part."""
    axes = {"T": -1, "E": -1, "L": model.label_count, "D": model.width, "V": model.vocabulary, "K": ANSWERS}
    axes |= {"M": model.token_width, "H": -1, "S": -1}

    def dims(shape: Axes) -> list[int]:
        return [axes[axis] if isinstance(axis, str) else axis for axis in shape]

    task = model.task
    texts = [tensor(name, "STRING", [1]) for name in model.inputs]
    if task.second_is_optional:
        texts[1]["optional"] = True
    texts += [tensor(name, "STRING", [1], optional=True) for name in model.optional_inputs]
    if model.pools_spans:
        texts.append(tensor("spans", "INT64", [-1, 2], optional=True))
    outputs = [tensor(name, "FP32", dims(shape)) for name, shape in task.outputs.items()]
    responses = [tensor(name, kind, dims(shape)) for name, (kind, shape) in task.ensemble_outputs.items()]
    answers = [response for response in responses if response["name"] in task.answers]
    counts = [response for response in responses if response["name"] == TOKEN_COUNT]

    # The tokens of a text are no output of the ensemble. Those of a pair have no one form.
    about_tokens = [] if task.cuts_windows else [tensor(TOKENIZED, "STRING", [1]), *counts]
    own = answers if task.encoder_answers else outputs
    parts = {"encoder": encoder(model, ragged(texts), about_tokens + own)}
    if task.from_tokenizer:
        parts["encoder"][1].update(answers=model.job.task, **last_step(model))
    if task.is_one_model:
        return parts
    if task.has_last_step:
        step = {"task": model.job.task, **last_step(model)}
        parts["answers"] = batched("postprocessor", max_batch(model), ragged(outputs), answers, "KIND_CPU"), step
    steps = {model.part(part).name: config for part, (config, _) in parts.items()}
    # The gateway's clients get the labels by their names, and the gateway learns whether only one can be true.
    labels: Parameters = {}
    if "scores" in task.answers:
        labels = {"labels": json.dumps(model.labels, ensure_ascii=False), "activation": model.activation}
    return parts | {"ensemble": (ensemble(steps, texts, responses), labels)}


def max_batch(model: TextModel) -> int:
    return CUDA_MAX_BATCH if model.job.profile == "cuda" and model.job.format == "python" else MAX_BATCH


def tokenization(model: TextModel) -> Parameters:
    parameters: Parameters = {}
    if model.mask:
        parameters["exactly_one"] = model.mask
    if model.task.cuts_windows:
        parameters["max_windows"] = MAX_WINDOWS
    if not model.hugging_face_tokenizer("").input_ids:  # it adds no special tokens, and no model runs on nothing
        parameters["min_length"] = int(not model.is_table)
    return parameters


def encoder(model: TextModel, inputs: list[Config], outputs: list[Config]) -> tuple[Config, Parameters]:
    """Return the configuration of the encoder. Each of several routes has parameters of its own."""
    if not model.routes:
        return encoder_of_route(model, inputs, outputs)
    routes: Parameters = {f"{name or 'default'}_route": route for name, route in model.routes.items()}
    for route, own in model.encoders.items():
        config, parameters = encoder_of_route(own, inputs, outputs)
        routes |= {f"{route}.{name}": value for name, value in parameters.items()}
    return config, routes


def encoder_of_route(model: TextModel, inputs: list[Config], outputs: list[Config]) -> tuple[Config, Parameters]:
    config, parameters = encoder_of_format(model, inputs, outputs)
    parameters |= {"tokens": ",".join(model.token_inputs), **tokenization(model)}
    if model.pad_token_id:
        parameters["pad_token_id"] = model.pad_token_id
    if not model.pads:
        parameters["padding"] = "none"
    if model.fills_rows:
        parameters["padding"] = "max_length"
        parameters["masks_padding"] = int(not model.reads_padding)
    return config, parameters


def encoder_of_format(model: TextModel, inputs: list[Config], outputs: list[Config]) -> tuple[Config, Parameters]:
    if target := model.job.neuron:
        cores = {FIRST_CORE: target.cores[0], LAST_CORE: target.cores[-1]}
        return batched("neuron", MAX_BATCH, inputs, outputs, "KIND_MODEL"), {"task": "text-encoder", **cores}
    if model.job.format != "python":
        kind = "KIND_CPU" if model.job.format == "int8" else "KIND_AUTO"
        return batched("packed_onnx", MAX_BATCH, inputs, outputs, kind), {}
    parameters: Parameters = {"task": "text-encoder", "model_class": model.model_class}
    if model.mask:
        parameters["mask_token_id"] = model.hugging_face_tokenizer.mask_token_id
    parameters |= model.layers
    if model.job.profile == "cuda":
        parameters.pop("dtype", None)  # the server measures which precision is fastest
    if model.job.trust_remote_code:
        parameters["trust_remote_code"] = 1
    return batched("transformers", max_batch(model), inputs, outputs, "KIND_AUTO"), parameters


def last_step(model: TextModel) -> Parameters:
    parameters: Parameters = {}
    if model.job.task in ("text-classification", "text-ranking"):
        parameters["activation"] = model.activation
    if model.job.task == "question-answering":
        parameters["align_to_words"] = 1
        if model.hugging_face_tokenizer.cls_token_id is None:
            parameters["first_token_competes"] = 0
    if model.mask:
        parameters["count"] = ANSWERS
    if model.job.task == "token-classification":
        parameters["aggregation_strategy"] = "simple"
        parameters["unknown_token"] = model.hugging_face_tokenizer.unk_token or ""
    return parameters
