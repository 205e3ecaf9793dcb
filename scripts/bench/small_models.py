"""Save small models with random weights, made from real architectures: the rows of docs/architectures.md."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from scripts.common.corpus import MIXED

POSITIONS = 64
SIDE = 32  # of an image
SPREAD = 0.3  # wide enough that an answer depends on the whole input
LABELS = {"id2label": {0: "calm", 1: "cross", 2: "glad"}, "label2id": {"calm": 0, "cross": 1, "glad": 2}}
ENTITIES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
    "initializer_factor": 1.0,
}
IMAGE = {"image_size": SIDE, "patch_size": 8}
ONNX, PYTHON, BOTH, ALL = ("onnx",), ("python",), ("onnx", "python"), ("onnx", "onnx-int8", "python")


@dataclass(frozen=True, eq=False)  # compared by identity: a dict of fields has no hash
class SmallModel:
    """An architecture for a task, and the formats in which it is served."""

    kind: str  # of transformers' classes: Bert for BertConfig and BertForSequenceClassification
    head: str
    task: str
    formats: tuple[str, ...] = BOTH
    tokenizer: str = "wordpiece"
    fields: dict[str, Any] = field(default_factory=dict)  # of the config
    note: str = ""

    @property
    def system(self) -> str:
        words = f"{self.kind}{self.task}{self.note}"
        return "".join(letter.lower() for letter in words if letter.isalnum())

    def save(self, folder: Path) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            SAVE.get(self.task, save_text)(self, folder)
        return folder


def save_text(row: SmallModel, folder: Path) -> None:
    tokenizer = TOKENIZERS[row.tokenizer]()
    network(row, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def network(row: SmallModel, tokenizer: Any) -> Any:
    known = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = getattr(transformers, f"{row.kind}Config")(**given(SIZE | known | row.fields))
    return getattr(transformers, f"{row.kind}{row.head}")(config)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that an architecture does not take."""
    return {name: value for name, value in fields.items() if value is not None}


def save_sentence_transformer(row: SmallModel, folder: Path) -> None:
    """Save a sentence-transformer. `row.note` may name the pooling and ask for prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    save_text(row, folder / "plain")
    transformer = modules.Transformer(str(folder / "plain"), max_seq_length=48)
    pooling = next((mode for mode in ("cls", "max", "lasttoken", "weightedmean") if mode in row.note), "mean")
    layers = [transformer, modules.Pooling(32, pooling_mode=pooling), modules.Normalize()]
    prompts = {"query": "find what this asks: ", "passage": "text: "} if "prompts" in row.note else {}
    model = SentenceTransformer(modules=layers, device="cpu", prompts=prompts)
    model.default_prompt_name = "query" if prompts else None
    model.save(str(folder))


def save_cross_encoder(row: SmallModel, folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    save_text(row, folder / "plain")
    CrossEncoder(str(folder / "plain"), device="cpu").save_pretrained(str(folder))


def save_sparse_encoder(row: SmallModel, folder: Path) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    save_text(row, folder / "plain")
    SparseEncoder(modules=[MLMTransformer(str(folder / "plain")), SpladePooling()], device="cpu").save(str(folder))


def save_image(row: SmallModel, folder: Path) -> None:
    config = getattr(transformers, f"{row.kind}Config")(**given(SIZE | IMAGE | row.fields))
    getattr(transformers, f"{row.kind}{row.head}")(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


SAVE: dict[str, Callable[[SmallModel, Path], None]] = {
    "sentence-similarity": save_sentence_transformer,
    "text-ranking": save_cross_encoder,
    "sparse-embedding": save_sparse_encoder,
    "image-classification": save_image,
    "image-feature-extraction": save_image,
}


# --- tokenizers, trained on the committed texts -----------------------------------------------------------------------


def wordpiece(**options: Any) -> Any:
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(MIXED.texts, vocab_size=600, show_progress=False)
    return from_files(trained, transformers.BertTokenizerFast, **options)


def byte_level() -> Any:
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(MIXED.texts, vocab_size=600, special_tokens=special, show_progress=False)
    return from_files(trained, transformers.RobertaTokenizerFast)


def from_files(trained: Any, kind: Any, **options: Any) -> Any:
    """Build the tokenizer from vocabulary files: only then does it put its special tokens around a text."""
    with tempfile.TemporaryDirectory() as folder:
        return kind(*trained.save_model(folder), model_max_length=POSITIONS, **options)


def decoder(pad: str | None = "</s>", side: str = "right", ends: bool = False) -> Any:
    """Return the tokenizer of a decoder: a text begins with <s>, and with `ends` ends with </s>."""
    trained = ByteLevelBPETokenizer()
    special = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(MIXED.texts, vocab_size=600, special_tokens=special, show_progress=False)
    template = TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A",
        pair="<s> $A $B </s>" if ends else "<s> $A $B",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    trained._tokenizer.post_processor = template
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=POSITIONS,
        padding_side=side,
        model_input_names=["input_ids", "attention_mask"],
        **{"pad_token": pad} if pad else {},
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "wordpiece": wordpiece,
    "wordpiece without types": lambda: wordpiece(model_input_names=["input_ids", "attention_mask"]),
    "wordpiece without a mask": lambda: wordpiece(model_input_names=["input_ids", "token_type_ids"]),
    "byte-level": byte_level,
    "decoder": decoder,
    "decoder, padded on the left": lambda: decoder(side="left", ends=True),
    "decoder without a padding token": lambda: decoder(pad=None),
}


# --- the rows ---------------------------------------------------------------------------------------------------------

CLASSIFY = ("ForSequenceClassification", "text-classification")
OFFSET = {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}  # positions begin after the padding token's
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
ONE_LABEL = {"num_labels": 1}
NO_PAD = "decoder without a padding token"

DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
ALTERNATING = {"global_attn_every_n_layers": 2, "reference_compile": False}
XLNET = {"d_model": 32, "n_head": 4, "d_inner": 64} | dict.fromkeys(
    ("hidden_size", "num_attention_heads", "max_position_embeddings")
)
MULTI_LABEL = LABELS | {"problem_type": "multi_label_classification"}
WORDS = {"id2label": dict(enumerate(ENTITIES))}
LEFT = "decoder, padded on the left"

SMALL_MODELS = (
    # Encoders that classify.
    SmallModel("Bert", *CLASSIFY, ALL, fields=LABELS),
    SmallModel("Bert", *CLASSIFY, BOTH, fields=LABELS, note="pairs"),
    SmallModel("Roberta", *CLASSIFY, ONNX, "byte-level", OFFSET | MULTI_LABEL),
    SmallModel("XLMRoberta", *CLASSIFY, ONNX, "byte-level", OFFSET | LABELS),
    SmallModel("DistilBert", *CLASSIFY, ONNX, "wordpiece without types", LABELS | {"hidden_dim": 64}),
    SmallModel("Albert", *CLASSIFY, ONNX, fields=LABELS | {"embedding_size": 16}),
    SmallModel("Electra", *CLASSIFY, ONNX, fields=LABELS | {"embedding_size": 32}),
    SmallModel("DebertaV2", *CLASSIFY, BOTH, fields=LABELS | DISENTANGLED),
    SmallModel("MPNet", *CLASSIFY, ONNX, "byte-level", OFFSET | LABELS),
    SmallModel("ModernBert", *CLASSIFY, BOTH, fields=LABELS | ALTERNATING),
    SmallModel("ConvBert", *CLASSIFY, BOTH, fields=LABELS | {"embedding_size": 32, "head_ratio": 2}),
    SmallModel("SqueezeBert", *CLASSIFY, ONNX, fields=LABELS | {"embedding_size": 32}),
    SmallModel("RoFormer", *CLASSIFY, ONNX, fields=LABELS | {"embedding_size": 32}),
    SmallModel("FNet", *CLASSIFY, PYTHON, "wordpiece without a mask", LABELS | {"tpu_short_seq_length": 64}),
    SmallModel("XLNet", *CLASSIFY, PYTHON, "byte-level", LABELS | XLNET),
    # Decoders that classify: they find the last token by the padding token.
    SmallModel("Llama", *CLASSIFY, ALL, "decoder", GROUPED | LABELS),
    SmallModel("Llama", *CLASSIFY, BOTH, NO_PAD, GROUPED | LABELS, note="without a padding token"),
    SmallModel("Mistral", *CLASSIFY, ONNX, "decoder", GROUPED | LABELS),
    SmallModel("Qwen2", *CLASSIFY, ONNX, "decoder", GROUPED | LABELS),
    SmallModel("Qwen3", *CLASSIFY, BOTH, LEFT, GROUPED | LABELS),
    SmallModel("Gemma", *CLASSIFY, ONNX, "decoder", GROUPED | LABELS),
    SmallModel("GPT2", *CLASSIFY, ONNX, "decoder", LABELS),
    SmallModel("GPT2", *CLASSIFY, BOTH, NO_PAD, LABELS, note="without a padding token"),
    # Rerankers.
    SmallModel("Bert", "ForSequenceClassification", "text-ranking", ALL, fields=ONE_LABEL),
    SmallModel("XLMRoberta", "ForSequenceClassification", "text-ranking", ONNX, "byte-level", OFFSET | ONE_LABEL),
    SmallModel("Qwen3", "ForSequenceClassification", "text-ranking", BOTH, "decoder", GROUPED | ONE_LABEL),
    # Embeddings.
    SmallModel("Bert", "Model", "sentence-similarity", ALL),
    SmallModel("Bert", "Model", "sentence-similarity", ONNX, note="cls pooling"),
    SmallModel("MPNet", "Model", "sentence-similarity", BOTH, "byte-level", OFFSET, note="prompts"),
    SmallModel("Qwen3", "Model", "sentence-similarity", BOTH, LEFT, GROUPED, note="lasttoken pooling, prompts"),
    SmallModel("Mistral", "Model", "sentence-similarity", ONNX, "decoder", GROUPED, note="lasttoken pooling"),
    SmallModel("Bert", "ForMaskedLM", "sparse-embedding", BOTH),
    SmallModel("DistilBert", "Model", "feature-extraction", BOTH, "wordpiece without types", {"hidden_dim": 64}),
    # Tokens, words, spans.
    SmallModel("Bert", "ForTokenClassification", "token-classification", ONNX, fields=WORDS),
    SmallModel("Roberta", "ForTokenClassification", "token-classification", BOTH, "byte-level", OFFSET | WORDS),
    SmallModel("Bert", "ForMaskedLM", "fill-mask", BOTH),
    SmallModel("Roberta", "ForMaskedLM", "fill-mask", ONNX, "byte-level", OFFSET),
    SmallModel("Bert", "ForQuestionAnswering", "question-answering", BOTH),
    SmallModel("Roberta", "ForQuestionAnswering", "question-answering", ONNX, "byte-level", OFFSET),
    # Images.
    SmallModel("ViT", "ForImageClassification", "image-classification", ALL, fields=LABELS),
    SmallModel("ViT", "Model", "image-feature-extraction", BOTH),
    SmallModel("DeiT", "Model", "image-feature-extraction", ONNX),
    SmallModel("Dinov2", "Model", "image-feature-extraction", ONNX, fields={"mlp_ratio": 2}),
    SmallModel("CLIPVision", "ModelWithProjection", "image-feature-extraction", BOTH, fields={"projection_dim": 16}),
    SmallModel("SiglipVision", "Model", "image-feature-extraction", ONNX),
    # Generation.
    SmallModel("Llama", "ForCausalLM", "text-generation", PYTHON, "decoder", GROUPED),
    SmallModel("Qwen3", "ForCausalLM", "text-generation", PYTHON, "decoder", GROUPED),
    SmallModel("GPT2", "LMHeadModel", "text-generation", PYTHON, "decoder"),
)  # fmt: skip


def find_models(kind: str, task: str, formats: tuple[str, ...] = ()) -> list[SmallModel]:
    """Return the models of this kind for a task, in these formats or in their own."""
    models = [model for model in SMALL_MODELS if (model.kind, model.task) == (kind, task)]
    return [replace(model, formats=formats or model.formats) for model in models]
