"""The tasks of texts: labels, entities, answers, and texts from texts."""

from __future__ import annotations

from typing import Any

from triton_transformers.tasks.task import (
    CANDIDATES,
    FEW_TOKENS,
    INT8,
    LABELS,
    ONNX,
    OPTIONS,
    PIPELINE,
    SAMPLING,
    TOKENS,
    Encoder,
    Hub,
    Task,
)

WRITES = f"{SAMPLING} clean_up_tokenization_spaces {OPTIONS} truncation"
ENTITIES = "Marie Curie was born in Warsaw and worked in Paris."
# Labels of their own that requests send.
SORTS = {"candidate_labels": ["a cat", "a dog on a sofa", "rain"]}


def labelled(answer: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(answer["labels"], answer["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]


def text_to_text(purpose: str, key: str, *types: str, more: str = "") -> Task:
    """Return a task whose pipeline writes a text, which its answer has under this key."""
    return Task(
        purpose,
        {"text": "text"},
        f"{WRITES} {more}",
        hub=Hub(is_flat=True),
        text_key=key,
        quick={OPTIONS: FEW_TOKENS},
        drawing="text",
        types=types,
    )


TEXT_TO_TEXT = {
    "text2text-generation": text_to_text("turns a text into another", "generated_text"),
    "summarization": text_to_text(
        "summarizes a text", "summary_text", "bigbird_pegasus", "led", "pegasus", "pegasus_x"
    ),
    "translation": text_to_text(
        "translates a text",
        "translation_text",
        "fsmt",
        "m2m_100",
        "marian",
        "mbart",
        "nllb-moe",
        more="src_lang tgt_lang",
    ),
}
TASKS = {
    "text-classification": Task(
        "classifies texts",
        {"text": "text"},
        f"{LABELS} {TOKENS}",
        hub=Hub({"top_k": None}, is_nested=True),
        kind="classify",
        example="I love this film.",
        drawing="labels",
        recipe="text.recipe",
        formats=(*INT8, PIPELINE),
        neuron=True,
        heads=("ForSequenceClassification",),
        inputs={"input_text": "", "text_pair": ""},
        encoder=Encoder(
            "AutoModelForSequenceClassification",
            {"logits": ("L",)},
            second_is_optional=True,
            answers={"label": ("STRING", (1,)), "score": ("FP32", (1,)), "scores": ("FP32", ("L",))},
        ),
    ),
    "text-ranking": Task(
        "sorts texts by how well they answer a query",
        kind="rerank",
        recipe="text.recipe",
        formats=INT8,
        neuron=True,
        inputs={"query": "", "text": ""},
        encoder=Encoder("AutoModelForSequenceClassification", {"logits": ("L",)}, answers={"score": ("FP32", ("L",))}),
    ),
    "token-classification": Task(
        "recognizes names and other entities",
        {"text": "text"},
        "aggregation_strategy ignore_labels stride",
        hub=Hub({"aggregation_strategy": "simple"}),
        example=ENTITIES,
        drawing="entities",
        recipe="text.recipe",
        formats=(*INT8, PIPELINE),
        neuron=True,
        version="2",
        heads=("ForTokenClassification",),
        inputs={"input_text": ENTITIES},
        encoder=Encoder(
            "AutoModelForTokenClassification",
            {"logits": ("T", "L")},
            from_tokenizer=("offsets", "special_tokens_mask"),
            encoder_answers=True,
            is_one_model=True,
            answers={
                "label": ("STRING", ("E",)),
                "score": ("FP32", ("E",)),
                "start": ("INT64", ("E",)),
                "end": ("INT64", ("E",)),
            },
        ),
    ),
    "question-answering": Task(
        "finds the answer to a question in a text",
        recipe="text.recipe",
        formats=ONNX,
        neuron=True,
        version="2",
        heads=("ForQuestionAnswering",),
        inputs={
            "question": "Where was Marie Curie born?",
            "context": "Marie Curie was born in Warsaw. In 1891 she went to Paris, where she studied physics.",
        },
        is_incomparable=True,
        encoder=Encoder(
            "AutoModelForQuestionAnswering",
            {"start_logits": ("T",), "end_logits": ("T",)},
            truncation="only_second",
            from_tokenizer=("offsets", "word_offsets", "second_text_mask", "pair"),
            encoder_answers=True,
            is_one_model=True,
            answers={
                "answer": ("STRING", (1,)),
                "score": ("FP32", (1,)),
                "start": ("INT64", (1,)),
                "end": ("INT64", (1,)),
            },
        ),
    ),
    "fill-mask": Task(
        "fills in a masked word",
        {"text": "text"},
        "targets top_k",
        example="Paris is the [MASK] of France.",
        drawing="labels",
        recipe="text.recipe",
        formats=(*ONNX, PIPELINE),
        neuron=True,
        heads=("ForMaskedLM",),
        rank=1,
        inputs={"input_text": "Paris is the {mask} of France."},
        is_incomparable=True,
        encoder=Encoder(
            "AutoModelForMaskedLM",
            {"mask_logits": ("V",)},
            answers={"token": ("STRING", ("K",)), "token_id": ("INT64", ("K",)), "score": ("FP32", ("K",))},
        ),
    ),
    "zero-shot-classification": Task(
        "sorts a text into labels of your own",
        {"text": "text"},
        f"{CANDIDATES} multi_label",
        SORTS,
        hub=Hub(shape=labelled),
        drawing="labels",
        rank=2,
    ),
    "table-question-answering": Task(
        "finds the answer to a question in a table",
        {"table": "json", "query": "text"},
        "padding sequential truncation",
        # Clients require the name, which models without aggregation lack.
        hub=Hub(shape=lambda answer: {"aggregator": "NONE"} | answer),
        noun="tables",
        drawing="table",
    ),
    "decision": Task(
        "decides by questions about a state",
        {"state": "json", "questions": "json", "assets": "images"},
        files=0,
        rank=2,
    ),
    **TEXT_TO_TEXT,
}
