"""Make the answers that clients get from the outputs of a text encoder's run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shared.tokenization import Rows, Tokenization
from shared.types import Array, InstanceArgs, ModelConfig, Tensors

# The file of a multi-vector model, beside its tokenizer.json.
MULTI_VECTOR = "multi_vector.json"
# Optional input: the characters of each text's spans.
SPANS = "spans"


class Answers:
    """The encoder's outputs as they are."""

    def encoder_outputs(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs of the encoder that these outputs of the configuration are made of."""
        return outputs

    def use_head(self, head: Callable[[Array], Array] | None) -> None:
        """Take the encoder's layers after its pooling, if it has them apart."""

    def needed(self, names: list[str], rows: Rows) -> list[str]:
        """Return the names of the encoder's outputs that these outputs are made of."""
        return names

    def finished(self, names: list[str], rows: Rows, tokens: Tensors, outputs: Tensors) -> Tensors:
        """Return these outputs of a request, given its tokens and the encoder's outputs."""
        return outputs


class TextModel(NamedTuple):
    tokenization: Tokenization
    answers: Answers


def text_model(config: ModelConfig, args: InstanceArgs, dtypes: dict[str, Any], padding: str = "none") -> TextModel:
    """Return the model's tokenization, and the object that makes answers from its encoder's outputs."""
    if any(tensor["name"] == SPANS for tensor in config["input"]):
        from shared.late_chunking import SpanAnswers, SpanTokenization

        return TextModel(SpanTokenization(config, args, dtypes, padding), SpanAnswers(config))
    if (Path(args["model_repository"]) / args["model_version"] / MULTI_VECTOR).is_file():
        from shared.multi_vector import MultiVectorAnswers, MultiVectorTokenization

        tokenization = MultiVectorTokenization(config, args, dtypes, padding)
        return TextModel(tokenization, MultiVectorAnswers(tokenization))
    return TextModel(Tokenization(config, args, dtypes, padding), Answers())
