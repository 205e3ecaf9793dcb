"""The requests of docs/architectures.csv, and the answers of the reference libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.architectures.small_models import POSITIONS, SmallModel
from scripts.stack.smoke import send_rows
from serving.pipelines.outputs import plain
from triton_transformers.answers import Outputs
from triton_transformers.corpus import MIXED
from triton_transformers.triton import Triton

Row = list[dict[str, Any]]  # the inputs of one example, as in Triton's JSON
NEW_TOKENS = 8

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
    return send_rows(triton, name, config, rows)


# --- the reference libraries ------------------------------------------------------------------------------------------

Texts = dict[str, str]  # the inputs of one example
# Answers one example: its texts, or its image.
Answer = Callable[[Any], Outputs]


def reference(model: SmallModel, weights: Path) -> list[Outputs]:
    """Return the library's answer to each of the model's requests."""
    examples = images() if model.task.startswith("image-") else texts_of(model)
    answer = REFERENCES[model.task](model, str(weights))
    return [{name: plain(values) for name, values in answer(example).items()} for example in examples]


def pipeline(model: SmallModel, weights: str, **options: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    make: Any = transformers.pipeline
    return make(model.task, model=weights, device="cpu", **options)


def classified(model: SmallModel, weights: str) -> Answer:
    classify = pipeline(model, weights, top_k=None)
    keys = {"input_text": "text", "text_pair": "text_pair"}

    def answer(texts: Texts) -> Outputs:
        inputs = {keys[name]: text for name, text in texts.items()}
        return by_label(classify, classify(inputs, truncation=True, max_length=POSITIONS))

    return answer


def classified_images(model: SmallModel, weights: str) -> Answer:
    from PIL import Image

    classify = pipeline(model, weights)
    count = classify.model.config.num_labels
    return lambda image: by_label(classify, classify(Image.fromarray(image), top_k=count))


def by_label(classify: Any, scores: list[dict[str, Any]]) -> Outputs:
    """Return the scores in the order of the model's labels."""
    config = classify.model.config
    by_name = {score["label"]: score["score"] for score in scores}
    return {"scores": [by_name[config.id2label[i]] for i in range(config.num_labels)], "label": [scores[0]["label"]]}


def entities(model: SmallModel, weights: str) -> Answer:
    find = pipeline(model, weights, aggregation_strategy="simple")
    find.tokenizer.model_max_length = POSITIONS
    names = {"label": "entity_group", "score": "score", "start": "start", "end": "end"}
    return lambda texts: columns(find(texts["input_text"]), names)


def words(model: SmallModel, weights: str) -> Answer:
    fill = pipeline(model, weights)
    options = {"tokenizer_kwargs": {"truncation": True, "max_length": POSITIONS}}
    return lambda texts: columns(fill(texts["input_text"], **options), {"token": "token_str", "score": "score"})


def columns(rows: list[dict[str, Any]], names: dict[str, str]) -> Outputs:
    return {name: [row[key] for row in rows] for name, key in names.items()}


def spans(model: SmallModel, weights: str) -> Answer:
    """Answer by the rule of the pipeline that transformers had before release 5; find_answer() keeps it."""
    from transformers import AutoTokenizer

    from export.recipes.text.references import find_answer

    network, tokenizer = model.network_class.from_pretrained(weights).eval(), AutoTokenizer.from_pretrained(weights)

    def answer(texts: Texts) -> Outputs:
        found = find_answer(network, tokenizer, texts["question"], texts["context"], POSITIONS)
        return {"answer": [found.text], "score": [found.score], "start": [found.start], "end": [found.end]}

    return answer


def features(model: SmallModel, weights: str) -> Answer:
    extract = pipeline(model, weights)
    options = {"truncation": True, "max_length": POSITIONS}
    return lambda texts: {"last_hidden_state": np.ravel(extract(texts["input_text"], tokenize_kwargs=options)).tolist()}


def embeddings(model: SmallModel, weights: str) -> Answer:
    from sentence_transformers import SentenceTransformer

    encode = SentenceTransformer(weights, device="cpu").encode

    def answer(texts: Texts) -> Outputs:
        return {
            "sentence_embedding": encode(texts["input_text"], prompt_name=texts.get("prompt_name") or None).tolist()
        }

    return answer


def ranking_scores(model: SmallModel, weights: str) -> Answer:
    from sentence_transformers import CrossEncoder

    library = CrossEncoder(weights, device="cpu")
    return lambda texts: {"score": np.ravel(library.predict([(texts["query"], texts["text"])])).tolist()}


def sparse_vectors(model: SmallModel, weights: str) -> Answer:
    from sentence_transformers import SparseEncoder

    library = SparseEncoder(weights, device="cpu")

    def answer(texts: Texts) -> Outputs:
        vector = library.encode(texts["input_text"], convert_to_sparse_tensor=False).cpu().numpy()
        (ids,) = np.nonzero(vector)
        return {"token": [""] * len(ids), "token_id": ids.tolist(), "weight": vector[ids].tolist()}

    return answer


def image_features(model: SmallModel, weights: str) -> Answer:
    import torch
    import transformers

    network = model.network_class.from_pretrained(weights).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(weights, backend="pil")

    def answer(image: np.ndarray) -> Outputs:
        with torch.inference_mode():
            outputs = network(**processor(image, return_tensors="pt"))
        names = ("last_hidden_state", "pooler_output", "image_embeds")
        return {name: outputs[name].ravel().tolist() for name in names if name in outputs}

    return answer


def generated(model: SmallModel, weights: str) -> Answer:
    generate = pipeline(model, weights)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    return lambda texts: {"text": [generate(texts["prompt"], **options)[0]["generated_text"]]}


REFERENCES: dict[str, Callable[[SmallModel, str], Answer]] = {
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
