"""One prompt and what a model has added to it so far: its tokens, its text, and whether it has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# The tokenizer decodes an incomplete character to this.
INCOMPLETE = "\ufffd"
# Prompt tokens that are decoded with the first new ones, because a token's text can depend on those before it.
LEAD = 5

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Options:
    """How to continue a prompt."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # the number of alternatives to each token; 0: only the token itself
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None
    lora_name: str = ""


class Row(Generic[Owner]):
    """One prompt, and what the model has added to it so far."""

    def __init__(self, prompt: str, tokens: Sequence[int], options: Options, owner: Any = None) -> None:
        self.owner: Owner = owner  # the request that the row belongs to
        self.prompt = prompt
        self.prompt_tokens = list(tokens)
        self.options = options
        self.done = False
        self.reset()

    def reset(self) -> None:
        """Reset the row; called again when its batch failed and is retried."""
        self.tokens = list(self.prompt_tokens)
        self.first_token_at = self.last_token_at = math.nan  # by time.monotonic()
        self.finish_reason = ""  # "stop" or "length" when the text has ended by itself
        self.stop_reason = ""  # the stop string that ended it
        self.decoded = ""
        self.text = ""  # the part of `decoded` that no later token can change
        self.window = max(0, len(self.tokens) - LEAD)  # the first token to decode for the next piece of text
        self.read = len(self.tokens)  # the tokens before this one are in `decoded`

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_tokens)

    def add(self, token: int, end_tokens: Collection[int], decode: Callable[[list[int]], str]) -> None:
        self.last_token_at = time.monotonic()
        if not self.new_tokens:
            self.first_token_at = self.last_token_at
        self.tokens.append(token)
        ends = token in end_tokens
        self.done = ends or self.new_tokens >= self.options.max_new_tokens
        self.decoded += self._new_text(decode)
        start = len(self.text)
        stops = [(at, stop) for stop in self.options.stop if (at := self.decoded.find(stop, start)) >= 0]
        self.done = self.done or bool(stops)
        if self.done:
            self.finish_reason = "stop" if ends or stops else "length"
        held = 0 if self.done else partial_stop_length(self.options.stop, self.decoded[start:])
        end, self.stop_reason = min(stops, default=(len(self.decoded) - held, ""))
        self.text = self.decoded[:end]

    def _new_text(self, decode: Callable[[list[int]], str]) -> str:
        """Return the text of the tokens since the last call, or "" while they end inside a character."""
        before = decode(self.tokens[self.window : self.read])
        now = decode(self.tokens[self.window :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not self.done):
            return ""
        self.window, self.read = self.read, len(self.tokens)
        return now[len(before) :]


def partial_stop_length(stops: Sequence[str], text: str) -> int:
    """Return how many characters at the end of the text can be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)
