"""The tasks of texts and images: each row is a checkpoint, what clients send, and the library that knows the answers.

The rows of the pipelines are tests/support/checkpoints/pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from export.checkpoint.tasks import TEXT_IMAGE
from tests.conformance.tasks import checkpoints, references
from tests.conformance.tasks.references import Reference
from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.encoders import labels, save_sentence_transformer
from triton_transformers.corpus import MIXED

Columns = dict[str, Any]  # by the names of the inputs, with a value for each row

LONG = "word " * 100
TEXTS = ["a", "Rain in the VALLEY, and nobody goes out.", LONG, "rain [PAD] rain [PAD][PAD]"]
SENTENCES = [*MIXED.texts[:8], "a", "", LONG]
QUERIES = ["Which one?", "why", "", "How many people live in Berlin?", "long " * 70, "a"] * 2
DOCUMENTS = [*MIXED.texts[:10], "", LONG]
# Contexts of one word to many times the model's maximum, which are cut into windows.
CONTEXTS = [*(text for text in MIXED.texts[:30] if text), " ".join(MIXED.texts[40:46])]
QUESTIONS = ["Which one?", "why", "How many people live in Berlin?"]
CAPTIONS = [*MIXED.texts[:6], "a", "", LONG, "<|endoftext|> after the end"]
# The corpus, and words that BERT's tokenizer splits, does not know, or finds beside punctuation.
NAMES = [*MIXED.texts[:12], "Zwölfzylinder-Motor, O'Neill's xylophones 🦜🦜x (antidisestablishmentarianism)", "a", ""]
SIZES = ((40, 30), (32, 32), (7, 5), (3, 200), (180, 320), (1, 1))


def image(number: int) -> np.ndarray:
    """Return a smooth image, so that a resize matters."""
    height, width = SIZES[number]
    small = np.random.default_rng(number).integers(0, 256, (5, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


IMAGES: list[Columns] = [{"image": [image(number)]} for number in range(len(SIZES))]
IMAGES.append({"image_bytes": [*map(image, range(len(SIZES)))]})


@dataclass(frozen=True)
class Row:
    name: str
    task: str
    save: Callable[[Path], Path]
    reference: Reference
    requests: Sequence[Columns]
    forms: tuple[str, ...] = ("onnx",)
    slow: tuple[str, ...] = ()  # the formats that only slow tests assemble
    wrong: Sequence[tuple[Columns, str]] = ()  # requests and the reasons for which they are refused
    is_chosen: bool = False  # TASK= chooses the task among several
    on_triton: bool = False  # also on the real server, for clients at once
    on_neuron: bool = False  # there with PROFILE=neuron, too


def choices(texts: Sequence[str], *chosen: dict[str, str]) -> list[Columns]:
    """Return a request without more inputs, and one with each of these."""
    return [{"input_text": texts, **{name: [value] * len(texts) for name, value in one.items()}} for one in chosen]


def pairs(queries: Sequence[str], texts: Sequence[str], *prompts: str) -> list[Columns]:
    """Return a request without an instruction, and one with each of these."""
    columns: Columns = {"query": queries, "text": texts}
    return [columns, *(columns | {"prompt": [prompt] * len(texts)} for prompt in prompts)]


bert, roberta = encoders.save_bert, encoders.save_roberta
MOODS, ENTITIES = labels(encoders.MOODS), labels(encoders.ENTITIES)
MASKED = [f"{text[:20]} [MASK] rain" for text in MIXED.texts[:24]]
CLASSIFIERS = (
    Row("mood", "text-classification", partial(bert, head="ForSequenceClassification", **MOODS), references.classifies,
        [{"input_text": QUERIES}, {"input_text": QUERIES, "text_pair": DOCUMENTS}], slow=("python",),
        on_triton=True, on_neuron=True),
    Row("topics", "text-classification", partial(roberta, head="ForSequenceClassification", **MOODS,
                                                 problem_type="multi_label_classification"),
        partial(references.classifies, activation="sigmoid"), [{"input_text": SENTENCES}], slow=("python",)),
    Row("pairs_of_three", "text-classification", partial(encoders.save_cross_encoder, labels=3), references.classifies,
        [{"input_text": QUERIES, "text_pair": DOCUMENTS}]),
    Row("t5gemma", "text-classification", checkpoints.save_t5gemma, references.classifies,
        [{"input_text": MIXED.texts[:4]}]),
    Row("entities", "token-classification", partial(roberta, head="ForTokenClassification", **ENTITIES),
        references.finds_entities, [{"input_text": NAMES}], ("python",), slow=("onnx",),
        on_triton=True, on_neuron=True),
    Row("blanks", "fill-mask", partial(bert, head="ForMaskedLM"), references.fills, [{"input_text": MASKED}],
        slow=("python",), wrong=[
            ({"input_text": [text]}, "each text must have [MASK] exactly once")
            for text in ("no mask", "[MASK] and [MASK]", f"{LONG} [MASK]")
        ], on_triton=True),
    Row("questions", "question-answering", partial(bert, head="ForQuestionAnswering"), references.answers_questions,
        [{"question": [QUESTIONS[row % 3] for row in range(len(CONTEXTS))], "context": CONTEXTS}], wrong=[
            ({"question": ["why " * 20], "context": ["because"]}, "input 'question' leaves no room for 'context'"),
            ({"question": [LONG], "context": ["because"]}, "input 'question' leaves no room for 'context': shorten it"),
            ({"question": ["why"], "context": ["because " * 5000]}, "has more than 256 windows of 64 tokens: send few"),
        ], on_triton=True, on_neuron=True),
    # A decoder's tokenizer has no CLS token that competes with the context.
    Row("decoder_answers", "question-answering", language.save_llama_for_questions, references.answers_questions,
        [{"question": ["why"] * 8, "context": CONTEXTS[:8]}], (), slow=("python",)),
)  # fmt: skip

ROLES = "{% for role in ['system', 'query', 'document'] %}{% for m in messages if m.role == role %}"
IN_TEXT = f"{ROLES}<{{{{ role }}}}> {{{{ m.content }}}} {{% endfor %}}{{% endfor %}}</s> so:"
IN_PARTS = IN_TEXT.replace("m.content", "m.content[0].text")
INSTRUCTION = "Find what the weather is like"
language_reranker, by_prompts = (
    partial(partial, checkpoints.save_language_reranker),
    pairs(QUERIES, DOCUMENTS, "find", ""),
)
cross_encoder, ranked = partial(partial, encoders.save_cross_encoder), pairs(QUERIES, DOCUMENTS)
in_chat = partial(references.ranks, counts=False)
RANKERS = (
    Row("reranker", "text-ranking", encoders.save_cross_encoder, references.ranks, ranked, on_triton=True),
    Row("roberta", "text-ranking", cross_encoder(saver=roberta, activation_fn=torch.nn.Identity()), references.ranks,
        ranked, ("python",)),
    Row("three", "text-ranking", cross_encoder(labels=3), references.ranks, ranked, (), ("python",), is_chosen=True),
    Row("tanh", "text-ranking", cross_encoder(saver=roberta, labels=2, activation_fn=torch.nn.Tanh()), references.ranks,
        ranked, (), ("onnx",), is_chosen=True),
    # A decoder without a padding token.
    Row("decoder", "text-ranking", partial(language.save_llama_classifier, labels=1), references.ranks, ranked, (),
        ("python",)),
    Row("pair", "text-ranking", language_reranker(), in_chat, by_prompts),
    Row("chat", "text-ranking", language_reranker(false_token=7, template=IN_TEXT), in_chat, by_prompts, ("python",)),
    Row("parts", "text-ranking", language_reranker(false_token=7, template=IN_PARTS), in_chat, by_prompts, (),
        ("onnx",)),
    Row("judge", "text-ranking", language.save_qwen3_reranker, references.ranks_as_model_card,
        pairs(QUERIES, DOCUMENTS, INSTRUCTION), slow=("python",), is_chosen=True, on_triton=True),
)  # fmt: skip

PROMPTS = {"prompts": encoders.PROMPTS, "default_prompt_name": "query"}
PROMPTED = choices(
    TEXTS,
    {},
    {"prompt_name": "query"},
    {"prompt_name": "document"},
    {"prompt": "Find a city: "},
    {"prompt": ""},
    {"prompt_name": "query", "prompt": "x "},
)
QUESTION_AND_PASSAGE = {"prompts": {"query": "question: ", "passage": "passage: "}}
CHAT_OPTIONS = {
    "processor_kwargs": {
        "chat_template": "{% for m in messages %}<s>{{ m.role }} {{ m.content }} {% endfor %}</s> {{ tone }}<s>",
        "truncation_side": "right",
    },
    "processing_kwargs": {"chat_template": {"tone": "calm"}, "text": {"max_length": 40}},
}
ALL_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
pooled = partial(partial, save_sentence_transformer)
last_token = partial(pooled, pooling="lasttoken")
UNKNOWN = "row 0 has an unknown name; this model's prompts: document, "


def sentences(name: str, save: Callable[[Path], Path], requests: Sequence[Columns], *forms: str, **options: Any) -> Row:
    return Row(name, "sentence-similarity", save, references.encodes, requests, forms, **options)


def sparse(name: str, save: Callable[[Path], Path], requests: Sequence[Columns], *forms: str, **options: Any) -> Row:
    return Row(name, "sparse-embedding", save, references.encodes_sparsely, requests, forms, **options)


def splade(pooling: str, activation: str) -> Callable[[Path], Path]:
    options = {"pooling_strategy": pooling, "activation_function": activation}
    return partial(encoders.save_sparse_encoder, prompts=encoders.PROMPTS, **options)


def spans(values: Any) -> Columns:
    return {"input_text": ["Rain falls."], "spans": [values]}


PLAIN = choices(TEXTS, {})
CHUNKS = [
    ["Rain in the VALLEY. ", "Nobody goes", " out, ", "and bees sleep."],
    ["One chunk"],
    ["Milk. ", "It snowed. ", "No."],
]
ENDS = [np.cumsum([len(chunk) for chunk in chunks]).tolist() for chunks in CHUNKS]
CHUNKED = choices(["".join(chunks) for chunks in CHUNKS], {}, {"prompt_name": "query"})
for columns in CHUNKED:
    columns["spans"] = [list(zip([0, *ends], ends, strict=False)) for ends in ENDS]
WITH_EMPTY = choices([*TEXTS, ""], {})  # a table has a vector for a text without tokens
WEIGHED = choices(SENTENCES, {}, {"prompt_name": "query"})
SENTENCE_MODELS = (
    sentences("sentences", pooled(prompts=encoders.PROMPTS, default_prompt_name="passage"), PROMPTED, on_triton=True,
              on_neuron=True),
    sentences("all_modes", pooled(pooling=ALL_MODES, layers=["Dense", "Normalize"], truncate_dim=8), PLAIN, "onnx",
              slow=("python",)),
    sentences("left_padded", last_token(save_plain=encoders.save_qwen3, **PROMPTS), PROMPTED, "python", slow=("onnx",),
              wrong=[
                  ({"input_text": ["a"], "prompt_name": ["secret"]}, f"{UNKNOWN}passage, query"),
                  ({"input_text": ["a"], "prompt": ["x", "x"]}, "must have a row for each text: 1, not 2"),
                  ({"input_text": [""], "prompt": [""]}, "text 0 has 0 tokens; it must have 1 to 48"),
              ]),
    sentences("right_padded", last_token(save_plain=partial(encoders.save_qwen3, padding_side="right"),
                                         prompts=encoders.PROMPTS), PROMPTED, slow=("python",)),
    sentences("chat_model", last_token(save_plain=encoders.save_qwen3, transformer=CHAT_OPTIONS, **PROMPTS), PROMPTED,
              "onnx", slow=("python",)),
    sentences("t5", pooled(save_plain=encoders.save_t5_encoder), PLAIN, slow=("onnx", "python")),
    sentences("instructor", pooled(include_prompt=False, save_plain=roberta, **PROMPTS,
                                   transformer={"do_lower_case": True, "max_seq_length": 24}), PROMPTED,
              slow=("onnx", "python")),
    sentences("router", partial(encoders.save_router, **QUESTION_AND_PASSAGE), PROMPTED, "onnx", on_triton=True),
    sentences("table", checkpoints.save_table, WITH_EMPTY, "onnx"),
    sentences("convolution", checkpoints.save_convolution, PLAIN, slow=("onnx",)),
    sentences("layers", checkpoints.save_mean_of_layers, PLAIN, slow=("onnx",)),
    sentences("other_width", checkpoints.save_pooling_of_another_width, PLAIN, "onnx"),
    # Late chunking: a vector for each span of a text, the mean of its tokens' vectors in the whole text.
    sentences("spans", pooled(transformer={"max_seq_length": 64}, layers=["Dense", "Normalize"], truncate_dim=8,
                              prompts={"query": "ask: "}), CHUNKED, "onnx", "python", wrong=[
        (spans([[0, 4], [90, 99]]), "span 1 of text 0 has no token: it is empty, has only spaces, or lies outside the"),
        (spans([[4, 5]]), "span 0 of text 0 has no token"),
        (spans([[2, 2]]), "span 0 of text 0 has no token"),
        (spans([[-3, 4]]), "span 0 of text 0 has no token"),
        (spans([0, 4]), "must have shape [1, spans, 2]: the first character of each span"),
    ]),
    sparse("splade", splade("max", "relu"), WEIGHED, "onnx", slow=("python",), on_triton=True, on_neuron=True),
    sparse("sums", splade("sum", "log1p_relu"), WEIGHED, "python", slow=("onnx",)),
    sparse("sparse_router", partial(encoders.save_router, is_sparse=True), PROMPTED, "onnx", on_triton=True, wrong=[
        ({"input_text": ["a", "b"], "prompt_name": ["query", "document"]},
         "input 'prompt_name': send queries and documents in requests of their own"),
        ({"input_text": ["a"], "prompt_name": ["secret"]}, f"{UNKNOWN}query"),
    ]),
    sparse("sparse_table", checkpoints.save_sparse_table, WITH_EMPTY, slow=("onnx",)),
    sparse("autoencoder", checkpoints.save_autoencoder, PLAIN, slow=("onnx",)),
)  # fmt: skip

ASKED = ["What do bees eat?", "rain", "What do bees eat?", "why", LONG]
MATCHED = ["Rain, in the VALLEY?", "a", "", MIXED.texts[3], LONG]
MATCHES: list[Columns] = [{"input_text": MATCHED, "query": ASKED}, *choices(ASKED, {"prompt_name": "query"})]
EXPANSION = {"strategy": "min", "length": 16, "attend": False}
colberts = partial(partial, encoders.save_multi_vector)


def multi(name: str, save: Callable[[Path], Path], *forms: str, **options: Any) -> Row:
    return Row(name, "multi-vector-embedding", save, references.encodes_tokens, MATCHES, forms, **options)


TOKEN_VECTORS = (
    multi("plain", colberts(query_length=12, document_length=40), "python"),
    multi("extended", colberts(expansion=EXPANSION), "onnx"),
    multi("stanford", encoders.save_colbert, "onnx", on_triton=True),
    multi("pylate", encoders.save_pylate, "python"),
    Row("m3", "hybrid-embedding", encoders.save_bge_m3, references.encodes_as_flag_embedding,
        [{"input_text": MATCHED, "query": ASKED}, {"input_text": ASKED}], ("onnx", "python"), on_triton=True),
)  # fmt: skip


def dpr(kind: str) -> dict[str, Any]:
    return {
        "save": partial(encoders.save_dpr, head=f"{kind}Encoder", projection_dim=16),
        "reference": partial(references.forwards, kind=f"DPR{kind}Encoder", output="pooler_output"),
        "requests": choices(SENTENCES, {}),
    }


FEATURES = (
    Row("features", "feature-extraction", partial(encoders.save_distilbert, head="Model"), references.forwards,
        choices(SENTENCES, {})),
    Row("t5_features", "feature-extraction", partial(encoders.save_t5_encoder, head="Model"),
        partial(references.forwards, kind="T5EncoderModel"), choices(SENTENCES, {}), slow=("python",)),
    Row("gpt2", "feature-extraction", partial(encoders.save_gpt2, head="Model"), references.forwards,
        choices(SENTENCES[:-2], {}), (), ("onnx",)),  # no padding token
    Row("dpr_questions", "sentence-similarity", **dpr("Question")),
    Row("dpr_passages", "sentence-similarity", **dpr("Context"), forms=("python",), slow=("onnx",)),
)  # fmt: skip

PADDED = {"padding": "max_length", "max_length": encoders.POSITIONS}


def joined(name: str, save: Callable[[Path], Path], *forms: str, padding: Any = (), **options: Any) -> Row:
    options = {"requests": [*choices(CAPTIONS, {}), *IMAGES]} | options
    return Row(name, TEXT_IMAGE, save, partial(references.joins, **dict(padding)), forms=forms, **options)


def seen(name: str, save: Callable[[Path], Path], *forms: str, slow: tuple[str, ...] = ()) -> Row:
    return Row(name, "image-feature-extraction", save, references.sees, IMAGES, forms, slow, is_chosen=True)


with_option = partial(partial, vision.save_siglip)
VISION = (
    joined("clip", vision.save_clip, "onnx", on_triton=True),
    joined("siglip", vision.save_siglip, "python", slow=("onnx",), padding=PADDED, on_triton=True),
    joined("early_clip", partial(vision.save_clip, legacy=True), slow=("onnx", "python")),  # as earlier releases
    joined("masked", with_option(has_mask=True), slow=("onnx",), padding=PADDED),
    joined("own_tokenizer", with_option(own_tokenizer=True), "python", padding=PADDED, requests=choices(
        [*CAPTIONS, *MIXED.texts[6:40], "  A Cat, on a  SOFA!", "'quoted'", "tab\tnew\nline", "漢字 漢"], {})),
    Row("library_clip", TEXT_IMAGE, checkpoints.save_clip_of_the_library, references.encodes,
        [*choices(CAPTIONS, {}), *IMAGES]),
    Row("captions", "sentence-similarity", vision.save_clip, references.joins, choices(CAPTIONS, {}), is_chosen=True),
    Row("text_half", "sentence-similarity", checkpoints.save_text_half_of_clip,
        partial(references.forwards, kind="CLIPTextModelWithProjection", output="text_embeds"), choices(CAPTIONS, {})),
    seen("clip_images", vision.save_clip, "onnx", slow=("python",)),
    seen("siglip_images", vision.save_siglip, "python", slow=("onnx",)),
    seen("vit", vision.save_vit, slow=("onnx", "python")),
    seen("dinov2", vision.save_dinov2, slow=("onnx", "python")),
    Row("pets", "image-classification", vision.save_vit_classifier, references.classifies_images, IMAGES,
        ("onnx",), slow=("python",), on_triton=True),
)  # fmt: skip

ROWS = (*CLASSIFIERS, *RANKERS, *SENTENCE_MODELS, *TOKEN_VECTORS, *FEATURES, *VISION)
