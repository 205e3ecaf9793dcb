"""Models of the world that read what they get: of three kinds of vectors, of spans, of sound, of moderations."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.support.triton_stand_in import Model, Signature, of_texts, refusal, rows_of, token_counts, vector
from triton_transformers.tasks.media import png
from triton_transformers.tensors import Tensor

IMAGE = png(1, 64, 48)
URL = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"
GIF = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
SOUND = b"RIFF\r\n--\x00\xff\r\n"
CHUNKS = {
    True: [("\u200b One.", 0.0, 1.5), (" Two.", 61.25, None)],
    "word": [(" One.", 0.0, 1.5), (" Two.", 61.25, 61.5)],
}


def m3() -> Model:
    """Return a model with three kinds of vectors: each word has one, but not the word "the", and a query a score."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        texts = inputs["input_text"].texts()
        words = [[word for word in text.split() if word != "the"] for text in texts]
        vectors = np.zeros((len(texts), max(map(len, words)), 2), "f")
        for row, own in zip(vectors, words, strict=True):
            row[: len(own)] = [[len(word), 1] for word in own]
        tensors = [
            Tensor.from_values("sentence_embedding", "FP32", [vector(text) for text in texts]),
            Tensor.from_values("token_id", "INT64", [[len(text), -1] for text in texts]),
            Tensor.from_values("weight", "FP32", [[0.5, 0] for _ in texts]),
            Tensor.from_values("token_embeddings", "FP32", vectors),
            Tensor.from_values("vector_count", "INT32", [[len(own)] for own in words]),
            token_counts(texts),
        ]
        if "query" in inputs:
            pairs = zip(inputs["query"].texts(), words, strict=True)
            scores = [[sum(word in own for word in query.split())] for query, own in pairs]
            tensors.append(Tensor.from_values("score", "FP32", scores))
        yield tensors

    inputs: Signature = {"input_text": ("STRING", [1]), "query": ("STRING", [1])}
    outputs: Signature = {
        "sentence_embedding": ("FP32", [4]),
        "token_id": ("INT64", [-1]),
        "weight": ("FP32", [-1]),
        "token_embeddings": ("FP32", [-1, 2]),
        "vector_count": ("INT32", [1]),
        "score": ("FP32", [1]),
        "token_count": ("INT32", [1]),
    }
    return Model("m3", inputs, outputs, answer, optional=("query",))


def chunked() -> Model:
    """Return a model whose vector of a span is that of its characters."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        (text,), (spans,) = inputs["input_text"].texts(), inputs["spans"].array()
        vectors = [[vector(text[start:end]) for start, end in spans]]
        yield [Tensor.from_values("span_embeddings", "FP32", vectors), token_counts([text])]

    inputs: Signature = {"input_text": ("STRING", [1]), "spans": ("INT64", [-1, 2])}
    outputs: Signature = {"sentence_embedding": ("FP32", [4]), "span_embeddings": ("FP32", [-1, 4])}
    return Model("chunked", inputs, outputs | {"token_count": ("INT32", [1])}, answer, optional=("spans",))


def whisper(name: str, **parameters: str) -> Model:
    """Return a pipeline of speech that answers as Whisper does."""

    def hear(content: bytes, parameters: dict[str, Any]) -> Any:
        if content != SOUND:
            raise refusal(400, "row 0 of 'audio': it is not a whole file", "audio")
        if parameters.get("generate_kwargs", {}).get("language") == "xx":
            raise refusal(400, "Unsupported language: xx", "language")
        answer: dict[str, Any] = {"text": " One. Two."}
        if stamps := parameters.get("return_timestamps"):
            more = {"language": "french"} if "return_language" in parameters else {}
            answer["chunks"] = [
                {"text": text.strip("\u200b"), "timestamp": [start, end], **more} for text, start, end in CHUNKS[stamps]
            ]
        return answer | ({"duration": 62.0} if "return_duration" in parameters else {})

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        (sent,), (content,) = inputs["parameters"].texts(), rows_of(inputs["audio"])
        yield [Tensor.from_texts("outputs", [json.dumps(hear(content, json.loads(sent)))], [1, 1])]

    inputs: Signature = {name: ("STRING", [1]) for name in ("inputs", "audio", "parameters")}
    parameters |= {"task": "automatic-speech-recognition", "fields": "audio=audio"}
    outputs: Signature = {"outputs": ("STRING", [1])}
    return Model(
        name, inputs, outputs, answer, parameters=parameters, optional=tuple(inputs), settings={"backend": "pipeline"}
    )


def moderator(name: str, labels: list[str], activation: str) -> Model:
    """Return a classifier whose scores are the numbers of the text."""

    def compute(texts: list[str]) -> list[Tensor]:
        scores = [[float(number) for number in text.split()[: len(labels)]] for text in texts]
        names = Tensor.from_texts("label", [labels[0]] * len(texts), [len(texts), 1])
        best = Tensor.from_values("score", "FP32", [[max(row)] for row in scores])
        return [names, best, Tensor.from_values("scores", "FP32", scores)]

    outputs: Signature = {"label": ("STRING", [1]), "score": ("FP32", [1]), "scores": ("FP32", [len(labels)])}
    return of_texts(name, outputs, compute, parameters={"labels": json.dumps(labels), "activation": activation})
