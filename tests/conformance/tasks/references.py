"""Compute the answers that the library of a checkpoint gives, one row at a time: padding changes those of some models.

Each function opens a checkpoint, and returns a function that takes the fields of one row and returns its outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from export.recipes.text.references import find_answer
from tests.support.checkpoints import encoders, language

Answer = dict[str, Any]
Reference = Callable[[Path], Callable[..., Answer]]
SPARSE = "sparse_vector"


class SparseVector(NamedTuple):
    """The whole vector whose words `token`, `token_id` and `weight` have."""

    vector: np.ndarray
    words: list[str]


def pipeline(task: str, folder: Path, **settings: Any) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu", **settings)


def classifies(folder: Path, activation: str = "softmax") -> Callable[..., Answer]:
    pipe = pipeline("text-classification", folder, top_k=None, function_to_apply=activation)

    def answer(input_text: str, text_pair: str = "") -> Answer:
        text: Any = {"text": input_text, "text_pair": text_pair} if text_pair else input_text
        (found,) = pipe([text], truncation=True)
        scores = {label["label"]: label["score"] for label in found}
        names = pipe.model.config.id2label.values()
        return {"label": [found[0]["label"]], "score": [found[0]["score"]], "scores": [scores[name] for name in names]}

    return answer


def finds_entities(folder: Path, strategy: str = "simple") -> Callable[..., Answer]:
    pipe = pipeline("token-classification", folder, aggregation_strategy=strategy)
    pipe.tokenizer.model_max_length = encoders.POSITIONS
    label = "entity" if strategy == "none" else "entity_group"

    def answer(input_text: str) -> Answer:
        found = pipe(input_text)
        columns = {"label": label, "score": "score", "start": "start", "end": "end"}
        return {output: [entity[key] for entity in found] for output, key in columns.items()}

    return answer


def fills(folder: Path) -> Callable[..., Answer]:
    pipe = pipeline("fill-mask", folder)
    keys = {"token": "token_str", "token_id": "token", "score": "score"}
    return lambda input_text: {name: [word[key] for word in pipe(input_text)] for name, key in keys.items()}


def answers_questions(folder: Path) -> Callable[..., Answer]:
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def answer(question: str, context: str) -> Answer:
        found = find_answer(network, tokenizer, question, context, encoders.POSITIONS)
        return {"answer": [found.text], "score": [found.score], "start": [found.start], "end": [found.end]}

    return answer


# --- rankers ----------------------------------------------------------------------------------------------------------


def ranks(folder: Path, counts: bool = True) -> Callable[..., Answer]:
    from sentence_transformers import CrossEncoder  # takes 8 s of CPU time

    model = CrossEncoder(str(folder), device="cpu")
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.eos_token

    def answer(query: str, text: str, **choice: str) -> Answer:
        score = np.atleast_1d(model.predict([(query, text)], **choice)[0])
        tokens = {"token_count": [len(model.tokenizer(query, text, truncation=True).input_ids)]} if counts else {}
        return {"score": score, **tokens}

    return answer


def ranks_as_model_card(folder: Path) -> Callable[..., Answer]:
    """Compute what the model card of Qwen3-Reranker computes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    beginning = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    ending = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (beginning, ending))
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    default = "Given a web search query, retrieve relevant passages that answer the query"

    @torch.no_grad()
    def answer(query: str, text: str, prompt: str = default) -> Answer:
        pair = f"<Instruct>: {prompt}\n<Query>: {query}\n<Document>: {text}"
        room = language.RANKED - len(first) - len(last)
        tokens = first + tokenizer(pair, truncation="longest_first", max_length=room).input_ids + last
        logits = model(torch.tensor([tokens])).logits[0, -1]
        score = torch.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1].exp().item()
        return {"score": [score], "token_count": [len(tokens)]}

    return answer


# --- vectors of texts -------------------------------------------------------------------------------------------------


def encodes(folder: Path) -> Callable[..., Answer]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")

    def answer(input_text: str = "", image: Any = None, spans: Any = (), **choice: str) -> Answer:
        given = input_text if image is None else Image.fromarray(image)
        own = {"sentence_embedding": encode(model, given, **choice)}
        prompt = model.prompts.get(choice.get("prompt_name"), "")
        return own | ({"span_embeddings": pooled_spans(model, prompt, input_text, spans)} if spans else {})

    return answer


@torch.no_grad()
def pooled_spans(model: Any, prompt: str, text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Compute the vectors with sentence-transformers' modules: pool each span alone, instead of the whole text."""
    tokens = model.tokenizer(prompt + text, return_offsets_mapping=True, return_tensors="pt")
    offsets = [(first - len(prompt), last - len(prompt)) for first, last in tokens.pop("offset_mapping")[0].tolist()]
    hidden = model[0]({**tokens})["token_embeddings"]
    rows = []
    for start, end in spans:
        mask = torch.tensor([[int(first < last and start < last <= end) for first, last in offsets]])
        features = {"token_embeddings": hidden, "attention_mask": mask}
        for module in list(model)[1:]:
            features = module(features)
        rows.append(features["sentence_embedding"][0, : model.truncate_dim].numpy())
    return np.stack(rows)


def encodes_sparsely(folder: Path) -> Callable[..., Answer]:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")

    def answer(input_text: str, **choice: str) -> Answer:
        vector = encode(model, input_text, **choice, convert_to_sparse_tensor=False)
        return {SPARSE: SparseVector(vector, model.tokenizer.convert_ids_to_tokens(range(len(vector))))}

    return answer


def encode(model: Any, given: Any, prompt_name: str = "", **options: Any) -> np.ndarray:
    """Return the vector by the library's method for this kind of text."""
    methods = {"query": model.encode_query, "document": model.encode_document}
    method = methods.get(prompt_name) or partial(model.encode, prompt_name=prompt_name or None)
    return np.asarray(method(given, **options))


def encodes_tokens(folder: Path) -> Callable[..., Answer]:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(folder), device="cpu")

    def answer(input_text: str, query: str = "", prompt_name: str = "document") -> Answer:
        method = model.encode_query if prompt_name == "query" else model.encode_document
        (vectors,) = method([input_text], convert_to_numpy=True)
        if prompt_name == "query":
            return {"token_embeddings": vectors, "vector_count": [len(vectors)]}
        queries = model.encode_query([query], convert_to_numpy=True)
        score = model.similarity_pairwise(queries, [vectors]).numpy()
        return {"token_embeddings": vectors, "vector_count": [len(vectors)], "score": score}

    return answer


def encodes_as_flag_embedding(folder: Path) -> Callable[..., Answer]:
    """Compute dense_vecs, lexical_weights and colbert_vecs as BGEM3FlagModel.encode() does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    heads = [torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")]
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    normalize = torch.nn.functional.normalize

    @torch.no_grad()
    def encoded(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = tokenizer(text, truncation=True, max_length=encoders.POSITIONS, return_tensors="pt")
        hidden = encoder(**tokens).last_hidden_state
        weight, vectors = (torch.nn.functional.linear(hidden, head["weight"], head["bias"])[0] for head in heads)
        words = np.zeros(len(tokenizer), np.float32)
        for own, id in zip(weight[:, 0].relu().tolist(), tokens["input_ids"][0].tolist(), strict=True):
            words[id] = max(words[id], 0 if id in unused else own)
        return normalize(hidden[0, 0], dim=0).numpy(), words, normalize(vectors[1:], dim=-1).numpy()

    def answer(input_text: str, query: str = "") -> Answer:
        dense, words, vectors = encoded(input_text)
        own: Answer = {"sentence_embedding": dense, SPARSE: SparseVector(words, names)}
        own |= {"token_embeddings": vectors, "vector_count": [len(vectors)]}
        if query:
            of_query = encoded(query)[2]
            own["score"] = [(of_query @ vectors.T).max(1).sum() / len(of_query)]
        return own

    return answer


def forwards(folder: Path, kind: str = "AutoModel", output: str = "last_hidden_state") -> Callable[..., Answer]:
    model = getattr(transformers, kind).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    accepted = inspect.signature(model.forward).parameters
    name = output if output == "last_hidden_state" else "sentence_embedding"

    @torch.inference_mode()
    def answer(input_text: str) -> Answer:
        tokens = tokenizer(input_text, truncation=True, max_length=encoders.POSITIONS, return_tensors="pt")
        return {name: model(**{key: tokens[key] for key in tokens if key in accepted})[output][0].numpy()}

    return answer


# --- images, and texts and images in one space ------------------------------------------------------------------------


def sees(folder: Path) -> Callable[..., Answer]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModel.from_pretrained(folder)
    call = getattr(model, "get_image_features", model)

    @torch.inference_mode()
    def answer(image: np.ndarray) -> Answer:
        found = call(**processor(Image.fromarray(image), return_tensors="pt"))
        return {
            "pooler_output": found.pooler_output[0].numpy(),
            "last_hidden_state": found.last_hidden_state[0].numpy(),
        }

    return answer


def classifies_images(folder: Path) -> Callable[..., Answer]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)

    @torch.inference_mode()
    def answer(image: np.ndarray) -> Answer:
        scores = model(**processor(Image.fromarray(image), return_tensors="pt")).logits[0].softmax(-1).numpy()
        label = model.config.id2label[int(scores.argmax())]
        return {"scores": scores, "score": [scores.max()], "label": [label]}

    return answer


def joins(folder: Path, **options: Any) -> Callable[..., Answer]:
    """Return the vectors of texts, whose tokenizer gets the options, and of images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    of_images = sees(folder)

    @torch.inference_mode()
    def answer(input_text: str = "", image: Any = None) -> Answer:
        if image is not None:
            return {"sentence_embedding": of_images(image)["pooler_output"]}
        tokens = tokenizer(input_text, truncation=True, return_tensors="pt", **options)
        return {"sentence_embedding": model.get_text_features(**tokens).pooler_output[0].numpy()}

    return answer
