"""Save small models with random weights, made from real architectures: the rows of docs/architectures.md.

Most rows come from transformers' own lists of architectures, and the libraries that are installed save them.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.auto import modeling_auto

from bench.small_configs import POSITIONS, SIDE, WIDTH, small_config
from triton_transformers.corpus import MIXED

LABELS = {"id2label": {0: "calm", 1: "cross", 2: "glad"}, "label2id": {"calm": 0, "cross": 1, "glad": 2}}
ENTITIES = {"id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))}
TOKENS = ("pad", "bos", "eos", "cls", "sep", "mask", "unk")
DEFAULT, BOTH, ALL = ("onnx",), ("onnx", "python"), ("onnx", "onnx-int8", "python")
PYTHON = ("python",)


@dataclass(frozen=True, eq=False)  # compared by identity: a dict of fields has no hash
class SmallModel:
    """An architecture for a task, and the formats in which it is served."""

    architecture: str  # a class of transformers
    task: str
    formats: tuple[str, ...] = DEFAULT
    tokenizer: str = "wordpiece"
    fields: dict[str, Any] = field(default_factory=dict)  # of the config
    note: str = ""
    saved_by: str = "5.24"  # the release of transformers

    @property
    def system(self) -> str:
        words = f"{self.architecture}{self.task}{self.note}{self.saved_by}"
        return "".join(letter.lower() for letter in words if letter.isalnum())

    @property
    def network_class(self) -> Any:
        return getattr(transformers, self.architecture)

    def save(self, folder: Path) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            SAVE.get(self.task, save_text)(self, folder)
        return folder


def save_text(row: SmallModel, folder: Path) -> None:
    tokenizer = tokenizer_of(row)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in TOKENS}
    ids = {name: number for name, number in ids.items() if number is not None or name == "pad_token_id"}
    config = small_config(row.network_class.config_class, {"vocab_size": len(tokenizer), **ids}, **row.fields)
    row.network_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_of(row: SmallModel) -> Any:
    """Return a tokenizer that makes the inputs which the network takes."""
    tokenizer = TOKENIZERS[row.tokenizer]()
    taken = inspect.signature(row.network_class.forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in taken]
    return tokenizer


def save_sentence_transformer(row: SmallModel, folder: Path) -> None:
    """Save a sentence-transformer. `row.note` names the pooling and the modules, and asks for prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    prompts = {"query": "find what this asks: ", "passage": "text: "} if "prompts" in row.note else {}
    if "static" in row.note:
        layers: list[Any] = [modules.StaticEmbedding(tokenizer_of(row).backend_tokenizer, embedding_dim=WIDTH)]
    else:
        save_text(row, folder / "plain")
        transformer = modules.Transformer(str(folder / "plain"), max_seq_length=48)
        words = row.note.replace(",", "").split()
        pooling = tuple(mode for mode in modules.Pooling.POOLING_MODES if mode in words) or ("mean",)
        layers = [transformer, modules.Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
    width = layers[-1].get_embedding_dimension()
    kinds = {"LayerNorm": lambda: modules.LayerNorm(width), "Dense": lambda: modules.Dense(width, 16)}
    layers += [make() for name, make in kinds.items() if name in row.note]
    layers += [] if "not normalized" in row.note else [modules.Normalize()]
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
    row.network_class(small_config(row.network_class.config_class, {}, **row.fields)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


SAVE: dict[str, Callable[[SmallModel, Path], None]] = {
    "sentence-similarity": save_sentence_transformer,
    "text-ranking": save_cross_encoder,
    "sparse-embedding": save_sparse_encoder,
    "image-classification": save_image,
    "image-feature-extraction": save_image,
}


# --- tokenizers, trained on the committed texts -----------------------------------------------------------------------


def wordpiece(kind: Any = transformers.BertTokenizer) -> Any:
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(MIXED.texts, vocab_size=600, show_progress=False)
    return from_files(trained, kind)


def byte_level() -> Any:
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(MIXED.texts, vocab_size=600, special_tokens=special, show_progress=False)
    return from_files(trained, transformers.RobertaTokenizer)


def from_files(trained: Any, kind: Any) -> Any:
    """Build the tokenizer from vocabulary files: only then does it put its special tokens around a text."""
    with tempfile.TemporaryDirectory() as folder:
        return kind(*trained.save_model(folder), model_max_length=POSITIONS)


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


LEFT = "decoder, padded on the left"
NO_PAD = "decoder without a padding token"
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "wordpiece": wordpiece,
    "byte-level": byte_level,
    "decoder": decoder,
    LEFT: lambda: decoder(side="left", ends=True),
    NO_PAD: lambda: decoder(pad=None),
}


# --- the rows ---------------------------------------------------------------------------------------------------------

# Types of models that are too large even with small sizes, that need other libraries, whose checkpoints need code or
# settings of their own, or that share the class of another type.
UNSAVED = {
    "canine", "cohere_compass_text", "dinat", "donut-swin", "efficientnet", "gemma3", "gpt-sw3", "hiera", "imagegpt",
    "jamba", "layoutlmv2", "layoutlmv3", "levit", "lilt", "luke", "mobilevitv2", "modernvbert", "perceiver", "reformer",
    "shieldgemma2", "siglip2", "t5gemma", "t5gemma2", "timm_wrapper", "ultravbert", "xmod", "zamba", "zamba2",
}  # fmt: skip
# The types whose checkpoints have a byte-level tokenizer, without types of tokens or with positions after the padding.
BYTE_LEVEL = {
    "camembert", "data2vec-text", "gte", "ibert", "jina_embeddings_v3", "longformer", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
ONE_LABEL = {"num_labels": 1}


def tokenizer_for(kind: str) -> str:
    if kind in BYTE_LEVEL:
        return "byte-level"
    encoders, decoders = (
        getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in ("MASKED_LM", "CAUSAL_LM")
    )
    return "decoder" if kind in decoders and kind not in encoders else "wordpiece"


def listed(head: str, task: str, kinds: Iterable[str] = (), **options: Any) -> Iterator[SmallModel]:
    """Yield a row for each of these types of models, or for all, in transformers' list of a head's architectures."""
    names = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
    for kind in kinds or sorted(names.keys() - UNSAVED):
        architecture = names[kind] if isinstance(names[kind], str) else names[kind][0]
        yield SmallModel(architecture, task, tokenizer=tokenizer_for(kind), **options)


def classifiers() -> Iterator[SmallModel]:
    """Yield every classifier of texts, some of them in all formats."""
    formats = {"bert": ALL, "fnet": PYTHON, "llama": ALL, "modernbert": BOTH, "xlnet": PYTHON}
    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for kind in sorted(names.keys() - UNSAVED):
        yield from listed(
            "SEQUENCE_CLASSIFICATION", "text-classification", [kind], fields=LABELS, formats=formats.get(kind, DEFAULT)
        )


SENTENCES = "sentence-similarity"
MULTI_LABEL = LABELS | {"problem_type": "multi_label_classification"}
BIDIRECTIONAL = {"use_bidirectional_attention": True}
ENCODER_OF_T5 = {"is_encoder_decoder": False}
TOWER = {"projection_dim": 16}

SMALL_MODELS = (
    *classifiers(),
    SmallModel("BertForSequenceClassification", "text-classification", BOTH, fields=LABELS, note="pairs"),
    SmallModel("RobertaForSequenceClassification", "text-classification", DEFAULT, "byte-level", MULTI_LABEL, "labels"),
    SmallModel("LlamaForSequenceClassification", "text-classification", BOTH, NO_PAD, LABELS, "no padding token"),
    SmallModel("GPT2ForSequenceClassification", "text-classification", BOTH, NO_PAD, LABELS, "no padding token"),
    SmallModel("Qwen3ForSequenceClassification", "text-classification", BOTH, LEFT, LABELS, "padded on the left"),
    # Rerankers.
    SmallModel("BertForSequenceClassification", "text-ranking", ALL, fields=ONE_LABEL),
    SmallModel("XLMRobertaForSequenceClassification", "text-ranking", DEFAULT, "byte-level", ONE_LABEL),
    SmallModel("ModernBertForSequenceClassification", "text-ranking", DEFAULT, fields=ONE_LABEL),
    SmallModel("DebertaV2ForSequenceClassification", "text-ranking", DEFAULT, fields=ONE_LABEL),
    SmallModel("GteForSequenceClassification", "text-ranking", DEFAULT, "byte-level", ONE_LABEL),
    SmallModel("Qwen3ForSequenceClassification", "text-ranking", BOTH, "decoder", ONE_LABEL),
    SmallModel("GemmaForSequenceClassification", "text-ranking", DEFAULT, "decoder", ONE_LABEL),
    # Embeddings: every pooling, and every architecture whose embeddings are downloaded much.
    SmallModel("BertModel", SENTENCES, ALL),
    SmallModel("BertModel", SENTENCES, note="cls pooling"),
    SmallModel("BertModel", SENTENCES, note="max pooling"),
    SmallModel("BertModel", SENTENCES, note="mean_sqrt_len_tokens pooling"),
    SmallModel("BertModel", SENTENCES, note="weightedmean pooling"),
    SmallModel("BertModel", SENTENCES, note="lasttoken pooling"),
    SmallModel("BertModel", SENTENCES, note="cls mean pooling"),
    SmallModel("BertModel", SENTENCES, note="not normalized"),
    SmallModel("BertModel", SENTENCES, note="Dense"),
    SmallModel("BertModel", SENTENCES, note="LayerNorm, Dense"),
    SmallModel("BertModel", SENTENCES, note="static"),
    SmallModel("DistilBertModel", SENTENCES),
    SmallModel("RobertaModel", SENTENCES, tokenizer="byte-level"),
    SmallModel("XLMRobertaModel", SENTENCES, tokenizer="byte-level", note="cls pooling"),
    SmallModel("MPNetModel", SENTENCES, BOTH, "byte-level", note="prompts"),
    SmallModel("ModernBertModel", SENTENCES, note="cls pooling"),
    SmallModel("EuroBertModel", SENTENCES),
    SmallModel("NomicBertModel", SENTENCES, note="prompts"),
    SmallModel("GteModel", SENTENCES, tokenizer="byte-level", note="cls pooling"),
    SmallModel("JinaEmbeddingsV3Model", SENTENCES),
    SmallModel("T5EncoderModel", SENTENCES, fields=ENCODER_OF_T5),
    SmallModel("Gemma3TextModel", SENTENCES, BOTH, "decoder", BIDIRECTIONAL, "prompts, Dense"),
    SmallModel("Qwen3Model", SENTENCES, BOTH, LEFT, note="lasttoken pooling, prompts"),
    SmallModel("Qwen2Model", SENTENCES, DEFAULT, LEFT, note="lasttoken pooling"),
    SmallModel("LlamaModel", SENTENCES, DEFAULT, LEFT, note="lasttoken pooling"),
    SmallModel("MistralModel", SENTENCES, DEFAULT, "decoder", note="lasttoken pooling"),
    # Sparse embeddings.
    SmallModel("BertForMaskedLM", "sparse-embedding", BOTH),
    SmallModel("DistilBertForMaskedLM", "sparse-embedding"),
    SmallModel("XLMRobertaForMaskedLM", "sparse-embedding", tokenizer="byte-level"),
    # Features, words, spans.
    SmallModel("DistilBertModel", "feature-extraction", BOTH),
    SmallModel("ModernBertModel", "feature-extraction"),
    SmallModel("Qwen3Model", "feature-extraction", tokenizer="decoder"),
    *listed("TOKEN_CLASSIFICATION", "token-classification",
            ("bert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert", "qwen3", "xlm-roberta"),
            fields=ENTITIES),
    SmallModel("RobertaForTokenClassification", "token-classification", BOTH, "byte-level", ENTITIES),
    *listed("MASKED_LM", "fill-mask",
            ("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert",
             "nomic_bert", "roberta", "xlm-roberta")),
    *listed("QUESTION_ANSWERING", "question-answering", ("bert", "deberta-v2", "distilbert", "electra", "roberta")),
    # Images.
    *listed("IMAGE_CLASSIFICATION", "image-classification",
            ("beit", "bit", "convnext", "convnextv2", "deit", "dinov2", "dinov2_with_registers", "focalnet", "ijepa",
             "mobilenet_v2", "regnet", "resnet", "segformer", "swin", "swinv2", "vit", "vit_msn"), fields=LABELS),
    SmallModel("ViTModel", "image-feature-extraction", BOTH),
    SmallModel("BeitModel", "image-feature-extraction"),
    SmallModel("DeiTModel", "image-feature-extraction"),
    SmallModel("Dinov2Model", "image-feature-extraction", fields={"mlp_ratio": 2}),
    SmallModel("Dinov2WithRegistersModel", "image-feature-extraction", fields={"mlp_ratio": 2}),
    SmallModel("DINOv3ViTModel", "image-feature-extraction"),
    SmallModel("ConvNextModel", "image-feature-extraction"),
    SmallModel("ResNetModel", "image-feature-extraction"),
    SmallModel("SwinModel", "image-feature-extraction"),
    SmallModel("CLIPVisionModelWithProjection", "image-feature-extraction", BOTH, fields=TOWER),
    SmallModel("SiglipVisionModel", "image-feature-extraction"),
    # Generation.
    *listed("CAUSAL_LM", "text-generation",
            ("falcon", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "granite", "llama", "llama4_text", "ministral3",
             "olmo2", "phi3", "qwen3", "qwen3_5_text", "smollm3"),
            formats=PYTHON),
)  # fmt: skip


def find_models(architecture: str, task: str, formats: tuple[str, ...] = ()) -> list[SmallModel]:
    """Return the rows of this architecture for a task, in these formats or in their own."""
    models = [model for model in SMALL_MODELS if (model.architecture, model.task) == (architecture, task)]
    return [replace(model, formats=formats or model.formats) for model in models]
