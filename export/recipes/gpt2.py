"""Export GPT-2 as one ONNX graph that serves two uses: one token per request, and whole continuations.

    input_ids [N, T], attention_mask [N, P + T], past [N, P * numbers]
    -> logits of the last position [N, vocabulary], present [N, T * numbers]

The model keeps `numbers` values for each position: the keys and values of all its layers. The graph returns and takes
them position by position, so the caller can keep them without knowing layers and heads. P may be 0.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import transformers

from export.catalogue import Job, Outcome
from export.check.parity import largest_difference
from export.check.served import Tensors
from export.checkpoint.silence import quiet
from export.recipes.onnx_export import export
from triton_transformers.settings import UserError

MODELS = ("gpt2_ensemble", "gpt2_encoder", "gpt2", "gpt2_decoder", "gpt2_generate")
INPUTS = ("input_ids", "attention_mask", "past")
OUTPUTS = ("logits", "present")
# The accepted difference between the exported logits and the original's, relative to the largest: sums in fp32 depend
# on their order.
TOLERANCE = 1e-4


class Graph(torch.nn.Module):
    def __init__(self, model: transformers.GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.cache_shape = (config.n_layer, 2, config.n_head, config.n_embd // config.n_head)

    @property
    def numbers(self) -> int:
        return int(np.prod(self.cache_shape))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: torch.Tensor) -> tuple:
        texts, new = input_ids.shape
        before = attention_mask.shape[1] - new
        cache = transformers.DynamicCache()
        # [text, position, layer, key or value, head, size] -> [layer, key or value, text, head, position, size]
        layers = past.reshape(texts, before, *self.cache_shape).permute(2, 3, 0, 4, 1, 5)
        for layer, (keys, values) in enumerate(layers):
            cache.update(keys, values, layer)
        hidden = self.model.transformer(
            input_ids,
            attention_mask=attention_mask,
            # Padding must not shift positions, so count only the tokens that the mask keeps.
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, before:],
            past_key_values=cache,
        ).last_hidden_state
        filled: list[Any] = cache.layers
        present = torch.stack([torch.stack([layer.keys, layer.values])[:, :, :, before:] for layer in filled])
        # Only the last position: logits are as many as the vocabulary has tokens.
        return self.model.lm_head(hidden[:, -1]), present.permute(2, 4, 0, 1, 3, 5).reshape(texts, -1)


def assemble(job: Job) -> Outcome:
    os.environ["HF_HUB_OFFLINE"] = "1"
    versions = {name: job.folder / name / "1" for name in MODELS}
    for version in versions.values():
        version.mkdir(parents=True)
    with quiet():
        model = load(job.weights)
        save_tokenizer(job.weights, model.config, versions["gpt2_encoder"] / "tokenizer.json")
        export_graph(Graph(model), versions["gpt2"] / "model.onnx")
        logits_difference = check_parity(model, versions["gpt2"] / "model.onnx")
    for name in ("gpt2_decoder", "gpt2_generate"):
        shutil.copy(versions["gpt2_encoder"] / "tokenizer.json", versions[name])
    save_limits(model, versions["gpt2_generate"] / "generation_config.json")
    return Outcome(
        f"logits within {logits_difference:.0e} of the original's, with a past and without",
        {"positions": model.config.n_positions, "largest_difference": logits_difference},
    )


def load(weights: Path) -> transformers.GPT2LMHeadModel:
    kind = json.loads((weights / "config.json").read_text())["model_type"]
    if kind != "gpt2":
        raise UserError(
            f"{weights} is a model of type {kind}, and this system takes only gpt2: choose another name, and set "
            "TASK=text-generation"
        )
    return transformers.GPT2LMHeadModel.from_pretrained(
        weights,
        local_files_only=True,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation="eager",  # the others ignore GPT-2's options for scaling attention
    ).eval()


def save_tokenizer(weights: Path, config: transformers.GPT2Config, target: Path) -> None:
    """Save the model's tokenizer with its maximum length, and padding on the left: the graph reads the last column."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights, local_files_only=True).backend_tokenizer
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise UserError(
            f"{weights}: its tokenizer has {tokenizer.get_vocab_size()} tokens, but the model only {config.vocab_size}"
        )
    tokenizer.enable_truncation(config.n_positions)
    tokenizer.enable_padding(direction="left")
    tokenizer.save(str(target))


def save_limits(model: transformers.GPT2LMHeadModel, target: Path) -> None:
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    target.write_text(json.dumps({"eos_token_id": ends, "max_length": model.config.n_positions}) + "\n")


def export_graph(graph: Graph, target: Path) -> None:
    inputs = {name: {0: "texts", 1: f"{name}_size"} for name in INPUTS}
    outputs = {"logits": {0: "texts"}, "present": {0: "texts", 1: "present_size"}}
    examples = [example(graph, *sizes) for sizes in ((2, 3, 4), (3, 5, 0), (1, 1, 6))]
    # Without folded constants: it would store the vocabulary a second time, transposed.
    export(graph, inputs, outputs, examples, target, fold_constants=False)


def example(graph: Graph, texts: int, new: int, before: int) -> Tensors:
    """Return inputs for texts with some new positions after others, whose first one is padding in the last text."""
    random = np.random.default_rng(0)
    mask = np.ones((texts, before + new), np.int64)
    mask[-1, : before + new > 1] = 0
    past = random.standard_normal((texts, before * graph.numbers), np.float32)
    ids = random.integers(graph.model.config.vocab_size, size=(texts, new))
    return dict(zip(INPUTS, (ids, mask, past), strict=True))


def check_parity(model: transformers.GPT2LMHeadModel, path: Path) -> float:
    """Return how far the logits are from the original's, or raise if that is too far.

    The graph gets texts of unequal length as one batch, in one run and in two; the original gets each text alone.
    """
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    length = min(24, model.config.n_positions)
    ids = np.random.default_rng(1).integers(model.config.vocab_size, size=(3, length))
    starts = [0, length // 2, length - 1]
    mask = (np.arange(length) >= np.array(starts)[:, None]).astype(np.int64)

    def run(first: int, end: int, past: np.ndarray) -> list[np.ndarray]:
        return session.run(OUTPUTS, dict(zip(INPUTS, (ids[:, first:end], mask[:, :end], past), strict=True)))

    no_past, part = np.zeros((len(ids), 0), np.float32), length // 3
    whole, _ = run(0, length, no_past)
    continued, _ = run(part, length, past=run(0, part, no_past)[1])
    with torch.inference_mode():
        texts = [torch.from_numpy(row[start:])[None] for row, start in zip(ids, starts, strict=True)]
        original = np.stack([model(text).logits[0, -1].numpy() for text in texts])
    worst = largest_difference([{"logits": original}] * 2, [{"logits": whole}, {"logits": continued}])
    worst.check(TOLERANCE, "alone and after a past")
    return worst.size
