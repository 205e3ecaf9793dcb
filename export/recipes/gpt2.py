"""Export GPT-2 twice: as an ONNX graph for one token per request, and for an engine that generates whole texts.

    input_ids [N, T], attention_mask [N, T] -> logits of the last position [N, vocabulary]

FORMAT is the format of the second, `gpt2_generate`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
import transformers

from export.catalogue import Job, Outcome
from export.check.parity import largest_difference
from export.check.served import Tensors
from export.checkpoint.silence import quiet
from export.recipes.language.recipe import load_tokenizer, write_model
from export.recipes.onnx_export import export
from triton_transformers.answers import LIMITS
from triton_transformers.settings import UserError

MODELS = ("gpt2_ensemble", "gpt2_encoder", "gpt2", "gpt2_decoder", "gpt2_generate")
INPUTS = ("input_ids", "attention_mask")


class Graph(torch.nn.Module):
    def __init__(self, model: transformers.GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.model.transformer(
            input_ids,
            attention_mask=attention_mask,
            # Padding must not shift positions, so count only the tokens that the mask keeps.
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        # Only the last position: logits are as many as the vocabulary has tokens.
        return (self.model.lm_head(hidden[:, -1]),)


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
    shutil.copy(versions["gpt2_encoder"] / "tokenizer.json", versions["gpt2_decoder"])
    outcome = Outcome(
        f"logits within {logits_difference:.0e} of the original's",
        {"positions": model.config.n_positions, "largest_difference": logits_difference},
    )
    del model  # the export of the second takes the memory of several copies
    texts = replace(job, task="text-generation")
    engine = write_model(texts, load_tokenizer(texts), versions["gpt2_generate"])
    return outcome.join(engine.of("gpt2_generate"))


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


def export_graph(graph: Graph, target: Path) -> None:
    inputs = {name: {0: "texts", 1: f"{name}_size"} for name in INPUTS}
    examples = [example(graph, *sizes) for sizes in ((2, 7), (3, 5), (1, 1))]
    # Without folded constants: it would store the vocabulary a second time, transposed.
    export(graph, inputs, {"logits": {0: "texts"}}, examples, target, fold_constants=False)


def example(graph: Graph, texts: int, length: int) -> Tensors:
    """Return inputs for texts of this length. In the last one, the first position is padding."""
    mask = np.ones((texts, length), np.int64)
    mask[-1, : length > 1] = 0
    ids = np.random.default_rng(0).integers(graph.model.config.vocab_size, size=(texts, length))
    return dict(zip(INPUTS, (ids, mask), strict=True))


def check_parity(model: transformers.GPT2LMHeadModel, path: Path) -> float:
    """Return how far the logits are from the original's, or raise if that is too far.

    The graph gets texts of unequal length as one batch; the original gets each text alone.
    """
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    length = min(24, model.config.n_positions)
    ids = np.random.default_rng(1).integers(model.config.vocab_size, size=(3, length))
    starts = [0, length // 2, length - 1]
    mask = (np.arange(length) >= np.array(starts)[:, None]).astype(np.int64)
    (logits,) = session.run(["logits"], dict(zip(INPUTS, (ids, mask), strict=True)))
    with torch.inference_mode():
        texts = [torch.from_numpy(row[start:])[None] for row, start in zip(ids, starts, strict=True)]
        original = np.stack([model(text).logits[0, -1].numpy() for text in texts])
    worst = largest_difference([{"logits": original}], [{"logits": logits}])
    worst.check(LIMITS["original", "gpt2"].difference, "alone")
    return worst.size
