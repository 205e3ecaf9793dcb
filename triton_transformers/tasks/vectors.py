"""The tasks that turn texts, and texts and images, into vectors."""

from __future__ import annotations

from triton_transformers.protocol import SPAN_VECTORS, VECTOR_COUNT
from triton_transformers.tasks.task import INT8, ONNX, PIPELINE, Axes, Encoder, Task

QUERY = "How do I reset my password?"
TEXTS = (
    "Open the settings and choose a new password.",
    "Our shop is open from Monday to Saturday.",
    "Passwords have at least twelve characters.",
    "The parcel arrives within three days.",
)
CAPTIONS = (
    "a landscape with hills under the sun",
    "a street in a city at night",
    "a cat on a sofa",
    "a page of printed text",
)
INPUTS = {"input_text": QUERY}
SPARSE: dict[str, tuple[str, Axes]] = {
    "token": ("STRING", ("E",)),
    "token_id": ("INT64", ("E",)),
    "weight": ("FP32", ("E",)),
}
MULTI_VECTOR: dict[str, tuple[str, Axes]] = {
    VECTOR_COUNT: ("INT32", (1,)),
    "score": ("FP32", (1,)),
    "token_embeddings": ("FP32", ("T", "M")),
}
# Added to a model that pools the mean of its tokens: a vector for each span of a text.
SPAN_OUTPUTS: dict[str, Axes] = {"last_hidden_state": ("T", "H")}
SPAN_ANSWERS: dict[str, tuple[str, Axes]] = {
    "sentence_embedding": ("FP32", ("D",)),
    SPAN_VECTORS: ("FP32", ("S", "D")),
}
# The two encoders of DPR: one for questions, one for passages.
DPR = ("DPRContextEncoder", "DPRQuestionEncoder")

TASKS = {
    "sentence-similarity": Task(
        "turns texts into vectors",
        kind="embedding",
        recipe="text.recipe",
        formats=INT8,
        neuron=True,
        heads=DPR,
        inputs=INPUTS,
        encoder=Encoder("AutoModel", {"sentence_embedding": ("D",)}),
    ),
    "sparse-embedding": Task(
        "turns a text into a sparse vector",
        recipe="text.recipe",
        formats=INT8,
        neuron=True,
        inputs=INPUTS,
        is_incomparable=True,
        encoder=Encoder("AutoModelForMaskedLM", {"sparse_embedding": ("V",)}, answers=SPARSE),
    ),
    "multi-vector-embedding": Task(
        "turns a text into several vectors, to be matched one by one",
        recipe="text.recipe",
        formats=("onnx", "python"),
        inputs=INPUTS,
        encoder=Encoder(
            "AutoModel", {"token_embeddings": ("T", "M")}, answers=MULTI_VECTOR, encoder_answers=True, is_one_model=True
        ),
    ),
    "hybrid-embedding": Task(
        "turns a text into a vector, a sparse one, and one for each token",
        recipe="text.recipe",
        formats=("onnx", "python"),
        inputs=INPUTS,
        encoder=Encoder(
            "AutoModel",
            {"sentence_embedding": ("D",), "token_weights": ("T",), "token_embeddings": ("T", "M")},
            answers={"sentence_embedding": ("FP32", ("D",)), **SPARSE, **MULTI_VECTOR},
            encoder_answers=True,
            is_one_model=True,
        ),
    ),
    "feature-extraction": Task(
        "turns a text into a vector for each token",
        {"text": "text"},
        "truncation",
        recipe="text.recipe",
        formats=(*INT8, PIPELINE),
        neuron=True,
        inputs=INPUTS,
        encoder=Encoder("AutoModel", {"last_hidden_state": ("T", "D")}),
    ),
    "text-image-similarity": Task("turns texts and images into vectors of one space", recipe="vision", formats=ONNX),
}
