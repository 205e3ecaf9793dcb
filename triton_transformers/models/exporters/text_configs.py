"""Build the configurations of a text encoder's ensemble from its task (tasks.py)."""

from __future__ import annotations

import json

from triton_transformers.kinds import TOKEN_COUNT, TOKENIZED
from triton_transformers.models.exporters.config_writer import Config, batched, ensemble, ragged, tensor
from triton_transformers.models.exporters.text_model import TextModel
from triton_transformers.models.tasks import Axes

MAX_BATCH = 64
MAX_WINDOWS = 256  # of the contexts of one request
ANSWERS = 5  # words for a mask
# The tokenizer's outputs that are not one number per token.
FROM_TOKENIZER = {
    "offsets": ("INT64", [-1, 2]),
    "word_offsets": ("INT64", [-1, 2]),
    "pair": ("INT64", [1]),
    "second_text": ("STRING", [1]),
}
Parameters = dict[str, object]  # of the backend


def configs(model: TextModel, width: int) -> dict[str, tuple[Config, Parameters]]:
    """Return the configuration of each Triton model of the ensemble, by part."""
    axes = {"T": -1, "E": -1, "L": model.label_count, "D": width, "V": model.vocabulary, "K": ANSWERS}
    axes |= {"M": model.token_width, "H": -1, "S": -1}

    def dims(shape: Axes) -> list[int]:
        return [axes[axis] if isinstance(axis, str) else axis for axis in shape]

    task = model.task
    texts = [tensor(name, "STRING", [1]) for name in task.inputs]
    if task.second_is_optional:
        texts[1]["optional"] = True
    texts += [tensor(name, "STRING", [1], optional=True) for name in model.optional_inputs]
    if model.pools_spans:
        texts.append(tensor("spans", "INT64", [-1, 2], optional=True))
    tokens = [tensor(name, "INT64", [-1]) for name in model.token_inputs]
    from_tokenizer = [tensor(name, *FROM_TOKENIZER.get(name, ("INT64", [-1]))) for name in task.from_tokenizer]
    extras = [extra for extra in from_tokenizer if extra not in tokens]
    from_request = [text for text in texts if text["name"] in task.from_request]
    outputs = [tensor(name, "FP32", dims(shape)) for name, shape in task.outputs.items()]
    responses = [tensor(name, kind, dims(shape)) for name, (kind, shape) in task.ensemble_outputs.items()]
    answers = [response for response in responses if response["name"] in task.answers]
    counts = [response for response in responses if response["name"] == TOKEN_COUNT]

    parts: dict[str, tuple[Config, Parameters]] = {}
    if task.tokenizes_in_encoder:
        about_tokens = [tensor(TOKENIZED, "STRING", [1]), *counts]  # the first one is no output of the ensemble
        own = answers if task.encoder_answers else outputs
        parts["encoder"] = encoder(model, ragged(texts), about_tokens + own)
    else:
        tokenizer = batched("tokenizer", MAX_BATCH, texts, tokens + extras + counts, "KIND_CPU")
        parts["tokenizer"] = tokenizer, {"padding": "none", **tokenization(model)}
        parts["encoder"] = encoder(model, ragged(tokens), outputs)
    if task.is_one_model:
        return parts
    if task.has_last_step:
        inputs = ragged(outputs + from_tokenizer) + from_request
        parts["answers"] = batched("postprocessor", MAX_BATCH, inputs, answers, "KIND_CPU"), last_step(model)
    if task.cuts_windows:
        for part in ("encoder", "answers"):
            parts[part][0]["max_batch_size"] = MAX_WINDOWS
    steps = {model.part(part).name: config for part, (config, _) in parts.items()}
    # The gateway's clients get the labels by their names.
    labels: Parameters = {"labels": json.dumps(model.labels, ensure_ascii=False)} if "scores" in task.answers else {}
    return parts | {"ensemble": (ensemble(steps, texts, responses), labels)}


def tokenization(model: TextModel) -> Parameters:
    parameters: Parameters = {}
    if model.mask:
        parameters["exactly_one"] = model.mask
    if model.task.cuts_windows:
        parameters["max_windows"] = MAX_WINDOWS
    if not model.hugging_face_tokenizer("").input_ids:  # it adds no special tokens, and no model runs on nothing
        parameters["min_length"] = 1
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
    if model.task.tokenizes_in_encoder:
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
        cores = {"NEURON_CORE_START_INDEX": target.cores[0], "NEURON_CORE_END_INDEX": target.cores[-1]}
        return batched("neuron", MAX_BATCH, inputs, outputs, "KIND_MODEL"), {"task": "text-encoder", **cores}
    if model.job.format != "python":
        return batched("packed_onnx", MAX_BATCH, inputs, outputs, "KIND_AUTO"), {}
    parameters: Parameters = {"task": "text-encoder", "model_class": model.model_class}
    if model.mask:
        parameters["mask_token_id"] = model.hugging_face_tokenizer.mask_token_id
    parameters |= model.layers
    if model.job.trust_remote_code:
        parameters["trust_remote_code"] = 1
    return batched("transformers", MAX_BATCH, inputs, outputs, "KIND_AUTO"), parameters


def last_step(model: TextModel) -> Parameters:
    parameters: Parameters = {"task": model.job.task}
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
