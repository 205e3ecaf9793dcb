"""Save the checkpoints of rows that no other test serves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.bench.architectures.small_models import wordpiece
from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.encoders import WIDTH


def save_chain(folder: Path, *others: torch.nn.Module, library: str = "SentenceTransformer", **config: Any) -> Path:
    """Save BERT with these modules after it, as the class of sentence-transformers does."""
    import sentence_transformers
    from sentence_transformers.base.modules import Transformer

    plain = encoders.save_bert(folder / "plain", "Model", **config)
    getattr(sentence_transformers, library)(modules=[Transformer(str(plain)), *others], device="cpu").save(str(folder))
    return folder


def save_table(folder: Path) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = wordpiece().backend_tokenizer
    tokenizer.no_truncation()
    torch.manual_seed(3)
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=24)], device="cpu").save(str(folder))
    return folder


def save_sparse_table(folder: Path) -> Path:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    tokenizer = wordpiece()
    torch.manual_seed(3)
    table = SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)))
    SparseEncoder(modules=[table], device="cpu", max_active_dims=5).save(str(folder))
    return folder


def save_autoencoder(folder: Path) -> Path:
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    autoencoder = SparseAutoEncoder(WIDTH, 96, k=8, k_aux=16)
    return save_chain(folder, Pooling(WIDTH, "mean"), autoencoder, library="SparseEncoder")


def save_convolution(folder: Path) -> Path:
    from sentence_transformers.sentence_transformer.modules import CNN, Pooling

    return save_chain(folder, CNN(WIDTH, 16), Pooling(48, "mean"))


def save_mean_of_layers(folder: Path) -> Path:
    from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling

    layers = WeightedLayerPooling(WIDTH, num_hidden_layers=2, layer_start=1)
    return save_chain(folder, layers, Pooling(WIDTH, "cls"), output_hidden_states=True)


def save_pooling_of_another_width(folder: Path) -> Path:
    weights = encoders.save_sentence_transformer(folder, pooling="mean")
    encoders.edit(weights / "1_Pooling/config.json", embedding_dimension=WIDTH + 8)
    return weights


def save_t5gemma(folder: Path) -> Path:
    """Save a classifier whose configuration has the widths of its halves only."""
    tokenizer = wordpiece()
    half = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer)}  # fmt: skip
    config = transformers.T5GemmaConfig(
        encoder=half, decoder=half, vocab_size=len(tokenizer), is_encoder_decoder=False, num_labels=3, pad_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5GemmaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_language_reranker(folder: Path, false_token: int | None = None, template: str = "") -> Path:
    """Save a language model that ranks by one token or two, its texts as a pair or in a chat."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    plain = language.save_mistral(folder / "plain")
    tokenizer = {"chat_template": template} if template else {}
    transformer = Transformer(
        str(plain), transformer_task="text-generation", processor_kwargs={"pad_token": "</s>", **tokenizer}
    )
    chain = [transformer, LogitScore(true_token_id=5, false_token_id=false_token)]
    prompts = {"prompts": {"web": "search the web"}, "default_prompt_name": "web"}
    CrossEncoder(modules=chain, device="cpu", **prompts).save_pretrained(str(folder))
    shutil.rmtree(plain)
    return folder


def save_clip_of_the_library(folder: Path) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    vision.save_clip(folder / "plain")
    SentenceTransformer(modules=[Transformer(str(folder / "plain")), Normalize()], device="cpu").save(str(folder))
    return folder


def save_text_half_of_clip(folder: Path) -> Path:
    options = {"positions": encoders.POSITIONS, "projection_dim": 24, "initializer_range": 0.1}
    return encoders.save(folder, "CLIPTextModelWithProjection", encoders.clip_bpe(), **options)
