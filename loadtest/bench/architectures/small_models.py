"""Save small models with random weights, made from real architectures: the rows of docs/architectures.csv.

Most rows come from transformers' own lists of architectures, and the libraries that are installed save them. The others
are as an earlier release of transformers wrote them.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.auto import modeling_auto

from triton_transformers.corpus import MIXED

RECORDED = Path(__file__).parent / "recorded"
POSITIONS = 64
SIDE = 32  # of an image
WIDTH = 32
SPREAD = 0.3  # wide enough that an answer depends on the whole input
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
    save_network(folder, row.architecture, tokenizer_of(row), **row.fields)


def save_network(
    folder: Path, architecture: str, tokenizer: Any, positions: int = POSITIONS + 2, **options: Any
) -> Path:
    """Save a network of this class of transformers and its tokenizer. `options` are fields of the config.

    Some architectures count positions from the padding token's id, so by default there are more than a text has tokens.
    """
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in TOKENS}
    ids = {name: number for name, number in ids.items() if number is not None or name == "pad_token_id"}
    network = getattr(transformers, architecture)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": positions, "n_positions": positions}
    config = small_config(network.config_class, sizes | ids, **options)
    network(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    image_processor().save_pretrained(folder)


def image_processor() -> transformers.ViTImageProcessor:
    return transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})


SAVE: dict[str, Callable[[SmallModel, Path], None]] = {
    "sentence-similarity": save_sentence_transformer,
    "text-ranking": save_cross_encoder,
    "sparse-embedding": save_sparse_encoder,
    "image-classification": save_image,
    "image-feature-extraction": save_image,
}


# --- configurations, shrunk by the names of their fields --------------------------------------------------------------

# The names of a field -> its value. A window is shorter than the texts, so that it cuts them.
SIZES: tuple[tuple[str, float], ...] = (
    (r"(num_)?(hidden_|encoder_|decoder_|n_)?layers?|n_layers?|num_(hidden|encoder|decoder)_layers", 2),
    (r".*(key_value|kv)_heads|multi_query_group_num", 2),
    (r"n_heads?|num_heads|(num_|encoder_|decoder_)?attention_heads|num_attention_heads", 4),
    (r".*head_dim|d_kv|rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"hidden_size|d_model|n_embd|dim|emb(ed(ding)?)?_(dim|size)|word_embed_proj_dim|.*_embed_dim", WIDTH),
    (r"projection_dim", 16),
    (r"(\w+_)?intermediate_size|d_ff|(\w+_)?ffn_dim|n_inner|hidden_dim|d_inner|ffn_hidden_size", 64),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|(tpu_short_)?seq_length", POSITIONS + 2),
    (r"(num|n|moe_num|num_local|n_routed)_?(local_|routed_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_(top_?)?k", 2),
    (r"(n|num)_(group|expert_group)|topk_group|first_k_dense_replace", 1),
    (r"sliding_window|local_attention|attention_chunk_size|window_size", 16),
    (r"hidden_size_per_layer_input|hash_\w+", 8),
    (r"initializer_range|init_std", SPREAD),
    (r"image_size", SIDE),
    (r"patch_size", 8),
)  # fmt: skip
STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}  # latent attention shares one key among all heads
# The type of a model -> the values of fields that depend on one another.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "minicpm3", "mistral4"), LATENT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), HYBRID),
    "bit": STAGES | {"embedding_size": 16, "layer_type": "preactivation", "num_groups": 4},
    "convnext": STAGES | {"num_stages": 2},
    "convnextv2": STAGES | {"num_stages": 2},
    "dinov3_convnext": STAGES,
    "esmc": {"num_key_value_heads": None},
    "focalnet": {"depths": [1, 1], "embed_dim": 16, "hidden_sizes": [16, 32]},
    "funnel": {"block_sizes": [1, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "regnet": STAGES | {"embedding_size": 16, "groups_width": 8},
    "resnet": STAGES | {"embedding_size": 16},
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "embed_dim": 16},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "embed_dim": 16},
}


def small_config(config_class: Any, known: dict[str, int | None], **options: Any) -> Any:
    """Return a configuration of the class with small sizes: the known ones, if it has such fields, and the options."""
    return config_class(**small_fields(config_class, known) | options)


def small_fields(config_class: Any, known: dict[str, int | None]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for part in fields(config_class):
        default = None if part.default is MISSING else part.default
        if part.name in known:
            sizes[part.name] = known[part.name]
        elif not isinstance(default, bool | tuple | list | dict | str):
            size = next((size for names, size in SIZES if re.fullmatch(names, part.name)), None)
            sizes |= {part.name: size} if size is not None else {}
    for name, part in config_class.sub_configs_defaults.items():
        if hasattr(part.config_class, "attribute_map"):
            sizes[name] = small_fields(part.config_class, known) | {"model_type": part.model_type}
    return sizes | NEEDS.get(config_class.model_type, {})


# --- tokenizers, trained on the committed texts -----------------------------------------------------------------------


def wordpiece(kind: Any = transformers.BertTokenizer) -> Any:
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(MIXED.texts, vocab_size=600, show_progress=False)
    # Training numbers the letters otherwise each time.
    tokens = sorted(trained.get_vocab(), key=trained.token_to_id)
    numbers = {token: number for number, token in enumerate([*tokens[:5], *sorted(tokens[5:])])}
    return from_files(BertWordPieceTokenizer(numbers), kind)


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


# --- rows that an earlier release of transformers saved ---------------------------------------------------------------

# recorded/transformers-<release>.json has the files beside the weights, and the names and shapes of the weights. The
# values are random again.


@dataclass(frozen=True, eq=False)
class RecordedModel(SmallModel):
    files: dict[str, Any] = field(default_factory=dict)  # the content of each file of JSON
    weights: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # the shapes, by file and name

    def save(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        generator = torch.Generator().manual_seed(5)
        for name, shapes in self.weights.items():
            tensors = {key: random_weight(key, shape, generator) for key, shape in shapes.items()}
            save_file(tensors, folder / name, {"format": "pt"})
        return folder


def random_weight(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return values as in a trained model: those of a norm vary about 1, all others about 0."""
    values = torch.randn(shape, generator=generator) * SPREAD
    return 1 + values / 3 if len(shape) == 1 and name.endswith("weight") else values


def recorded_models(release: str) -> list[RecordedModel]:
    content = json.loads((RECORDED / f"transformers-{release}.json").read_text(encoding="utf-8"))
    rows = []
    for row in content["rows"]:
        files = row.pop("files")
        if "tokenizer.json" in files:  # several rows have the same
            files["tokenizer.json"] = content["tokenizers"][files["tokenizer.json"]]
        rows.append(RecordedModel(**row, files=files, saved_by=release))
    return rows
