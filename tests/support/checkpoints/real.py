"""Shrink real checkpoints: the keys of the real files, the sizes of a small model, and random weights.

The files lie in public copies of checkpoints, and come from releases 2 to 5 of transformers and from people's hands.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from export.checkpoint.tasks import processors_of
from loadtest.bench.architectures.small_models import (
    SIZES,
    TOKENIZERS,
    WIDTH,
    image_processor,
    small_fields,
    tokenizer_for,
)
from loadtest.bench.speech_rates import save_whisper
from tests.support.checkpoints.pipelines import SMALL_PIPELINES, merged
from tests.support.checkpoints.vision_language import FAMILIES, save_vision_language

CORPUS = Path(__file__).parents[2] / "export/checkpoint/recorded/real_configs.jsonl"
POSITIONS = 300  # more than the 256 tokens that pipelines generate
LABELS = ("id2label", "label2id")
LARGEST = 10_000_000  # weights
# Lists with an entry for each layer, of which a small model has two.
PER_LAYER = re.compile(r"layer_types|attention_layers|attn_type_list|no_rope_layers|attention_window")
# Keys of tokens, which a small vocabulary may lack, and keys of a tokenizer's file that belong to its vocabulary.
TOKENS = re.compile(r"\w*token_ids?|\w*tokens|\w*_ids")
OF_VOCABULARY = re.compile(
    r"added_tokens_decoder|tokenizer_class|processor_class|model_max_length|auto_map|\w*_tokens?"
)
# Layers, pixels and tokens that the small model lacks, beside those that it has.
LEFT_OUT = re.compile(r"out_features|out_indices|stage_names|size|crop_size|pad_size|do_center_crop|\w*_to_id")
# Numbers that change what is computed, and not the sizes of weights.
KEPT = re.compile(r"window_size|shared_expert_intermediate_size")
# The type of a model -> sizes whose names do not show that they depend on others.
FITTING: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2}},
    "deberta-v2": {"pooler_hidden_size": WIDTH, "attention_head_size": 8},
    "gemma2": {"sliding_window_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "led": {
        "max_encoder_position_embeddings": POSITIONS,
        "max_decoder_position_embeddings": POSITIONS,
        "attention_window": [16, 16],
    },
    "mpt": {"max_seq_len": POSITIONS},
    "phi3": {"rope_scaling": {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}, "pad_token_id": 0},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32], "attention_head_size": 8},
    "vision-encoder-decoder": {"decoder": {"cross_attention_hidden_size": None}},
    "xlnet": {"d_head": 8},
}
SPREADS = {"mobilebert": 0.05}  # without norms, larger weights explode
EARS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
# The architecture -> what saves a small model whose processors belong to its sizes.
BUILDERS: dict[str, Callable[[Path], Any]] = {
    network: partial(save_vision_language, family=family) for family, (network, _) in FAMILIES.items()
} | {"WhisperForConditionalGeneration": partial(save_whisper, vocabulary=3700, spread=0.3, **EARS)}


@dataclass(frozen=True)
class RealCheckpoint:
    name: str
    files: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return self.files["config.json"]

    @property
    def architecture(self) -> str:
        return next(iter(self.config.get("architectures") or ()), "")

    def write(self, folder: Path) -> Path:
        """Write the real files, without weights."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    def save(self, folder: Path, task: str) -> Path:
        """Save a small model of this architecture, and add the keys of the real files to its files."""
        if builder := BUILDERS.get(self.architecture):
            builder(folder)
        else:
            self.save_network(folder, task)
        for name in self.files.keys() - {"modules.json", "tokenizer_config.json", "special_tokens_map.json"}:
            path = folder / name
            if name in ("config.json", "generation_config.json", "preprocessor_config.json"):
                own = json.loads(path.read_text()) if path.is_file() else {}
                # Old files of Qwen-VL have at the outer level what the small model has in text_config.
                inner = {*own.get("text_config", ()), *(("rope_scaling", "rope_theta") if "text_config" in own else ())}
                real = {key: value for key, value in self.files[name].items() if key in own or key not in inner}
                path.write_text(json.dumps(shrunk(real, own)))
        path = folder / "tokenizer_config.json"
        if path.is_file():
            real = self.files.get(path.name, {})
            kept = {key: value for key, value in real.items() if not OF_VOCABULARY.fullmatch(key)}
            path.write_text(json.dumps(kept | json.loads(path.read_text())))
        return folder

    def save_network(self, folder: Path, task: str) -> None:
        small = next((small for small in SMALL_PIPELINES if small.architecture == self.architecture), None)
        processors = [make() for make in small.processors] if small else self.processors(task)
        tokenizer = next((made for made in processors if hasattr(made, "vocab_size")), None)
        tokenizer = tokenizer or next((made.tokenizer for made in processors if hasattr(made, "tokenizer")), None)
        network, kind = getattr(transformers, self.architecture), self.config["model_type"]
        known = {"vocab_size": len(tokenizer) if tokenizer else 40} | dict.fromkeys(
            ("max_position_embeddings", "n_positions"), POSITIONS
        )
        sizes = merged(small_fields(network.config_class, known), small.fields if small else {})
        sizes = merged(sizes, FITTING.get(kind, {}))
        sizes |= {
            key: getattr(tokenizer, key, None)
            for key in self.config
            if key.endswith("_token_id") and getattr(tokenizer, key, None) is not None
        }
        sizes = {key: value for key, value in sizes.items() if key not in LABELS or key not in self.config}
        config = network.config_class.from_dict(shrunk(self.config, sizes))
        with torch.device("meta"):
            assert network(config).num_parameters() < LARGEST, f"{self.name} has sizes that are not shrunk"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = network(config)
            for weight in model.parameters():
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=small.spread if small else SPREADS.get(kind, 0.3))
            model.save_pretrained(folder)
        for made in processors:
            made.save_pretrained(folder)
        # save_pretrained() wrote the whole configuration: keep what the real file says, with the sizes.
        (folder / "config.json").write_text(json.dumps(shrunk(self.config, sizes)))

    def processors(self, task: str) -> list[Any]:
        makers = {"tokenizer": TOKENIZERS[tokenizer_for(self.config["model_type"])], "image processor": image_processor}
        return [makers[name]() for name in processors_of(task)]


def shrunk(real: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the real settings with these sizes, or with those that the names of settings ask for."""
    vocabulary = sizes.get("vocab_size", 40)
    settings = dict(sizes)
    for key, value in real.items():
        if LEFT_OUT.fullmatch(key):
            continue
        if key in LABELS:
            settings[key] = renumbered(value)
        elif isinstance(value, dict):
            own = sizes.get(key.removesuffix("_dict"))
            settings[key] = shrunk(value, own if isinstance(own, dict) else {})
        elif key in sizes:
            continue
        elif TOKENS.fullmatch(key):
            settings[key] = within(value, vocabulary)
        elif PER_LAYER.fullmatch(key) and isinstance(value, list):
            settings[key] = value[:2]
        elif isinstance(value, int) and not isinstance(value, bool) and not KEPT.fullmatch(key):
            settings[key] = next((size for names, size in SIZES if re.fullmatch(names, key)), value)
        else:
            settings[key] = value
    return settings


def renumbered(labels: dict[str, Any]) -> dict[str, Any]:
    """Return labels with numbers from 0: long maps are cut."""
    if all(number.isdigit() for number in labels):
        return {str(number): label for number, label in enumerate(labels.values())}
    return {label: number for number, label in enumerate(labels)}


def within(value: Any, vocabulary: int) -> Any:
    """Return tokens of a small vocabulary in place of others."""
    if isinstance(value, list):
        return [within(token, vocabulary) for token in value]
    return value % vocabulary if isinstance(value, int) and value >= vocabulary else value


@functools.cache
def real_checkpoints() -> list[RealCheckpoint]:
    rows = map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())
    return [RealCheckpoint(row["name"], row["files"]) for row in rows]
