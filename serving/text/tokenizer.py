"""Texts to tokens and back with a model's tokenizer.json, and the limits that its texts must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serving.structure.checks import token_bytes, vocabulary
from serving.text.chat_template import TEMPLATE, TOOL_TEMPLATE, ChatTemplate
from serving.triton.types import ConfigError

# Written by `make models`, from what transformers derives from the checkpoint's many files.
LIMITS = "limits.json"


class TextTokenizer:
    def __init__(self, folder: Path) -> None:
        for name in ("tokenizer.json", LIMITS):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder} has no {name}: `make models` writes it")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        limits: dict[str, Any] = json.loads((folder / LIMITS).read_text())
        self.vocabulary: int = limits.get("vocabulary") or self.tokenizer.get_vocab_size()
        self.context: int | None = limits["context"]
        # An engine may forbid them, and would write past the scores of a model that lacks one.
        self.end_tokens = frozenset(token for token in limits["end_tokens"] if token < self.vocabulary)
        self.start: list[int] = limits.get("start", [])  # the tokens of an empty prompt
        source, tool_source = (
            file.read_text() if (file := folder / name).is_file() else "" for name in (TEMPLATE, TOOL_TEMPLATE)
        )
        self.chat_template = ChatTemplate(source, limits.get("special_tokens", {}), tool_source)

    def token_bytes(self) -> list[bytes]:
        return vocabulary(self.tokenizer, self.vocabulary)

    def bytes_of(self, token: int) -> list[int] | None:
        return token_bytes(self.tokenizer, token)

    def encode(self, prompt: str, special_tokens: bool = True) -> list[int]:
        """Return the prompt's tokens, none if it is empty and the model has no token to begin a text with.

        Without `special_tokens`, add none around the prompt: a chat template writes them itself.
        """
        if not prompt:
            return list(self.start)
        # Only the methods for batches let other threads run meanwhile.
        (encoding,) = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=special_tokens)
        tokens: list[int] = encoding.ids
        return tokens

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text
