"""Continues texts together with one causal language model; each row of the batch samples and stops on its own.

It knows nothing of Triton's requests, so tests run it without a server.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, starmap
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from serving.engines.lean_transformers import transformers
from serving.engines.packing import RunCost, cheapest_cut
from serving.engines.positions import context_of
from serving.engines.pretrained import rotary_context
from serving.generation.row import CHUNK, Logprobs, Options, Owner, Row, logprobs_of
from serving.structure.checks import DEAD_END, token_bytes, vocabulary
from serving.structure.worker import new_compiler, xgrammar
from serving.text.chat_template import ChatTemplate
from serving.triton.types import BadRequest

# Lengths of the prompts that are timed, in tokens.
SHORT, LONG = 8, 64
# Cost for each step to read a token of the prompt again, padding or not, relative to its first cost: a fiftieth on a
# CPU (GPT-2: 2.3 ms and 0.05 ms).
READ_AGAIN = 0.02
# The text whose tokens are the prompts of a trial, and the tokens that it adds.
SAMPLE = "The ferry leaves the harbour at nine, and the island has no shop. "
TRIAL = 4
# Bytes of the scores of a prompt's tokens, which this engine has all at once.
MAX_SCORES = 2 << 30


class Decoder:
    """A model with Hugging Face's generate(), and its tokenizer, with the methods of TextTokenizer."""

    padding_side = "left"
    # The rows that may share a batch; in transformers, padding changes the texts of some models, and other rows do.
    shares: Literal["all", "equally long", "none"] = "all"

    def __init__(self, model: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        ends = model.generation_config.eos_token_id
        self.end_tokens = set(ends if isinstance(ends, list) else [ends]) - {None}
        starts = (tokenizer.bos_token_id, model.generation_config.bos_token_id, tokenizer.eos_token_id)
        # Drop the checkpoint's settings: a penalty on repetition would count a row's padding, which depends on the rest
        # of the batch. Each row ends by itself, because it may ignore end tokens.
        model.generation_config = transformers.GenerationConfig()
        # A loss of training, which fails for a batch with a cache. Some files ask for it.
        model.config.get_text_config(decoder=True).output_router_logits = False
        self.vocabulary, self.context, self.shared_context, self.device = self.traits()
        self.padding = next(
            token
            for token in (tokenizer.pad_token_id, *sorted(self.end_tokens), 0)
            if token is not None and token < self.vocabulary
        )
        # The first call also sets up the tokenizer; after it, threads may share the tokenizer.
        self.start: list[int] = self.tokenizer("").input_ids or [token for token in starts if token is not None][:1]
        self.chat_template = ChatTemplate.of_tokenizer(tokenizer)
        self.measure()

    def traits(self) -> tuple[int, int | None, int | None, torch.device]:
        """Return the vocabulary, the context, the length up to which a row does not change others, and the device."""
        config = self.model.config.get_text_config(decoder=True)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        return vocabulary, context_of(self.model, config), rotary_context(config), self.model.device

    def encode(self, prompt: str, special_tokens: bool = True) -> list[int]:
        if not prompt:
            return self.start
        tokens: list[int] = self.tokenizer(prompt, add_special_tokens=special_tokens).input_ids
        return tokens

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def token_bytes(self) -> list[bytes]:
        if not isinstance(backend := getattr(self.tokenizer, "backend_tokenizer", None), Tokenizer):
            raise BadRequest("option 'structured_outputs': this model has no tokenizer.json", "structured_outputs")
        return vocabulary(backend, self.vocabulary)

    def bytes_of(self, token: int) -> list[int] | None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return token_bytes(backend, token) if isinstance(backend, Tokenizer) else None

    @functools.cached_property
    def compiler(self) -> Any:
        return new_compiler(xgrammar(), self.token_bytes(), sorted(self.end_tokens))

    def measure(self) -> None:
        """Measure the cost of a prompt token and of a step of the loop, which batches() weighs against each other."""
        self.seconds(SHORT, 1)  # the first run also sets up the model
        first = self.seconds(SHORT, 1)
        self.token_cost = max(0.0, self.seconds(LONG, 1) - first) / (LONG - SHORT)
        self.step_cost = max(self.token_cost, (self.seconds(SHORT, 3) - first) / 2)
        known = [token for token in self.tokenizer(SAMPLE).input_ids if token < self.vocabulary]
        prompt = (known * LONG)[: LONG // 2]
        if not self.keeps_scores(prompt[:SHORT], prompt):
            self.shares = "equally long" if self.keeps_scores(prompt, prompt[::-1]) else "none"

    def keeps_scores(self, *prompts: list[int]) -> bool:
        """Return whether the model gives these prompts the same scores together as alone, but for rounding."""
        alone = [self.scores(prompt)[:, 0] for prompt in prompts]
        try:
            together = self.scores(*prompts)
        except Exception:  # code of a checkpoint's own may raise anything for padding or for a second row
            return False
        return all(starmap(has_same_scores, zip(alone, together.unbind(1), strict=True)))

    def scores(self, *prompts: list[int]) -> torch.Tensor:
        """Return the scores of the tokens at each step, of each prompt."""
        tokens, mask = self.padded(prompts)
        options = {"max_new_tokens": TRIAL, "do_sample": False, "num_beams": 1, "pad_token_id": self.padding}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        return torch.stack(self.model.generate(tokens, attention_mask=mask, **options).logits)

    def seconds(self, length: int, new_tokens: int) -> float:
        """Time one prompt: the best of three runs, of fewer if they take more than a second."""
        tokens = torch.full((1, length), self.padding, device=self.device)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        times: list[float] = []
        while len(times) < 3 and sum(times) < 1:
            begin = time.perf_counter()
            self.model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=self.padding, **options)
            times.append(time.perf_counter() - begin)
        return min(times)

    def batches(self, rows: list[Row[Owner]]) -> list[list[Row[Owner]]]:
        """Split the rows into the cheapest batches: one more batch can cost less than padding to one long prompt."""
        if self.shares == "none":
            return [[row] for row in rows]
        rows = sorted(rows, key=length)
        if self.shares == "equally long":
            return [batch for _, equal in groupby(rows, length) for batch in self.within_context([*equal])]
        steps = max((row.options.max_new_tokens for row in rows), default=0)
        cost = RunCost(self.step_cost * steps, self.token_cost * (1 + READ_AGAIN * steps))
        cuts = cheapest_cut(np.array([*map(length, rows)]), cost)
        return [batch for start, end in cuts for batch in self.within_context(rows[start:end])]

    def within_context(self, rows: list[Row[Owner]]) -> list[list[Row[Owner]]]:
        """Split the rows so that no row passes the model's context, which fails or spoils the other rows.

        A batch carries a finished row along to its end, and each token moves it one position further.
        """
        max_new_tokens = max(row.options.max_new_tokens for row in rows)
        limit = min(self.context or math.inf, self.shared_context or math.inf)
        if len(rows) == 1 or len(rows[-1].prompt_tokens) + max_new_tokens <= limit:
            return [rows]
        middle = len(rows) // 2
        return self.within_context(rows[:middle]) + self.within_context(rows[middle:])

    def generate(self, rows: list[Row[Owner]], after_token: Callable[[], None]) -> None:
        """Generate until every row is done. Call `after_token` after each token; it may set rows to done."""
        for row in rows:
            row.reset()
        tokens, mask = self.padded([row.prompt_tokens for row in rows])
        sampling = Sampling(rows, self.end_tokens, Structured(rows))
        self.model.generate(
            tokens,
            **self.images(rows, tokens.shape[1]),
            attention_mask=mask,
            max_new_tokens=max(row.options.max_new_tokens for row in rows),
            do_sample=False,
            num_beams=1,
            pad_token_id=self.padding,
            logits_processor=transformers.LogitsProcessorList([sampling]),
            stopping_criteria=transformers.StoppingCriteriaList([Progress(rows, self, sampling, after_token)]),
        )
        if not all(row.done for row in rows):
            raise RuntimeError("the model stopped before every text was done")

    def check_scores(self, prompt: list[int]) -> None:
        if (size := len(prompt) * self.vocabulary * self.model.dtype.itemsize) > MAX_SCORES:
            raise BadRequest(
                f"option 'prompt_logprobs': the scores of {len(prompt)} tokens take {size / 1e9:.1f} GB; at most "
                f"{MAX_SCORES / 1e9:.0f} are computed at once",
                "prompt_logprobs",
            )

    def prompt_logprobs(self, prompt: list[int], count: int) -> Iterator[Logprobs]:
        """Yield the logprobs of the prompt's tokens but the first, each with `count` alternatives."""
        with torch.inference_mode():
            scores = self.model(torch.tensor([prompt], device=self.device)).logits[0]
        for begin in range(0, len(prompt) - 1, CHUNK):
            tokens = prompt[begin + 1 : begin + 1 + CHUNK]
            yield from logprobs_of(scores[begin : begin + len(tokens)].float().cpu().numpy(), tokens, count)

    def padded(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row of tokens for each prompt, and the mask of those that are no padding."""
        width = max(map(len, prompts))
        tokens = torch.full((len(prompts), width), self.padding)
        mask = torch.zeros_like(tokens)
        for i, prompt in enumerate(prompts):
            start = width - len(prompt) if self.padding_side == "left" else 0
            tokens[i, start : start + len(prompt)] = torch.tensor(prompt)
            mask[i, start : start + len(prompt)] = 1
        return tokens.to(self.device), mask.to(self.device)

    def images(self, rows: list[Row[Owner]], width: int) -> dict[str, torch.Tensor]:
        """Return the model's inputs for the images of these rows; none if they are all texts."""
        if not any(row.images for row in rows):
            return {}
        from serving.vision.chat import joined

        return {
            name: values.to(self.device) for name, values in joined([row.images or {} for row in rows], width).items()
        }


def length(row: Row[Any]) -> int:
    return len(row.prompt_tokens)


def has_same_scores(expected: torch.Tensor, scores: torch.Tensor) -> bool:
    """Compare the scores of the steps of one text, up to that at which rounding chose another token."""
    tolerance = torch.finfo(scores.dtype).eps ** 0.5
    for own, other in zip(expected, scores, strict=True):
        known = own > torch.finfo(own.dtype).min  # some models exclude tokens by such scores
        if not (own - other)[known].abs().max() <= tolerance * own[known].abs().max():
            return False
        if own.argmax() != other.argmax():
            break
    return True


class Progress(transformers.StoppingCriteria):
    """Adds the new token to each row and returns which rows are done."""

    def __init__(
        self, rows: Sequence[Row[Any]], decoder: Decoder, sampling: Sampling, after_token: Callable[[], None]
    ) -> None:
        self.rows = rows
        self.decoder = decoder
        self.sampling = sampling
        self.after_token = after_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        for i, (row, token) in enumerate(zip(self.rows, input_ids[:, -1].tolist(), strict=True)):
            if not row.done:
                logprobs = self.sampling.logprobs(i, token)
                row.add(token, self.decoder.end_tokens, self.decoder.decode, logprobs, self.decoder.bytes_of)
        self.after_token()
        return torch.tensor([row.done for row in self.rows], device=input_ids.device)


class Structured:
    """Leaves rows with a structure the tokens that it allows."""

    def __init__(self, rows: Sequence[Row[Any]]) -> None:
        self.rows = rows
        self.matchers = {
            number: xgrammar().GrammarMatcher(row.options.structured_outputs)
            for number, row in enumerate(rows)
            if row.options.structured_outputs and not row.done
        }
        self.bits = torch.arange(32, dtype=torch.int32)

    def mask(self, scores: torch.Tensor) -> None:
        running = [number for number in self.matchers if not self.rows[number].done]
        if not running:
            return
        masks = torch.full((len(running), (scores.shape[-1] + 31) // 32), -1, dtype=torch.int32)
        for place, number in enumerate(running):
            if self.rows[number].new_tokens:
                self.matchers[number].accept_token(self.rows[number].tokens[-1])
            self.matchers[number].fill_next_token_bitmask(masks, place)
            if not masks[place].any():
                raise BadRequest(DEAD_END, "structured_outputs")
        allowed = (masks[..., None] >> self.bits & 1).bool().flatten(1)[:, : scores.shape[-1]].to(scores.device)
        places = torch.tensor(running, device=scores.device)
        scores[places] = scores[places].masked_fill(~allowed, torch.finfo(scores.dtype).min)


class Sampling(transformers.LogitsProcessor):
    """Changes the scores of the rows that ask for it, so that one greedy search serves all rows.

    It leaves each sampling row only the token that it drew.
    """

    def __init__(self, rows: Sequence[Row[Any]], end_tokens: Collection[int], structured: Structured) -> None:
        self.rows = rows
        self.structured = structured
        self.end_tokens = end_tokens
        # Each row has random numbers of its own, so that the rest of the batch changes nothing.
        self.generators = [torch.Generator().manual_seed(row.options.seed) for row in rows]
        self.adjusted = [i for i, row in enumerate(rows) if row.options.adjusts]
        self.reported = [i for i, row in enumerate(rows) if row.options.logprobs is not None]
        self.distributions: dict[int, torch.Tensor] = {}  # of the last step, for each row that reports logprobs

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.distributions = {i: scores[i].log_softmax(-1) for i in self.reported if not self.rows[i].done}
        for i in self.adjusted:
            if not self.rows[i].done:
                adjust(scores[i], self.rows[i], self.end_tokens)
        self.structured.mask(scores)
        sampling = [i for i, row in enumerate(self.rows) if row.options.temperature and not row.done]
        if sampling:
            places = torch.tensor(sampling, device=scores.device)
            numbers = [torch.rand((), generator=self.generators[i], dtype=torch.float64).item() for i in sampling]
            tokens = draw(scores[places], [self.rows[i].options for i in sampling], numbers)
            scores[places] = -torch.inf
            scores[places, tokens] = 0
        return scores

    def logprobs(self, i: int, token: int) -> Logprobs | None:
        """Return those of the token that the last step added to row `i`, or None if it did not ask."""
        if (distribution := self.distributions.get(i)) is None:
            return None
        top = distribution.topk(self.rows[i].options.logprobs or 0)
        return Logprobs(distribution[token].item(), [*zip(top.indices.tolist(), top.values.tolist(), strict=True)])


def adjust(scores: torch.Tensor, row: Row[Any], end_tokens: Collection[int]) -> None:
    """Change a row's scores in vLLM's order. Only the row's own tokens count, never its padding."""

    def at(tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*tokens], dtype=torch.long, device=scores.device)

    own, new = row.options, row.tokens[len(row.prompt_tokens) :]
    if len(new) < own.min_tokens:
        ends = {*end_tokens, *own.stop_token_ids}
        scores[at(token for token in ends if token < len(scores))] = -torch.inf
    if own.logit_bias:
        scores[at(own.logit_bias)] += torch.tensor([*own.logit_bias.values()], device=scores.device)
    if own.repetition_penalty != 1:
        seen = at({*row.tokens})
        factors = torch.where(scores[seen] > 0, 1 / own.repetition_penalty, own.repetition_penalty)
        scores[seen] *= factors
    if own.presence_penalty or own.frequency_penalty:
        counts = Counter(new)
        penalties = [own.presence_penalty + own.frequency_penalty * count for count in counts.values()]
        scores[at(counts)] -= torch.tensor(penalties, device=scores.device)


def draw(scores: torch.Tensor, options: Sequence[Options], numbers: Sequence[float]) -> torch.Tensor:
    """Draw a token for each row by its random number from 0 to 1."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    temperature = column([own.temperature for own in options])
    top_p = column([own.top_p for own in options])
    top_k = column([own.top_k or math.inf for own in options])
    min_p = column([own.min_p for own in options])
    # Shift the maximum to 0 first, so that no temperature is too small to divide by.
    probabilities = ((scores - scores.amax(-1, keepdim=True)).double() / temperature).softmax(-1)
    if min_p.any():
        probabilities = probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)
    if (top_p < 1).any() or top_k.isfinite().any():
        falling, order = probabilities.sort(descending=True)
        surplus = torch.arange(falling.shape[-1], device=scores.device) >= top_k
        falling = falling.masked_fill(surplus, 0)
        surplus |= (falling.cumsum(-1) - falling >= top_p * falling.sum(-1, keepdim=True)) & (top_p < 1)
        probabilities = probabilities.masked_fill(surplus.scatter(-1, order, surplus), 0)
    cumulative = probabilities.cumsum(-1)
    # Clamp for models that return NaN: on a GPU, an index out of range would break every later operation.
    tokens = torch.searchsorted(cumulative, column(numbers) * cumulative[:, -1:], right=True)
    return tokens.clamp(max=scores.shape[-1] - 1)[:, 0]
