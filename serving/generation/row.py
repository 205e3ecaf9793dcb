"""One prompt and what a model has added to it so far: its tokens, its text, and whether it has ended."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from serving.triton.types import Array

# The tokenizer decodes an incomplete character to this.
INCOMPLETE = "\ufffd"
# Prompt tokens that are decoded with the first new ones, because a token's text can depend on those before it.
LEAD = 5
MIN_LOGPROB = -9999.0
# Positions of prompts that are scored together. The scores of each are a number for every token of the vocabulary.
CHUNK = 128

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
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: Any = None  # as prepare_structure() of the engine returned it
    lora_name: str = ""
    adapter: Any = None  # the adapter of that name, as the engine found it

    @property
    def adjusts(self) -> bool:
        """Return whether the options change the scores of tokens."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.min_tokens)


# Returns the bytes of a token, None if they are unknown.
BytesOf = Callable[[int], list[int] | None]


class Logprobs(NamedTuple):
    """The logarithm of a token's probability, as the model computed it, and the most probable tokens with theirs."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Row(Generic[Owner]):
    """One prompt, and what the model has added to it so far."""

    def __init__(self, prompt: str, tokens: Sequence[int], options: Options, owner: Any = None) -> None:
        self.owner: Owner = owner  # the request that the row belongs to
        self.prompt = prompt
        self.prompt_tokens = list(tokens)
        self.options = options
        self.images: Any = None  # the model's inputs for the images among the tokens
        self.done = False
        self.drops_tokens = False  # the request wants no new token, and the engine must add one
        self.scored: list[dict[str, Any]] = []  # the logprobs of the prompt's tokens, if asked
        self.reset()

    def reset(self) -> None:
        """Reset the row; called again when its batch failed and is retried."""
        self.tokens = list(self.prompt_tokens)
        self.steps = 0  # of the model, since the row runs
        self.first_token_at = self.last_token_at = math.nan  # by time.monotonic()
        # Tokens of the prompt whose keys and values the engine had; None if it does not count them.
        self.cached_tokens: int | None = 0
        # The logprobs of the prompt's tokens, then of each new token except the one that ended the text, if asked.
        self.logprobs = [*self.scored]
        self.spans = [(-1, -1)] * len(self.scored)  # where the text of each begins and ends in `decoded`
        self.finish_reason = ""  # "stop" or "length" when the text has ended by itself
        self.stop_reason = ""  # the stop string that ended it
        self.decoded = ""
        self.text = ""  # the part of `decoded` that no later token can change
        self.window = max(0, len(self.tokens) - LEAD)  # the first token to decode for the next piece of text
        self.read = len(self.tokens)  # the tokens before this one are in `decoded`

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_tokens)

    def score_prompt(
        self, scores: Iterable[Logprobs], decode: Callable[[list[int], bool], str], bytes_of: BytesOf
    ) -> None:
        """Take the logprobs of the prompt's tokens but the first, which has none. There is no new token yet."""
        named_scores = (
            named(token, own, decode, bytes_of) for token, own in zip(self.prompt_tokens[1:], scores, strict=True)
        )
        first = named(self.prompt_tokens[0], Logprobs(0.0), decode, bytes_of) | {"logprob": None}
        self.scored = [first, *named_scores]
        self.logprobs, self.spans = [*self.scored], [(-1, -1)] * len(self.scored)

    def add(
        self,
        token: int,
        end_tokens: Collection[int],
        decode: Callable[[list[int], bool], str],
        logprobs: Logprobs | None = None,
        bytes_of: BytesOf = lambda token: None,
    ) -> None:
        """Add a new token. `end_tokens` are the model's own; `decode` gets tokens and whether to skip special ones."""
        if self.drops_tokens:
            self.done, self.finish_reason = True, "length"
            return
        self.last_token_at = time.monotonic()
        if not self.new_tokens:
            self.first_token_at = self.last_token_at
        self.tokens.append(token)
        own = self.options
        ends = token in own.stop_token_ids or (token in end_tokens and not own.ignore_eos)
        self.done = ends or self.new_tokens >= own.max_new_tokens
        begin, read = len(self.decoded), self.read
        self.decoded += self._new_text(decode, len(self.tokens) - ends)
        # Clients that score prompts drop the last entry, that of the new token, whichever it is.
        if logprobs and own.logprobs is not None and (not ends or own.prompt_logprobs is not None):
            self.logprobs.append(named(token, logprobs, decode, bytes_of))
        if self.logprobs:
            self.spans += [(begin, len(self.decoded))] * (self.read - read)
        # As in vLLM, the first `min_tokens` cannot end the text with a stop string either.
        strings = own.stop if self.new_tokens > own.min_tokens else ()
        start = len(self.text)
        stops = [(at, stop) for stop in strings if (at := self.decoded.find(stop, start)) >= 0]
        self.done = self.done or bool(stops)
        if self.done:
            self.finish_reason = "stop" if ends or stops else "length"
        held = 0 if self.done else partial_stop_length(strings, self.decoded[start:])
        end, self.stop_reason = min(stops, default=(len(self.decoded) - held, ""))
        self.text = self.decoded[:end]

    def _new_text(self, decode: Callable[[list[int], bool], str], end: int) -> str:
        """Return the text of the tokens from the last call to `end`, or "" while they end inside a character."""
        skip = self.options.skip_special_tokens
        before = decode(self.tokens[self.window : self.read], skip)
        now = decode(self.tokens[self.window : end], skip)
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not self.done):
            return ""
        self.window, self.read = self.read, end
        return now[len(before) :]

    @property
    def known_logprobs(self) -> int:
        """Return how many of `logprobs`, from the first, are of tokens whose text is in `text` and will stay there."""
        if not self.done:
            return bisect_right(self.spans, len(self.text), key=lambda span: span[1])
        if not self.stop_reason:
            return len(self.logprobs)
        return bisect_left(self.spans, len(self.text), key=lambda span: span[0])


def named(
    token: int, logprobs: Logprobs, decode: Callable[[list[int], bool], str], bytes_of: BytesOf
) -> dict[str, Any]:
    """Return the logprobs of a token as responses have them: of a part of a character with its bytes."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity and no NaN; this is the minimum in OpenAI's API.
        text = decode([token], False)
        own = {"id": token, "token": text, "logprob": max(MIN_LOGPROB, logprob)}
        return own | ({"bytes": bytes_of(token)} if "\ufffd" in text else {})

    return entry(token, logprobs.logprob) | {"top": [entry(*pair) for pair in logprobs.top]}


def partial_stop_length(stops: Sequence[str], text: str) -> int:
    """Return how many characters at the end of the text can be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def logprobs_of(scores: Array, tokens: Sequence[int], count: int) -> Iterator[Logprobs]:
    """Yield the logprobs of each of these tokens, with `count` alternatives, by the row of scores at its place."""
    scores = scores - scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    count = min(count, scores.shape[-1])
    for row, token in zip(scores, tokens, strict=True):
        top = np.argpartition(row, -count)[-count:] if count else np.array([], int)
        top = top[np.argsort(-row[top])]
        yield Logprobs(float(row[token]), [*zip(top.tolist(), row[top].tolist(), strict=True)])
