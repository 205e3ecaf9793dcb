"""Describe a cross-encoder that is being assembled, so that it is served as CrossEncoder.predict() answers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sentence_transformers import CrossEncoder

from scripts.common.settings import UserError
from scripts.models.exporters.sentence_model import SentenceModel
from scripts.models.exporters.text_model import TextModel

# The modules of torch that CrossEncoder applies to logits -> the postprocessor's name for them.
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax", "Tanh": "tanh"}


class RankingModel(SentenceModel):
    """A sequence classifier of transformers, loaded by sentence-transformers."""

    library = CrossEncoder
    # From tokens to logits it is like the other classifiers.
    token_inputs = TextModel.token_inputs
    width = TextModel.width
    network = TextModel.network
    layers = TextModel.layers
    save_layers = TextModel.save_layers

    @cached_property
    def original(self) -> Any:
        model = super().original
        first, *others = model
        if others or first.transformer_task != "sequence-classification":
            kinds = ", ".join(type(module).__name__ for module in model)
            raise UserError(
                f"{self.job.system}: cross-encoders are served if they are sequence classifiers, and this one is "
                f"{kinds} for {first.transformer_task}: convert it to a sequence classifier with one label"
            )
        return model

    @cached_property
    def activation(self) -> str:
        """Return the function that turns logits into scores."""
        name = type(self.original.activation_fn).__name__
        if name not in ACTIVATIONS:
            raise UserError(
                f"{self.job.system}: its scores pass through {name}, which is not served; {', '.join(ACTIVATIONS)} are"
            )
        return ACTIVATIONS[name]
