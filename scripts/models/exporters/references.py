"""Compute the answers that a text system must give, with the library that its users know: one example at a time.

A reference takes a model and its requests, and returns tensors by the names that the served models give them: those
that a client gets, or outputs of the encoder if the answers are discrete (spans, words), because these jump on a tie.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from scripts.common.settings import UserError
from scripts.models.exporters.served import Tensors
from scripts.models.exporters.text_model import TextModel

Reference = Callable[[TextModel, list[Tensors]], list[Tensors]]


def transformers_outputs(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the outputs of transformers' model for what its own tokenizer makes of each request."""
    return [model_outputs(model, tokenize(model, texts_of(model, request))) for request in requests]


def vectors(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the vector of each request's text, with the prompt that the request chooses."""
    (output,) = model.task.outputs
    return [{output: model.encode(texts_of(model, request), **prompt_of(model, request))} for request in requests]


def ranking_scores(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return what predict() returns for each request, with the prompt that it chooses.

    On Neuron only the encoder's outputs can be compared, which are scores without an activation.
    """
    name, options = ("logits", {"activation_fn": torch.nn.Identity()}) if model.job.neuron else ("score", {})
    cross_encoder = model.original
    if cross_encoder.tokenizer.pad_token is None:
        # `predict` asks for padding even of one pair, which then gets none.
        cross_encoder.tokenizer.pad_token = cross_encoder.tokenizer.eos_token
    scores = [
        cross_encoder.predict([texts_of(model, request)], **prompt_of(model, request), **options)
        for request in requests
    ]
    return [{name: np.asarray(row).reshape(1, -1)} for row in scores]


def prompt_of(model: TextModel, request: Tensors) -> dict[str, str]:
    return {name: request[name][0, 0].decode() for name in model.optional_inputs if name in request}


def answer_scores(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the scores of the answers that transformers' pipeline finds, or on Neuron the encoder's outputs."""
    if model.hugging_face_tokenizer.padding_side == "left":
        raise UserError(
            f"{model.job.system}: its tokenizer pads on the left, and transformers' pipeline then puts the context "
            "before the question, which is not served: set padding_side to right in tokenizer_config.json"
        )
    if model.job.neuron:
        return transformers_outputs(model, requests)
    answer = transformers.pipeline(
        "question-answering", model=model.original, tokenizer=model.hugging_face_tokenizer, device="cpu"
    )
    scores = []
    for request in requests:
        question, context = texts_of(model, request)
        # The pipeline refuses an empty context, and has no answer to one without words.
        best = context and answer(question=question, context=context, max_seq_len=model.max_length)
        scores.append({"score": np.array([[best["score"] if best else 0]], np.float32)})
    return scores


# Tasks whose reference is another than the outputs of transformers' model.
REFERENCES: dict[str, Reference] = {
    "sentence-similarity": vectors,
    "sparse-embedding": vectors,
    "text-ranking": ranking_scores,
    "question-answering": answer_scores,
}


def reference(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    return REFERENCES.get(model.job.task, transformers_outputs)(model, requests)


def request_of(model: TextModel, *texts: str) -> Tensors:
    """Return a request with one row. The second of two texts may be optional."""
    return {name: np.array([[text.encode()]], np.object_) for name, text in zip(model.task.inputs, texts, strict=False)}


def texts_of(model: TextModel, request: Tensors) -> list[str]:
    """Return the texts of a request's row."""
    return [request[name][0, 0].decode() for name in model.task.inputs if name in request]


def tokenize(model: TextModel, texts: list[str]) -> dict[str, torch.Tensor]:
    if model.task.second_is_optional:
        texts = texts[:1] + [text for text in texts[1:] if text]  # the pipeline ignores an empty second text
    return model.hugging_face_tokenizer(
        *([text] for text in texts),  # as lists: beside a single text, transformers ignores an empty second one
        truncation=model.task.truncation,
        max_length=model.max_length,
        return_tensors="pt",
    )


@torch.inference_mode()
def model_outputs(model: TextModel, tokens: dict[str, torch.Tensor]) -> Tensors:
    original: Any = model.original
    accepted = inspect.signature(original.forward).parameters
    outputs = original(**{name: tensor for name, tensor in tokens.items() if name in accepted})
    if model.mask:
        position = int((tokens["input_ids"][0] == model.hugging_face_tokenizer.mask_token_id).int().argmax())
        return {"mask_logits": outputs.logits[:, position].numpy()}
    return {name: outputs[name].numpy() for name in model.task.outputs}
