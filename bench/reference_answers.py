"""The requests of docs/architectures.md, the answers of the reference libraries, and how far a served answer is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.small_configs import POSITIONS
from bench.small_models import SmallModel
from scripts.stack.smoke import send_rows
from triton_transformers.answers import difference, largest
from triton_transformers.corpus import MIXED
from triton_transformers.triton import Triton

Row = list[dict[str, Any]]  # the inputs of one example, as in Triton's JSON
Outputs = dict[str, list[Any]]  # by the names that the system gives them
NEW_TOKENS = 8
PADDING = {"", -1, 0}  # of the outputs whose rows have different lengths

# From one token to more than the models take.
TEXTS = ["a", *MIXED.texts[:80:8], "It rains, " * POSITIONS]
SHORT_TEXTS = [text[:40] for text in TEXTS]


def texts_of(model: SmallModel) -> list[dict[str, str]]:
    """Return the texts of each example, by input."""
    if model.task == "text-ranking":
        return [{"query": "Which one?", "text": text} for text in TEXTS]
    if model.task == "question-answering":
        return [{"question": "Which one?", "context": text} for text in TEXTS]
    if model.task == "fill-mask":
        mask = "[MASK]" if model.tokenizer == "wordpiece" else "<mask>"
        return [{"input_text": f"{mask} {text}"} for text in TEXTS]
    if model.task == "text-generation":
        return [{"prompt": text} for text in SHORT_TEXTS]
    if "pairs" in model.note:
        return [{"input_text": "Which one?", "text_pair": text} for text in TEXTS]
    if "prompts" in model.note:
        names = ("query", "passage", "")
        return [{"input_text": text, "prompt_name": names[i % len(names)]} for i, text in enumerate(TEXTS)]
    return [{"input_text": text} for text in TEXTS]


def images() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, (6, 10, 3), np.uint8).repeat(4, axis=0).repeat(4, axis=1) for _ in range(6)]


def requests(model: SmallModel) -> list[Row]:
    if model.task.startswith("image-"):
        arrays = [image.astype(float) for image in images()]
        return [
            [{"name": "image", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}]
            for array in arrays
        ]
    rows = [
        [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in texts.items()]
        for texts in texts_of(model)
    ]
    if model.task == "text-generation":
        tokens = {"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [NEW_TOKENS]}
        return [[*row, tokens] for row in rows]
    return rows


def served_outputs(
    model: SmallModel, triton: Triton, name: str, config: dict[str, Any], rows: list[Row]
) -> list[Outputs]:
    """Send the rows in one request; return the outputs of each."""
    if model.task == "text-generation":
        prompts = [row[0]["data"][0] for row in rows]
        inputs = [rows[0][0] | {"shape": [len(rows)], "data": prompts}, rows[0][1]]
        (text,) = triton.infer(name, {"inputs": inputs}, 60)["outputs"]
        return [{"text": [generated]} for generated in text["data"]]
    outputs = send_rows(triton, name, config, rows)
    return [dense(answer) for answer in outputs] if model.task == "sparse-embedding" else outputs


def dense(answer: Outputs) -> Outputs:
    """Return a sparse vector's weights by token, whatever their order."""
    weights = dict(zip(answer["token_id"], answer["weight"], strict=True))
    return {"weight": [weights.get(token, 0.0) for token in range(max([*weights, 0]) + 1)]}


# --- the reference libraries ------------------------------------------------------------------------------------------


def reference(model: SmallModel, weights: Path) -> list[Outputs]:
    """Return the library's answer to each of the model's requests."""
    return REFERENCES[model.task](model, str(weights))


def pipeline(model: SmallModel, weights: str, **options: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    make: Any = transformers.pipeline
    return make(model.task, model=weights, device="cpu", **options)


def classified(model: SmallModel, weights: str) -> list[Outputs]:
    classify = pipeline(model, weights, top_k=None)
    names = [classify.model.config.id2label[i] for i in range(classify.model.config.num_labels)]
    keys = {"input_text": "text", "text_pair": "text_pair"}
    answers = []
    for texts in texts_of(model):
        inputs = {keys[name]: text for name, text in texts.items()}
        answers.append(by_label(names, classify(inputs, truncation=True, max_length=POSITIONS)))
    return answers


def classified_images(model: SmallModel, weights: str) -> list[Outputs]:
    from PIL import Image

    classify = pipeline(model, weights)
    names = [classify.model.config.id2label[i] for i in range(classify.model.config.num_labels)]
    return [by_label(names, classify(Image.fromarray(image), top_k=len(names))) for image in images()]


def by_label(names: list[str], scores: list[dict[str, Any]]) -> Outputs:
    by_name = {score["label"]: score["score"] for score in scores}
    return {"scores": [by_name[name] for name in names], "label": [scores[0]["label"]]}


def entities(model: SmallModel, weights: str) -> list[Outputs]:
    find = pipeline(model, weights, aggregation_strategy="simple")
    find.tokenizer.model_max_length = POSITIONS
    answers = (find(texts["input_text"]) for texts in texts_of(model))
    names = {"label": "entity_group", "score": "score", "start": "start", "end": "end"}
    return [{name: [entity[key] for entity in answer] for name, key in names.items()} for answer in answers]


def words(model: SmallModel, weights: str) -> list[Outputs]:
    fill = pipeline(model, weights)
    options = {"tokenizer_kwargs": {"truncation": True, "max_length": POSITIONS}}
    answers = (fill(texts["input_text"], **options) for texts in texts_of(model))
    return [
        {"token": [word["token_str"] for word in answer], "score": [word["score"] for word in answer]}
        for answer in answers
    ]


def spans(model: SmallModel, weights: str) -> list[Outputs]:
    """Answer by the rule of the pipeline that transformers had before release 5: `exporters.references` keeps it."""
    from transformers import AutoTokenizer

    from triton_transformers.models.exporters.references import find_answer

    network, tokenizer = model.network_class.from_pretrained(weights).eval(), AutoTokenizer.from_pretrained(weights)
    answers = (
        find_answer(network, tokenizer, texts["question"], texts["context"], POSITIONS) for texts in texts_of(model)
    )
    return [
        {"answer": [found.text], "score": [found.score], "start": [found.start], "end": [found.end]}
        for found in answers
    ]


def features(model: SmallModel, weights: str) -> list[Outputs]:
    extract = pipeline(model, weights)
    options = {"truncation": True, "max_length": POSITIONS}
    answers = (extract(texts["input_text"], tokenize_kwargs=options) for texts in texts_of(model))
    return [{"last_hidden_state": np.ravel(answer).tolist()} for answer in answers]


def embeddings(model: SmallModel, weights: str) -> list[Outputs]:
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(weights, device="cpu")
    return [
        {
            "sentence_embedding": library.encode(
                texts["input_text"], prompt_name=texts.get("prompt_name") or None
            ).tolist()
        }
        for texts in texts_of(model)
    ]


def ranking_scores(model: SmallModel, weights: str) -> list[Outputs]:
    from sentence_transformers import CrossEncoder

    library = CrossEncoder(weights, device="cpu")
    pairs = [(texts["query"], texts["text"]) for texts in texts_of(model)]
    return [{"score": np.ravel(library.predict([pair])).tolist()} for pair in pairs]


def sparse_vectors(model: SmallModel, weights: str) -> list[Outputs]:
    from sentence_transformers import SparseEncoder

    library = SparseEncoder(weights, device="cpu")
    vectors = (library.encode(texts["input_text"], convert_to_sparse_tensor=False) for texts in texts_of(model))
    # dense() ends at the last weight of a served answer, so cut the zeros at the end.
    return [{"weight": np.trim_zeros(vector.cpu().numpy(), "b").tolist()} for vector in vectors]


def image_features(model: SmallModel, weights: str) -> list[Outputs]:
    import torch
    import transformers

    network = model.network_class.from_pretrained(weights).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(weights, backend="pil")
    names = ("last_hidden_state", "pooler_output", "image_embeds")
    answers = []
    for image in images():
        with torch.inference_mode():
            outputs = network(**processor(image, return_tensors="pt"))
        answers.append({name: outputs[name].ravel().tolist() for name in names if name in outputs})
    return answers


def generated(model: SmallModel, weights: str) -> list[Outputs]:
    generate = pipeline(model, weights)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    return [{"text": [generate(texts["prompt"], **options)[0]["generated_text"]]} for texts in texts_of(model)]


REFERENCES: dict[str, Callable[[SmallModel, str], list[Outputs]]] = {
    "text-classification": classified,
    "text-ranking": ranking_scores,
    "sentence-similarity": embeddings,
    "sparse-embedding": sparse_vectors,
    "feature-extraction": features,
    "token-classification": entities,
    "fill-mask": words,
    "question-answering": spans,
    "image-classification": classified_images,
    "image-feature-extraction": image_features,
    "text-generation": generated,
}


# --- the comparison ---------------------------------------------------------------------------------------------------


def largest_difference(expected: list[Outputs], actual: list[Outputs], compares_texts: bool = True) -> float:
    """Return the largest difference between numbers, relative to the output's largest; infinite if texts differ.

    An answer may end in padding, because another row of its request is longer.
    """
    worst = 0.0
    for name in expected[0]:
        scale = largest([np.array([x for outputs in expected for x in outputs[name] if not isinstance(x, str)])])
        for left, right in zip(expected, actual, strict=True):
            a, b, rest = left[name], right[name][: len(left[name])], right[name][len(left[name]) :]
            if len(a) != len(b) or not PADDING.issuperset(rest):
                return float("inf")
            if any(isinstance(x, str) for x in a):
                worst = float("inf") if compares_texts and a != b else worst
            else:
                worst = max(worst, difference(a, b, scale))
    return worst
