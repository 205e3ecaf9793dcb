"""Describe a cross-encoder that is being assembled, so that it is served as CrossEncoder.predict() answers."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore

from export.check.served import Tensors
from export.recipes.text.network import TextModel
from export.recipes.text.sentences import LibraryNetwork, SentenceModel
from triton_transformers.settings import UserError

# The modules of torch that CrossEncoder applies to logits -> the postprocessor's name for them.
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax", "Tanh": "tanh"}
# Qwen3-Reranker was published with the chat template of Qwen3, and its own in the model card.
QWEN3_TEMPLATE = Path(__file__).with_name("qwen3_reranker.jinja")
QWEN3_LENGTH = 8192  # tokens, as in the model card


class RankingModel(SentenceModel):
    """A sequence classifier, or a language model whose logits after the pair are its score."""

    library = CrossEncoder
    token_inputs = TextModel.token_inputs
    width = TextModel.width
    save_layers = TextModel.save_layers

    @property
    def prompts(self) -> dict[str, str]:
        return self.original.prompts

    @property
    def processor_options(self) -> dict[str, Any]:
        checkpoint = self.job.checkpoint
        if not checkpoint.has_modules and checkpoint.architectures == ["Qwen3ForCausalLM"]:
            length = min(QWEN3_LENGTH, checkpoint.config["max_position_embeddings"])
            return {"chat_template": QWEN3_TEMPLATE.read_text(), "model_max_length": length}
        return {}

    @cached_property
    def original(self) -> Any:
        model = super().original
        first, *others = model
        if any(isinstance(module, LogitScore) and module.true_token_id == module.false_token_id for module in others):
            raise UserError(
                f"{self.job.system}: a language model ranks by the logits of yes and no, and its tokenizer has no such "
                "tokens: save it with sentence-transformers' CrossEncoder, whose LogitScore names the tokens"
            )
        if "message" in first.modality_config and (failure := first.input_formatter.pair_roles_failure()):
            raise UserError(
                f"{self.job.system}: its chat template has no place for a query and a document ({failure}): write the "
                "template of the model card to chat_template.jinja, with the roles system, query and document"
            )
        return model

    @property
    def score(self) -> LogitScore | None:
        """Return the module that reads the score from the logits of a language model."""
        return next((module for module in self.original if isinstance(module, LogitScore)), None)

    @cached_property
    def model_class(self) -> str:
        return "AutoModelForCausalLM" if self.score else self.task.model_class

    @cached_property
    def label_count(self) -> int:
        return self.original.num_labels

    @cached_property
    def network(self) -> torch.nn.Module:
        self.accept_padding()
        if self.score:
            from serving.engines.pretrained import keep_tokens

            keep_tokens(self.transformer, self.score_tokens)
            self.score.true_token_id, *false = range(len(self.score_tokens))
            self.score.false_token_id = false[0] if false else None
            self.score.register_forward_pre_hook(read_last_token)
        return LibraryNetwork(self, "scores")

    @cached_property
    def score_tokens(self) -> list[int]:
        assert self.score
        return [id for id in (self.score.true_token_id, self.score.false_token_id) if id is not None]

    @cached_property
    def layers(self) -> dict[str, object]:
        if others := [module for module in list(self.original)[1:] if not isinstance(module, LogitScore)]:
            raise UserError(
                f"{self.job.system}: FORMAT=python does not support a cross-encoder's {type(others[0]).__name__}: set "
                "FORMAT=onnx"
            )
        return {"score_tokens": ",".join(map(str, self.score_tokens))} if self.score else {}

    def reference(self, request: Tensors) -> Tensors:
        """Return what predict() returns; on Neuron the encoder's outputs, which are scores without an activation."""
        name, options = ("logits", {"activation_fn": torch.nn.Identity()}) if self.job.neuron else ("score", {})
        if self.original.tokenizer.pad_token is None:
            # `predict` asks for padding even of one pair, which then gets none.
            self.original.tokenizer.pad_token = self.original.tokenizer.eos_token
        scores = self.original.predict([self.texts_of(request)], **self.options_of(request), **options)
        return {name: np.asarray(scores[0]).reshape(1, -1)}

    @cached_property
    def activation(self) -> str:
        """Return the function that turns logits into scores."""
        name = type(self.original.activation_fn).__name__
        if name not in ACTIVATIONS:
            raise UserError(
                f"{self.job.system}: its scores pass through {name}, which is not served; {', '.join(ACTIVATIONS)} are"
            )
        return ACTIVATIONS[name]


def read_last_token(score: torch.nn.Module, args: tuple[dict[str, Any]]) -> None:
    """Leave the logits of each row's last token, where the library would have padded on the left."""
    (features,) = args
    name = str(score.module_input_name)
    last = features["attention_mask"].cumsum(1).int().argmax(1)
    features[name] = features[name][torch.arange(last.shape[0]), last][:, None]
