"""Save text encoders: BERT, DistilBERT and RoBERTa with any head, and tokenizers trained on the committed texts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import CharBPETokenizer
from tokenizers.processors import TemplateProcessing

from loadtest.bench.architectures.small_models import POSITIONS, WIDTH, byte_level, save_network, wordpiece
from triton_transformers.corpus import MIXED

ENTITIES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
PROMPTS = {"query": "Instruct: find the passage\nQuery: ", "passage": "passage: "}
MOODS = ["calm", "cross", "glad"]


def qwen3_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a decoder's tokenizer, which cuts the beginning of a text, and makes no token of an empty one."""
    trained = byte_level().backend_tokenizer
    trained.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    sides = {"padding_side": "left", "truncation_side": "left"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, model_max_length=POSITIONS, **special, **sides
    )


def gpt2_tokenizer() -> transformers.RobertaTokenizer:
    tokenizer = byte_level()
    tokenizer.pad_token = None
    return tokenizer


PLAIN, AFTER_PADDING = {"positions": POSITIONS}, {"type_vocab_size": 1}
# The first word of an architecture -> its tokenizer, and options of `save_network`.
FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Bert": (wordpiece, PLAIN),
    "DPR": (wordpiece, PLAIN),
    "DistilBert": (lambda: wordpiece(transformers.DistilBertTokenizerFast), PLAIN),
    "Roberta": (byte_level, AFTER_PADDING),
    "XLMRoberta": (byte_level, AFTER_PADDING),
    "Qwen3": (qwen3_tokenizer, PLAIN),
    "GPT2": (gpt2_tokenizer, PLAIN | {"n_inner": None}),
    "T5Encoder": (byte_level, {"is_encoder_decoder": False}),
}


def save_encoder(folder: Path, head: str, family: str = "Bert", padding_side: str = "", **config: Any) -> Path:
    make_tokenizer, options = FAMILIES[family]
    tokenizer = make_tokenizer()
    if padding_side:
        tokenizer.padding_side = padding_side
    return save(folder, f"{family}{head}", tokenizer, **options | config)


save_bert = partial(save_encoder, family="Bert")
save_dpr = partial(save_encoder, family="DPR")
save_distilbert = partial(save_encoder, family="DistilBert")
save_roberta = partial(save_encoder, family="Roberta")
save_qwen3 = partial(save_encoder, family="Qwen3")
save_gpt2 = partial(save_encoder, family="GPT2")
save_t5_encoder = partial(save_encoder, family="T5Encoder")


def save_sentence_transformer(
    folder: Path,
    pooling: str | tuple[str, ...] = "mean",
    save_plain: Callable[[Path, str], Path] = save_bert,
    include_prompt: bool = True,
    layers: Sequence[str] = ("Normalize",),
    transformer: dict[str, object] | None = None,
    **options: Any,
) -> Path:
    """Save a folder of sentence-transformers. `options` are those of SentenceTransformer: prompts, truncate_dim, ..."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer import modules

    save_plain(folder / "plain", "Model")
    torch.manual_seed(1)
    width = WIDTH
    pooled = modules.Pooling(width, pooling_mode=pooling, include_prompt=include_prompt)
    kinds = {
        "Normalize": modules.Normalize,
        "Dense": lambda: Dense(pooled.get_embedding_dimension(), 16),
        "LayerNorm": lambda: modules.LayerNorm(width),
    }
    transformer = modules.Transformer(str(folder / "plain"), **transformer or {"max_seq_length": 48})
    chain = [transformer, pooled, *(kinds[name]() for name in layers)]
    SentenceTransformer(modules=chain, device="cpu", **options).save(str(folder))
    shutil.rmtree(folder / "plain")
    return folder


def save_sparse_encoder(folder: Path, prompts: dict[str, str] | None = None, **pooling: str) -> Path:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    save_bert(folder / "plain", "ForMaskedLM")
    transformer = Transformer(str(folder / "plain"), transformer_task="fill-mask")
    chain = [transformer, SpladePooling(**pooling)]
    SparseEncoder(modules=chain, device="cpu", prompts=prompts).save(str(folder))
    return folder


def save_router(folder: Path, is_sparse: bool = False, **options: Any) -> Path:
    """Save a model whose queries take another route than its documents: a table of weights, or another encoder."""
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Dense, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    save_bert(folder / "plain", "ForMaskedLM" if is_sparse else "Model")
    torch.manual_seed(2)
    width = WIDTH
    if is_sparse:
        documents = [Transformer(str(folder / "plain"), transformer_task="fill-mask"), SpladePooling()]
        tokenizer = documents[0].tokenizer
        queries = [SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)))]
        model = SparseEncoder(modules=[Router.for_query_document(queries, documents)], device="cpu", **options)
    else:
        save_roberta(folder / "other", "Model")
        documents = [Transformer(str(folder / "plain")), Pooling(width, "mean")]
        queries = [Transformer(str(folder / "other")), Pooling(width, "cls"), Dense(width, width)]
        router = Router.for_query_document(queries, documents)
        model = SentenceTransformer(modules=[router, Normalize()], device="cpu", **options)
    model.save(str(folder))
    for name in ("plain", "other"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def save_multi_vector(folder: Path, expansion: dict[str, Any] | None = None, **lengths: int) -> Path:
    """Save a MultiVectorEncoder as sentence-transformers does."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    save_bert(folder / "plain", "Model")
    torch.manual_seed(1)
    name = "token_embeddings"
    chain = [
        Transformer(str(folder / "plain"), query_expansion=expansion, **lengths),
        Dense(WIDTH, 16, bias=False, activation_function=torch.nn.Identity(), module_input_name=name),
        MultiVectorMask([".", ",", "?"]),
        Normalize(module_input_name=name),
    ]
    prompts = {"query": "query: ", "document": "passage: "}
    MultiVectorEncoder(modules=chain, device="cpu", prompts=prompts).save(str(folder))
    shutil.rmtree(folder / "plain")
    return folder


def save_colbert(folder: Path) -> Path:
    """Save what Stanford's ColBERT saves: the projection beside the encoder's weights, and artifact.metadata."""
    tokenizer = wordpiece()
    tokenizer.add_tokens(["[unused0]", "[unused1]"])
    save(folder, "BertModel", tokenizer, **PLAIN)
    encoder = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    projection = {"linear.weight": torch.randn(16, WIDTH)}
    weights = {f"bert.{name}": tensor for name, tensor in encoder.items()} | projection
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    metadata = {"query_maxlen": 24, "doc_maxlen": 40, "query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"attend_to_mask_tokens": False}))
    return folder


def save_pylate(folder: Path, attends: bool = True) -> Path:
    """Save what PyLate saves: [Q] and [D] as tokens, and a projection of its own class."""
    from sentence_transformers.base.modules import Dense, Transformer

    save_bert(folder / "plain", "Model")
    torch.manual_seed(1)
    transformer = Transformer(str(folder / "plain"))
    transformer.tokenizer.add_tokens(["[Q] ", "[D] "])
    transformer.model.resize_token_embeddings(len(transformer.tokenizer))
    transformer.save(str(folder))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 39, "do_lower_case": False}))
    (folder / "1_Dense").mkdir()
    Dense(WIDTH, 16, bias=False, activation_function=torch.nn.Identity()).save(str(folder / "1_Dense"))
    path = folder / "1_Dense/config.json"
    kept = ("in_features", "out_features", "bias", "activation_function")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in kept}))
    modules = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    listed = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(modules.items())]
    (folder / "modules.json").write_text(json.dumps(listed))
    settings = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 24,
        "document_length": 40,
        "attend_to_expansion_tokens": attends,
        "skiplist_words": [".", ","],
        "do_query_expansion": True,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    shutil.rmtree(folder / "plain")
    return folder


def save_bge_m3(folder: Path) -> Path:
    """Save what FlagEmbedding saves: the encoder, and two heads as pickles."""
    save_encoder(folder, "Model", "XLMRoberta")
    torch.manual_seed(1)
    width = WIDTH
    for name, size in (("sparse_linear", 1), ("colbert_linear", width)):
        torch.save(torch.nn.Linear(width, size).state_dict(), folder / f"{name}.pt")
    return folder


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def save_cross_encoder(folder: Path, saver=save_bert, labels: int = 1, **settings) -> Path:
    from sentence_transformers import CrossEncoder

    saver(folder / "plain", "ForSequenceClassification", num_labels=labels)
    CrossEncoder(str(folder / "plain"), device="cpu", **settings).save_pretrained(str(folder))
    shutil.rmtree(folder / "plain")
    return folder


def save(folder: Path, architecture: str, tokenizer: Any, **options: Any) -> Path:
    torch.manual_seed(0)
    return save_network(folder, architecture, tokenizer, **options)


def labels(names: Sequence[str]) -> dict:
    """Return the fields of a config that name the labels."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def clip_bpe() -> transformers.CLIPTokenizerFast:
    """Train a tokenizer whose special tokens have the largest ids, as CLIP's do."""
    with tempfile.TemporaryDirectory() as folder:
        trained = CharBPETokenizer(suffix="</w>", lowercase=True)
        trained.train_from_iterator(MIXED.texts, vocab_size=600, special_tokens=[], show_progress=False)
        vocabulary, merges = (Path(path) for path in trained.save_model(folder))
        # Training numbers the letters otherwise each time.
        ids = {token: n for n, token in enumerate(sorted(json.loads(vocabulary.read_text())))}
        ids |= {token: len(ids) + n for n, token in enumerate(("<|startoftext|>", "<|endoftext|>"))}
        vocabulary.write_text(json.dumps(ids))
        return transformers.CLIPTokenizerFast(str(vocabulary), str(merges), model_max_length=POSITIONS)


def siglip_unigram() -> transformers.SiglipTokenizer:
    """Train SigLIP's own tokenizer, which transformers has only in Python."""
    import sentencepiece

    with tempfile.NamedTemporaryFile() as model:
        texts = [text.lower() for text in MIXED.texts]
        ids = {"eos_id": 1, "unk_id": 2, "pad_id": 0, "bos_id": -1}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=800, minloglevel=2, **ids
        )
        model.flush()
        return transformers.SiglipTokenizer(model.name, model_max_length=POSITIONS)
