"""Task `text-encoder` on PyTorch: the same tensors as the ONNX graph of the same model, without an export."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from safetensors.torch import load_file

from serving.encoders.packed import PackedEncoder
from serving.encoders.plan import Encoder
from serving.engines import pretrained, torch_choice
from serving.engines.choice import ROUNDS
from serving.engines.flat import row
from serving.engines.flat import run as flat_run
from serving.engines.flat.graphs import Ladder
from serving.engines.lean_transformers import transformers
from serving.triton.parameters import choice_parameter, flag_parameter, int_parameter, parameter, weights_folder
from serving.triton.types import Array, ConfigError, InstanceArgs, ModelConfig, Tensors
from triton_transformers.engines import FLAT, PADDED

POOLING_MASK = "pooling_mask"  # the attention mask without the tokens that are not pooled


class TextEncoder(PackedEncoder):
    model: Any
    call: Any
    flat_base: Any  # the part of the model that runs flat

    def load_encoder(self, config: ModelConfig, args: InstanceArgs) -> Encoder:
        # The output that is the vector of a text, if the model computes it by itself.
        self.vector = parameter(config, "vector")
        self.pooling = parameter(config, "pooling", "mean").split("+")
        if unknown := [mode for mode in self.pooling if mode not in POOLING_MODES]:
            raise ConfigError(f"parameter 'pooling': unknown mode '{unknown[0]}'; use {', '.join(POOLING_MODES)}")
        self.normalize_tokens = flag_parameter(config, "normalize_tokens", True)
        self.dimensions = int_parameter(config, "dimensions", 0) or None
        self.normalize = flag_parameter(config, "normalize", False)
        self.splade_pooling = choice_parameter(config, "splade_pooling", ("max", "sum"), "max")
        self.splade_activation = choice_parameter(config, "splade_activation", ("relu", "log1p_relu"), "relu")
        self.mask_token_id = int_parameter(config, "mask_token_id", -1)
        encoder = Encoder(
            inputs={tensor["name"]: np.int64 for tensor in config["input"]},
            outputs=[tensor["name"] for tensor in config["output"]],
            per_token={tensor["name"] for tensor in config["output"] if int(tensor["dims"][0]) == -1},
            run=self.forward,
            parallel_runs=1,  # PyTorch spreads one run over its threads
            head=self.head,
        )
        planned = pretrained.plan(config, args)
        may_run_flat, _ = torch_choice.choices(config, planned)
        reason, loaded = "", ""

        def load(precision: str) -> None:
            nonlocal reason, loaded
            loaded = ""  # a load that fails leaves no model
            self.load_model(config, args, torch_choice.PRECISIONS[precision])
            reason = self.run_flat(encoder, config) if may_run_flat else ""
            loaded = precision

        def attempt(precision: str) -> torch_choice.Trial:
            load(precision)
            feed = row.sample(self.model, encoder.inputs, self.pad_values)
            return torch_choice.Trial(self.form, self.present_answers(encoder, feed), self.seconds_of_sample(encoder))

        name = f"{args['model_name']}-{args['model_version']}"
        precision, figures = torch_choice.choose(name, planned, config, attempt)
        if loaded != precision:
            load(precision)
        messages = []
        if reasons := "; ".join(filter(None, (reason, figures))):
            padding = "without padding" if self.is_flat else "with padding"
            messages.append(f"runs its texts {padding} in {precision} ({reasons})")
        if self.is_flat and self.model.device.type == "cuda":
            messages.append(self.record_runs(encoder))
        for message in messages:
            pb_utils.Logger.log_info(f"{args['model_instance_name']}: {message}")
        labels = {"engine": self.form, "precision": pretrained.name_of(self.model.dtype)}
        self.engine_labels = labels
        return replace(
            encoder, is_flat=self.is_flat, cost_depends_on=lambda: torch_choice.depends_on(planned, config) | labels
        )

    @property
    def form(self) -> str:
        return FLAT if self.is_flat else PADDED

    def load_model(self, config: ModelConfig, args: InstanceArgs, precision: torch.dtype) -> None:
        """Load the model and the layers after it, in place of those of another precision."""
        self.model = self.call = self.flat_base = None
        self.is_flat = False
        torch_choice.free_cuda()
        self.model = pretrained.load(pretrained.model_class(config, "AutoModel"), config, args, precision)
        self.model.config.get_text_config().use_cache = False  # an encoder generates no tokens
        self.call = pretrained.method(self.model, config)
        # Packing needs the mask even for a model that takes none, such as FNet.
        self.accepted = inspect.signature(self.call).parameters
        if (pad := self.pad_values["input_ids"]) < 0:
            # No token has this id, so the model finds the last token of any text; the embedding must not look it up.
            self.model.config.pad_token_id = pad
            self.model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0].clamp(min=0),))
        folder = weights_folder(config, args)
        # The layers of sentence-transformers after the pooling, and those for each token's vector and weight.
        self.dense, self.token_dense, self.weight_dense = (
            [self.load_dense(folder / name) for name in parameter(config, key).split(",") if name]
            for key in ("dense", "token_dense", "weight_dense")
        )
        self.ranks = bool(score_tokens := parameter(config, "score_tokens"))
        if self.ranks:
            pretrained.keep_tokens(self.model, [int(id) for id in score_tokens.split(",")])

    def run_flat(self, encoder: Encoder, config: ModelConfig) -> str:
        """Run texts flat if the answers stay, and return why or why not."""
        if not self.pads or self.fills_rows:
            return f"parameter 'padding' is '{parameter(config, 'padding')}'"
        try:
            feed = row.sample(self.model, encoder.inputs, self.pad_values)
            padded = self.present_answers(encoder, feed)
            for base in dict.fromkeys([self.model, self.model.base_model]):
                try:
                    row.flatten(self.model, base)
                    self.call, self.is_flat = pretrained.method(self.model, config), True
                    reason = row.check_alike(padded, self.present_answers(encoder, feed))
                    self.flat_base = base
                    return reason
                except Exception as error:
                    failure = error
                    row.restore(self.model, base)
                    self.call, self.is_flat = pretrained.method(self.model, config), False
        except Exception as error:
            failure = error
        return " ".join(str(failure).split()) or type(failure).__name__

    def present_answers(self, encoder: Encoder, feed: Tensors) -> list[Array]:
        """Return the answers, with zeros for padding, because the model's answers to it do not matter."""
        answers = self.forward(encoder.outputs, feed)
        for name, answer in zip(encoder.outputs, answers, strict=True):
            if name in encoder.per_token:
                answer[feed[self.mask] == 0] = 0
        return answers

    def seconds_of_sample(self, encoder: Encoder) -> float:
        """Return the seconds of the fastest run of texts of one length, which need no padding."""
        lengths = [row.TIMED_LENGTH] * row.TIMED_TEXTS
        feed = row.sample(self.model, encoder.inputs, self.pad_values, lengths)
        return fastest(lambda: self.forward(encoder.outputs, feed))

    def record_runs(self, encoder: Encoder) -> str:
        """Record small runs as CUDA graphs, and return how many, and why no more."""

        def run(lengths: list[int]) -> list[Array]:
            feed = row.sample(self.model, encoder.inputs, self.pad_values, lengths)
            return self.present_answers(encoder, feed)

        ladder = self.flat_base.row_forward = Ladder(self.flat_base.row_forward)
        return ladder.climb(row.longest_text(self.model), run, fastest)

    @torch.inference_mode()
    def forward(self, names: list[str], feed: Tensors) -> list[Array]:
        tensors, run = flat_run.on_device(feed, self.model.device, feed[self.mask] if self.is_flat else None)
        with flat_run.current(run):
            outputs = self.call(**{name: tensor for name, tensor in tensors.items() if name in self.accepted})
        return [self.output(name, outputs, tensors).float().cpu().numpy() for name in names]

    def output(
        self, name: str, outputs: transformers.utils.ModelOutput, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if name == "mask_logits":
            positions = (tensors["input_ids"] == self.mask_token_id).int().argmax(dim=1)
            logits: torch.Tensor = outputs["logits"]
            return logits[torch.arange(len(positions)), positions]
        if self.ranks:
            last = tensors["attention_mask"].cumsum(1).argmax(1)
            scores: torch.Tensor = outputs["logits"][torch.arange(len(last)), last]
            return scores[:, :1] - scores[:, 1:].sum(1, keepdim=True)  # the second token is the answer no
        if name == "sparse_embedding":
            return self.splade(outputs["logits"], tensors["attention_mask"])
        if name == "sentence_embedding" and not self.vector:
            mask = tensors.get(POOLING_MASK, tensors["attention_mask"])
            return self.embedding(outputs["last_hidden_state"], mask)
        if name == "token_embeddings":
            return self.token_vectors(outputs["last_hidden_state"])
        if name == "token_weights":
            return applied(self.weight_dense, outputs["last_hidden_state"])[..., 0].relu()
        output: torch.Tensor = outputs[self.vector or name]
        return output

    def splade(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = (logits * mask[..., None]).relu().log1p()
        if self.splade_activation == "log1p_relu":
            weights = weights.log1p()
        return weights.amax(dim=1) if self.splade_pooling == "max" else weights.sum(dim=1)

    def embedding(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([POOLING_MODES[mode](tokens, mask) for mode in self.pooling], dim=1)
        return self.after_pooling(vectors)

    def after_pooling(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = applied(self.dense, vectors)
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors[:, : self.dimensions]

    @torch.inference_mode()
    def head(self, vectors: Array) -> Array:
        """Apply the layers after the pooling to these vectors [rows, width]."""
        pooled = torch.from_numpy(vectors).to(self.model.device, self.model.dtype)
        return self.after_pooling(pooled).float().cpu().numpy()

    def token_vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors = applied(self.token_dense, tokens)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.normalize_tokens else vectors

    def load_dense(self, folder: Path) -> torch.nn.Module:
        """Return a dense layer as sentence-transformers saves it."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"parameter 'dense': {path} is missing: put there what sentence-transformers saves")
        config = json.loads(path.read_text())
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config["bias"])
        weights = load_file(folder / "model.safetensors")
        linear.load_state_dict({name.removeprefix("linear."): weight for name, weight in weights.items()})
        activation = getattr(torch.nn, config["activation_function"].rpartition(".")[2])()
        return torch.nn.Sequential(linear, activation).to(self.model.device, self.model.dtype).eval()


def fastest(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs, which nothing else disturbed."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def applied(layers: list[torch.nn.Module], vectors: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        vectors = layer(vectors)
    return vectors


# --- pooling: one vector from those of a text's tokens, as sentence-transformers does ---------------------------------


def first(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tokens[torch.arange(len(tokens)), mask.int().argmax(1)]


def last(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # A row without a token gets zeros.
    return first(tokens.flip(1), mask.flip(1)) * mask.any(1, keepdim=True)


def maximum(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(mask[..., None] == 0, float("-inf")).amax(1)


def mean(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def mean_sqrt_len_tokens(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mean(tokens, mask) * mask.sum(1, keepdim=True).to(tokens.dtype).sqrt()


def weighted_mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mean(tokens, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))


POOLING_MODES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": first,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len_tokens,
    "weightedmean": weighted_mean,
    "lasttoken": last,
}
