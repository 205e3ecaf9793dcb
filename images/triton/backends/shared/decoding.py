"""Texts continued together by one causal language model: each row of the batch samples and stops on its own.

Knows nothing of Triton's requests, so it is tested without a server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shared.packing import RunCost, cheapest_cut

# What an incomplete character decodes to.
INCOMPLETE = "\ufffd"
# Tokens of the prompt that are decoded with the first new ones: how a token reads may hang on those before it.
LEAD = 5
# Prompts that are timed, in tokens.
SHORT, LONG = 8, 64
# What each step pays to read a token of the prompt again, padding or not, against what it cost first: a fiftieth on a
# CPU (GPT-2: 2.3 ms and 0.05 ms).
READ_AGAIN = 0.02


@dataclass(frozen=True)
class Options:
    """How a prompt is to be continued."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]


class Row:
    """One prompt, and what the model has added to it so far."""

    def __init__(self, prompt: str, tokens: Sequence[int], options: Options, owner: object = None) -> None:
        self.owner = owner  # whoever wants it
        self.prompt = prompt
        self.prompt_tokens = list(tokens)
        self.options = options
        self.done = False
        self.begin()

    def begin(self) -> None:
        """Also once more, where the batch failed that it was in."""
        self.tokens = list(self.prompt_tokens)
        self.decoded = ""
        self.text = ""  # of what is decoded, as much as nothing to come can change
        self.window = max(0, len(self.tokens) - LEAD)
        self.read = len(self.tokens)
        self.random = torch.Generator().manual_seed(self.options.seed)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_tokens)

    def add(self, token: int, ends: set[int], decode: Callable[[list[int]], str]) -> None:
        self.tokens.append(token)
        self.done = token in ends or self.new_tokens >= self.options.max_new_tokens
        self.decoded += self._new_text(decode)
        start = len(self.text)
        stops = [at for stop in self.options.stop if (at := self.decoded.find(stop, start)) >= 0]
        self.done = self.done or bool(stops)
        held = 0 if self.done else beginning_of(self.options.stop, self.decoded[start:])
        self.text = self.decoded[: min(stops, default=len(self.decoded) - held)]

    def _new_text(self, decode: Callable[[list[int]], str]) -> str:
        """What the tokens since the last call add, or nothing while they end within a character."""
        before = decode(self.tokens[self.window : self.read])
        now = decode(self.tokens[self.window :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not self.done):
            return ""
        self.window, self.read = self.read, len(self.tokens)
        return now[len(before) :]


def beginning_of(stops: Sequence[str], text: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


@dataclass(frozen=True)
class Traits:
    """What a model takes."""

    vocabulary: int
    context: int | None
    device: torch.device


class Decoder:
    """The model and its tokenizer."""

    padding_side = "left"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends]) - {None}
        starts = (tokenizer.bos_token_id, model.generation_config.bos_token_id, tokenizer.eos_token_id)
        # Nothing else of the checkpoint's: a penalty on repetition counts a row's padding, which hangs on its company.
        model.generation_config = GenerationConfig(eos_token_id=sorted(self.ends) or None)
        traits = self.traits()
        self.vocabulary, self.context, self.device = traits.vocabulary, traits.context, traits.device
        self.padding = next(token for token in (tokenizer.pad_token_id, *sorted(self.ends), 0) if token is not None)
        # The first use also sets the tokenizer up; from then on threads may share it.
        self.start = tokenizer("").input_ids or [token for token in starts if token is not None][:1]
        self.measure()

    def traits(self) -> Traits:
        config = self.model.config.get_text_config(decoder=True)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        return Traits(vocabulary, getattr(config, "max_position_embeddings", None), self.model.device)

    def encode(self, prompt: str) -> list[int]:
        """Empty only for a model that has nothing to begin an empty text with."""
        return self.tokenizer(prompt).input_ids if prompt else self.start

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def measure(self) -> None:
        """What a token of a prompt and a step of the loop cost here: parts() weighs the one against the other."""
        self.seconds(SHORT, 1)  # the very first also sets things up
        first = self.seconds(SHORT, 1)
        self.token_cost = max(0.0, self.seconds(LONG, 1) - first) / (LONG - SHORT)
        self.step_cost = max(self.token_cost, (self.seconds(SHORT, 3) - first) / 2)

    def seconds(self, length: int, new_tokens: int) -> float:
        """Of one prompt; the best of several, unless they take long, is the one that nothing else disturbed."""
        tokens = torch.full((1, length), self.padding, device=self.device)
        said = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        times: list[float] = []
        while len(times) < 3 and sum(times) < 1:
            begin = time.perf_counter()
            self.model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=self.padding, **said)
            times.append(time.perf_counter() - begin)
        return min(times)

    def parts(self, rows: list[Row]) -> list[list[Row]]:
        """The rows as the batches that take least time: padding to one long prompt may cost more than a batch more."""
        rows = sorted(rows, key=lambda row: len(row.prompt_tokens))
        steps = max((row.options.max_new_tokens for row in rows), default=0)
        cost = RunCost(self.step_cost * steps, self.token_cost * (1 + READ_AGAIN * steps))
        cuts = cheapest_cut(np.array([len(row.prompt_tokens) for row in rows]), cost)
        return [part for start, end in cuts for part in self.within_context(rows[start:end])]

    def within_context(self, rows: list[Row]) -> list[list[Row]]:
        """A batch carries a row that is done along to its end, each token one position further.

        Positions past the model's context are an error there, or spoil the other rows.
        """
        most = max(row.options.max_new_tokens for row in rows)
        if len(rows) == 1 or len(rows[-1].prompt_tokens) + most <= (self.context or math.inf):
            return [rows]
        middle = len(rows) // 2
        return self.within_context(rows[:middle]) + self.within_context(rows[middle:])

    def generate(self, rows: list[Row], tell: Callable[[], None]) -> None:
        """Until every row is done. Calls `tell` after every token, which may set rows to done, too."""
        for row in rows:
            row.begin()
        width = max(len(row.prompt_tokens) for row in rows)
        tokens = torch.full((len(rows), width), self.padding)
        mask = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            start = width - len(row.prompt_tokens) if self.padding_side == "left" else 0
            text = slice(start, start + len(row.prompt_tokens))
            tokens[i, text] = torch.tensor(row.prompt_tokens)
            mask[i, text] = 1
        self.model.generate(
            tokens.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max(row.options.max_new_tokens for row in rows),
            do_sample=False,
            num_beams=1,
            pad_token_id=self.padding,
            logits_processor=LogitsProcessorList([Sampling(rows)]),
            stopping_criteria=StoppingCriteriaList([Progress(rows, self, tell)]),
        )
        if not all(row.done for row in rows):
            raise RuntimeError("the model ended before its texts did")


class Progress(StoppingCriteria):
    """Hands each row its new token and says which rows are done."""

    def __init__(self, rows: list[Row], decoder: Decoder, tell: Callable[[], None]) -> None:
        self.rows = rows
        self.decoder = decoder
        self.tell = tell

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if not row.done:
                row.add(token, self.decoder.ends, self.decoder.decode)
        self.tell()
        return torch.tensor([row.done for row in self.rows], device=input_ids.device)


class Sampling(LogitsProcessor):
    """Leaves a row that samples only the token it drew, so that one greedy search serves all rows."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawing = [i for i, row in enumerate(self.rows) if row.options.temperature and not row.done]
        if drawing:
            places = torch.tensor(drawing, device=scores.device)
            tokens = draw(scores[places], [self.rows[i] for i in drawing])
            scores[places] = -torch.inf
            scores[places, tokens] = 0
        return scores


def draw(scores: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """A token for each row, hit by a number of its own between 0 and 1: the same whoever is beside it."""

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None]

    temperature = column([row.options.temperature for row in rows])
    top_p = column([row.options.top_p for row in rows])
    numbers = column([torch.rand((), generator=row.random, dtype=torch.float64).item() for row in rows])
    # The largest becomes 0 first, so that no temperature is too small to divide by.
    likely = ((scores - scores.amax(-1, keepdim=True)).double() / temperature).softmax(-1)
    if (top_p < 1).any():
        falling, order = likely.sort(descending=True)
        surplus = (falling.cumsum(-1) - falling >= top_p) & (top_p < 1)
        likely = likely.masked_fill(surplus.scatter(-1, order, surplus), 0)
    reached = likely.cumsum(-1)
    # Clamped for a model that says NaN: on a GPU, a place that there is not would break all that follows.
    return torch.searchsorted(reached, numbers * reached[:, -1:], right=True).clamp(max=scores.shape[-1] - 1)[:, 0]
