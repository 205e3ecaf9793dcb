"""Turns the texts of requests into token tensors, with one encode_batch for all requests of an execution."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Encoding, Tokenizer

from serving.text import token_ids
from serving.text.embedding_prompts import NAME, OWN, Prompts
from serving.text.long_texts import CHARACTERS, Shortener, encode, slow_thread
from serving.text.token_ids import TokenIds
from serving.triton import responses, tracing
from serving.triton.parameters import choice_parameter, int_parameter, parameter, version_file
from serving.triton.types import Array, BadRequest, Busy, ConfigError, InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import TOKEN_COUNT

# Output tensor -> the values of one text.
FIELDS: dict[str, Callable[[Encoding], Any]] = {
    "input_ids": lambda encoding: encoding.ids,
    "attention_mask": lambda encoding: encoding.attention_mask,
    # The same without the tokens of the prompt, for models that do not pool them.
    "pooling_mask": lambda encoding: encoding.attention_mask,
    # The number of the adapter that the row's prompt chooses, or 0.
    "adapter": lambda encoding: [0] * len(encoding),
    "token_type_ids": lambda encoding: encoding.type_ids,
    "special_tokens_mask": lambda encoding: encoding.special_tokens_mask,
    # The characters of the text [start, end) that the token stands for.
    "offsets": lambda encoding: encoding.offsets,
    # The characters of the word that the token is in; [-1, -1] without one.
    "word_offsets": lambda encoding: word_offsets(encoding),
    # 1 for the tokens of the second text of a pair.
    "second_text_mask": lambda encoding: [int(part == 1) for part in encoding.sequence_ids],
}
# The tokens of each row, the mask tokens by which a multi-vector model extends queries among them.
PRESENT = "present"
# With this output, a pair that is too long becomes several rows, its windows: the number of the pair of each row.
PAIR = "pair"
# The outputs with one number for each token.
NUMBERS = tuple(name for name in FIELDS if "offsets" not in name)
OUTPUTS = (*FIELDS, TOKEN_COUNT, PAIR)
TRUNCATION = ("longest_first", "only_first", "only_second", "none")
PADDING = ("none", "bucket", "max_length", "longest")
# For each token of `max_length`: a batch tokenizes texts of up to so many characters, and requests of up to so many in
# all. Longer ones would hold up the batch, so they are tokenized beside it.
TEXT_CHARACTERS, REQUEST_CHARACTERS = 32, 128
# So many of these requests may wait at a time, because their texts take memory.
SLOW_REQUESTS = 16
ENDINGS = 64  # prompts for which the end of their chats is kept


class Rows(NamedTuple):
    """One request: its texts, pairs of texts or token ids, with their prompts before them, and the prompts alone."""

    texts: list[Any]
    prompts: list[str]
    traced: tracing.Traced | None
    shortened: list[Any] | None  # the same with long texts shortened; None: that takes long
    firsts: list[str | TokenIds]  # the first text of each row, or its ids, without a prompt
    roles: tuple[str, ...] = ()  # query or document, for each text of a multi-vector model
    queries: Array | None = None  # for each text to score, the row of its query among the texts
    spans: Array | None = None  # the characters [start, end) of the spans of each text
    adapters: Array | None = None  # [rows, 1], the number of the adapter for each text
    runs: bool = True  # whether the model runs: a request may ask for the other form of its rows alone

    @property
    def characters(self) -> int:
        return sum(map(len, self.firsts))


class Tokens(NamedTuple):
    """The tensors of one request, and what they add to the counters of the same names."""

    tensors: Tensors
    texts: int
    truncated_texts: int
    tokens: int
    padding_tokens: int


class Answers:
    """Makes the outputs of a request from those of the encoder; this one returns them as they are."""

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


class GivenTokens:
    """The part of a tokenizer's Encoding that a model reads, of the token ids that a client sent."""

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids
        self.attention_mask = [1] * len(ids)
        self.type_ids = [0] * len(ids)
        self.overflowing: list[Encoding] = []

    def __len__(self) -> int:
        return len(self.ids)


# The outputs that exist for token ids. The others need the text.
OF_IDS = frozenset({"input_ids", "attention_mask", "pooling_mask", "adapter", "token_type_ids", TOKEN_COUNT})


class Tokenization:
    """The tokenizer of a model, with the parameters and the text inputs of its configuration."""

    own_input = ""  # the input that a subclass reads by itself

    def __init__(self, config: ModelConfig, args: InstanceArgs, dtypes: dict[str, Any], padding: str) -> None:
        """Load the tokenizer. `dtypes` names the outputs, each with its numpy type."""
        self.dtypes = dtypes
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json", "the model's tokenizer.json")))
        self.set_truncation(config)
        self.set_padding(config, padding)
        optional = [tensor["name"] for tensor in config["input"] if tensor.get("optional")]
        self.prompt_inputs = [name for name in (OWN, NAME) if name in optional]
        texts = [tensor for tensor in config["input"] if tensor["name"] not in (*self.prompt_inputs, self.own_input)]
        self.inputs = [tensor["name"] for tensor in texts]
        self.second_is_optional = bool(texts[-1].get("optional"))
        if len(self.inputs) > 2:
            raise ConfigError(f"a tokenizer takes one input, or two for pairs of texts, not {len(self.inputs)}")
        self.prompts = Prompts(Path(args["model_repository"]) / args["model_version"] / "prompts.json")
        self.ending = lru_cache(ENDINGS)(self.ending_of)  # of clients' prompts too
        self.special_ids = {id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        if unknown := [name for name in dtypes if name not in OUTPUTS]:
            raise ConfigError(f"unknown output '{unknown[0]}': use {', '.join(OUTPUTS)}")
        self.cuts_windows = PAIR in self.dtypes
        self.max_windows = int_parameter(config, "max_windows", config["max_batch_size"])
        # encode_batch is slower, but only it knows the position of each token in the text.
        needs_offsets = self.dtypes.keys() & {"offsets", "word_offsets"}
        self.cuts_both &= not needs_offsets
        self.shortener = Shortener(self.tokenizer, self.max_length * (self.max_windows if self.cuts_windows else 1))
        self.encode_batch = self.tokenizer.encode_batch if needs_offsets else self.tokenizer.encode_batch_fast
        self.slow_thread = slow_thread()
        self.slow_slots = threading.Semaphore(SLOW_REQUESTS)
        self.required_token = parameter(config, "exactly_one")
        required_id = self.tokenizer.token_to_id(self.required_token)
        self.required_id = -1 if required_id is None else required_id
        if self.required_token and required_id is None:
            raise ConfigError(f"parameter 'exactly_one': the tokenizer has no token '{self.required_token}'")

    def set_truncation(self, config: ModelConfig) -> None:
        """Truncate as tokenizer.json does, unless the config overrides it."""
        default = self.tokenizer.truncation or {}
        self.max_length = int_parameter(config, "max_length", default.get("max_length", 0))
        if not self.max_length:
            raise ConfigError("tokenizer.json sets no maximum length: set the parameter 'max_length'")
        self.min_length = int_parameter(config, "min_length", 0)
        self.min_width = 0
        self.cuts_end = default.get("direction") != "left"
        strategy = choice_parameter(config, "truncation", TRUNCATION, default.get("strategy", TRUNCATION[0]))
        self.cuts_both = self.cuts_longest = strategy == "longest_first"
        if strategy == "none":
            self.tokenizer.no_truncation()
        else:
            self.tokenizer.enable_truncation(**{**default, "max_length": self.max_length, "strategy": strategy})

    def set_padding(self, config: ModelConfig, padding: str) -> None:
        """Take the padding values from tokenizer.json."""
        pad = self.tokenizer.padding or {}
        self.pad_left = pad.get("direction") == "left"
        self.pad_values = dict.fromkeys(FIELDS, 0) | {
            "input_ids": pad.get("pad_id", 0),
            "token_type_ids": pad.get("pad_type_id", 0),
            "special_tokens_mask": 1,
        }
        self.tokenizer.no_padding()
        self.padding = padding
        widths = parameter(config, "buckets", "16,32,64,128,256,512").split(",")
        if not all(width.strip().isdecimal() for width in widths):
            raise ConfigError(
                f"parameter 'buckets' must be whole numbers separated by commas, not '{','.join(widths)}'"
            )
        # A text longer than every bucket is padded to max_length, so that truncated texts of any model fit.
        self.buckets = sorted(min(int(width), self.max_length) for width in widths)

    def prepare(self, request: pb_utils.InferenceRequest) -> Rows:
        traced = tracing.traced(request, time.time_ns())
        names = self.inputs
        if self.second_is_optional and not is_set(request, names[-1]):
            names = names[:-1]
        first, *others = names
        columns: list[list[Any]] = [
            token_ids.read_rows(request, first),
            *(responses.texts(request, name) for name in others),
        ]
        if len({len(column) for column in columns}) > 1:
            raise BadRequest(f"inputs {', '.join(self.inputs)} must have the same number of rows")
        before = self.chosen_prompts(request, len(columns[0]))
        for row, ids in enumerate(columns[0]):
            if isinstance(ids, TokenIds):
                self.check_ids(request, row, ids, [column[row] for column in columns[1:]])
                before[row] = ""
        texts = self.rows(before, columns)
        adapters = self.chosen_adapters(request, len(texts)) if "adapter" in self.dtypes else None
        return Rows(texts, before, traced, self.shortened(texts), columns[0], adapters=adapters)

    def rows(self, before: list[str], columns: list[list[Any]]) -> list[Any]:
        """Return the text or the pair of texts of each row, with its prompt. Token ids stay as they are."""
        return [
            row[0] if isinstance(row[0], TokenIds) else self.row(prompt, *row)
            for prompt, *row in zip(before, *columns, strict=True)
        ]

    def row(self, prompt: str, first: str, second: str | None = None) -> Any:
        if chat := self.prompts.chat:
            return chat.text(self.inputs[-1], prompt, first, *([] if second is None else [second]))
        # Treat an empty optional text as missing, as transformers does.
        is_alone = second is None or (self.second_is_optional and not second)
        return prompt + first if is_alone else (prompt + first, second)

    def check_ids(self, request: pb_utils.InferenceRequest, row: int, ids: TokenIds, others: list[str]) -> None:
        """Raise BadRequest if a row cannot be token ids, or has unknown ones."""
        name = self.inputs[0]
        if any(others) or not (self.second_is_optional or len(self.inputs) == 1):
            raise BadRequest(f"input '{name}': row {row} is token ids, and pairs must be texts", name)
        if not OF_IDS.issuperset(self.dtypes):
            raise BadRequest(f"input '{name}': row {row} is token ids, and this model's answers are about texts", name)
        if any(is_set(request, prompt) for prompt in self.prompt_inputs):
            raise BadRequest(f"input '{name}': row {row} is token ids, before which no prompt is possible", name)
        token_ids.check_ids(ids, self.vocabulary, name, row)

    @cached_property
    def vocabulary(self) -> int:
        """Return the first id that the tokenizer has no token for, nor for any after it."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def tokenized(self, rows: Rows) -> Array:
        """Return the first text of each row as all its token ids, without its prompt and a truncation; ids as text."""
        return token_ids.tokenized(rows.firsts, self.all_tokens, self.decode, self.max_length).reshape(-1, 1)

    def all_tokens(self, text: str, special: bool) -> token_ids.EncodedText:
        """Return the tokens of a text of any length, with the ids of the special ones around it or without."""
        parts = self.parts(text)
        if self.tokenizer.truncation and self.tokenizer.truncation["direction"] == "left":
            parts.reverse()
        own = [id for part in parts for id in part.ids]
        offsets = [place for part in parts for place in part.offsets]
        if not special:
            return own, offsets
        mask = (few := encode(self.tokenizer, "a")).special_tokens_mask
        before, after = mask.index(0), mask[::-1].index(0)
        return [*few.ids[:before], *own, *few.ids[len(few) - after :]], offsets

    def decode(self, ids: TokenIds, skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def shortened(self, rows: list[Any]) -> list[Any] | None:
        """Shorten the texts of one request. Return None if it takes long to find out where, or to tokenize them."""
        left = REQUEST_CHARACTERS * self.max_length
        if all(isinstance(row, str) for row in rows):
            lengths = [*map(len, rows)]
            if max(lengths, default=0) <= CHARACTERS * self.shortener.needed and sum(lengths) <= left:
                return rows
        shortened = []
        for row in rows:
            short = self.shortened_row(row, TEXT_CHARACTERS * self.max_length)
            if short is None:
                return None
            shortened.append(short)
            left -= sum(map(len, short)) if isinstance(short, tuple) else len(short)
            if left < 0:
                return None
        return shortened

    def shortened_row(self, row: Any, limit: int | None = None) -> Any:
        if isinstance(row, TokenIds):
            return row
        if not isinstance(row, tuple):
            return self.shortener.shortened(row, limit)
        if self.cuts_longest and self.both_are_long(row):
            # Both may be truncated. Which of them keeps a token more depends on the number of all tokens.
            return row if limit is None or sum(map(len, row)) <= limit else None
        texts = tuple(self.shortener.shortened(text, limit) for text in row)
        return None if None in texts else texts

    def both_are_long(self, pair: tuple[str, str]) -> bool:
        """Return whether each text of a pair of which one is shortened may have more tokens than fit.

        A character may become many: NFKC makes 18 of U+FDFA.
        """
        shorter, longer = sorted(pair, key=len)
        if len(longer) <= CHARACTERS * self.shortener.needed:
            return False
        is_small = len(shorter.encode()) <= self.shortener.needed
        return not is_small or bool(encode(self.tokenizer, shorter, add_special_tokens=False).overflowing)

    def chosen_prompts(self, request: pb_utils.InferenceRequest, count: int) -> list[str]:
        """Return the prompt of each text. Prefer the client's own to a name, like sentence-transformers."""
        name = next((name for name in self.prompt_inputs if is_set(request, name)), None)
        if not name:
            return [self.prompts.default] * count
        values = row_texts(request, name, count)
        return values if name == OWN else self.prompts.named(values)

    def chosen_names(self, request: pb_utils.InferenceRequest, count: int) -> list[str]:
        """Return the name of each text's prompt, or "" if the request sets none."""
        is_named = NAME in self.prompt_inputs and is_set(request, NAME)
        return row_texts(request, NAME, count) if is_named else [""] * count

    def chosen_adapters(self, request: pb_utils.InferenceRequest, count: int) -> Array:
        """Return the adapter of each text: that of its prompt's name, also beside a prompt of the client's own."""
        return np.array(self.prompts.adapters(self.chosen_names(request, count)), int).reshape(-1, 1)

    def run(self, jobs: list[Rows]) -> list[Tokens]:
        """Tokenize the texts of all requests at once. Raise BadRequest if one of them is wrong."""
        start_ns = time.time_ns()
        encodings = self.encodings(jobs)
        self.check_lengths(encodings)
        if self.required_token:
            runs = (rows.runs for rows in jobs for _ in rows.texts)
            self.check_required_token([*itertools.compress(encodings, runs)])
        counts = [len(rows.texts) for rows in jobs]
        ends = itertools.accumulate(counts)
        requests = [encodings[end - count : end] for count, end in zip(counts, ends, strict=True)]
        pairs: list[Tensors] = [{} for _ in jobs]
        if self.cuts_windows:
            pairs = [*map(self.pairs, requests)]
            requests = [[window for first in request for window in (first, *first.overflowing)] for request in requests]
        lengths = [len(encoding) for request in requests for encoding in request]
        longest = max(lengths, default=0)
        outputs = [own | more for own, more in zip(self.padded(requests, longest), pairs, strict=True)]
        for rows, request, tensors in zip(jobs, requests, outputs, strict=True):
            self.complete(rows, request, tensors)
        if tracing.sender:
            tokens = {
                rows.traced: sum(map(len, request)) for rows, request in zip(jobs, requests, strict=True) if rows.traced
            }
            attributes = {"texts": len(encodings)}
            tracing.sender.add(tracing.Step("tokenize", start_ns, time.time_ns(), tokens, tokens, attributes))
        return [
            Tokens(
                tensors,
                len(rows.texts),
                0 if self.cuts_windows else sum(bool(encoding.overflowing) for encoding in request),
                own := sum(map(len, request)),
                len(request) * self.width(request, longest) - own,
            )
            for rows, request, tensors in zip(jobs, requests, outputs, strict=True)
        ]

    def encodings(self, jobs: list[Rows]) -> list[Encoding]:
        if any(rows.shortened is None for rows in jobs):
            return self.encode_slowly([row for rows in jobs for row in rows.texts])
        return self.encode([row for rows in jobs for row in rows.shortened or ()])

    def complete(self, rows: Rows, encodings: list[Encoding], tensors: Tensors) -> None:
        """Add a request's prompts, its adapters and the ends of its chats to its tensors."""
        if "pooling_mask" in self.dtypes:
            self.exclude_prompts(tensors["pooling_mask"], rows.prompts)
        if rows.adapters is not None:
            tensors["adapter"][:] = rows.adapters
        if self.prompts.chat and self.cuts_end:
            self.restore_endings(tensors["input_ids"], encodings, rows.prompts)

    def exclude_prompts(self, mask: Array, before: list[str]) -> None:
        """Clear as many tokens of each row as the prompt before it has."""
        lengths = {prompt: self.prompt_length(prompt) for prompt in set(before)}
        mask *= np.cumsum(mask, axis=1) > np.array([lengths[prompt] for prompt in before], int)[:, None]

    def prompt_length(self, prompt: str) -> int:
        """Count as sentence-transformers does: without the special token that ends a text."""
        ids = encode(self.tokenizer, self.shortener.shortened(prompt) or prompt).ids if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in self.special_ids)

    def restore_endings(self, ids: Array, encodings: list[Any], before: list[str]) -> None:
        """Put the end of the chat back where truncation removed it: models read their answer after it."""
        for row, (encoding, prompt) in enumerate(zip(encodings, before, strict=True)):
            if len(encoding) == self.max_length and not isinstance(encoding, GivenTokens):
                end = ids.shape[1] if self.pad_left else self.max_length
                ending = self.ending(prompt)[-self.max_length :]
                ids[row, end - len(ending) : end] = ending

    def ending_of(self, prompt: str) -> list[int]:
        """Return the tokens with which every chat with this prompt ends, found as sentence-transformers does."""
        assert self.prompts.chat
        chats = [self.prompts.chat.text(OWN, prompt, *[text] * len(self.inputs)) for text in ("0", "1 2 3 4")]
        first, second = (
            [id for part in (encoding, *encoding.overflowing) for id in part.ids]
            for encoding in (encode(self.tokenizer, chat) for chat in chats)
        )
        same = [one == other for one, other in zip(reversed(first), reversed(second), strict=False)]
        count = len(list(itertools.takewhile(bool, same)))
        return first[len(first) - count :] if 0 < count < len(same) else []

    def beside_batches(self, run: Callable[[responses.Response], None]) -> responses.Later:
        """Return what runs a long request in the thread for them. `run` sends the response, or raises its error."""

        def answer(response: responses.Response) -> None:
            try:
                run(response)
            except Exception as error:
                response.send(error)
            finally:
                self.slow_slots.release()

        def begin(response: responses.Response) -> None:
            if self.slow_slots.acquire(blocking=False):
                self.slow_thread.submit(answer, response)
            else:
                response.send(Busy(f"{SLOW_REQUESTS} texts that take long to tokenize wait already: try again later"))

        return responses.Later(begin)

    def encode_slowly(self, rows: list[Any]) -> list[Encoding]:
        """Tokenize texts of any length in this thread, one by one: encode_batch uses the threads of the batches."""
        return [encoding for row in rows for encoding in self.encode([self.shortened_row(row)], self.encode_one)]

    def encode_one(self, rows: list[Any]) -> list[Encoding]:
        return [encode(self.tokenizer, *row if isinstance(row, tuple) else (row,)) for row in rows]

    def encode(self, rows: list[Any], encode: Callable[[list[Any]], list[Any]] | None = None) -> list[Any]:
        if self.cuts_both:
            rows = [self.cut(row) if isinstance(row, tuple) else row for row in rows]
        if any(isinstance(row, TokenIds) for row in rows):
            texts = iter(self.encode([row for row in rows if not isinstance(row, TokenIds)], encode))
            return [GivenTokens(row) if isinstance(row, TokenIds) else next(texts) for row in rows]
        try:
            return (encode or self.encode_batch)(rows)
        except BaseException as error:  # tokenizers' exceptions have no class of their own, or are Rust's panics
            if "Truncation error" not in str(error) and "`stride` must be" not in str(error):
                raise
            first, last = self.inputs[0], self.inputs[-1]
            raise BadRequest(f"input '{first}' leaves no room for '{last}': shorten it", first, last) from None

    def cut(self, pair: tuple[str, str]) -> tuple[str, str]:
        """Shorten texts that truncation shortens anyway, to a few times what it leaves of them.

        tokenizers joins each part that it cuts from one text with each part of the other: of two texts of 20 kB it
        makes 276,077 encodings in 11 GB.
        """
        if min(len(text.encode()) for text in pair) <= self.max_length // 2:  # bytes, at least as many as tokens
            return pair
        first, second = (self.parts(text) for text in pair)
        # The longer text stays the longer one, which may keep one token more.
        is_longer = sum(map(len, first)) > sum(map(len, second))
        return self.kept(pair[0], first, 2 + is_longer), self.kept(pair[1], second, 3 - is_longer)

    def parts(self, text: str) -> list[Encoding]:
        """Return the tokens of a text in parts of max_length tokens, that which truncation keeps first."""
        encoding = encode(self.tokenizer, text, add_special_tokens=False)
        return [encoding, *encoding.overflowing]

    def kept(self, text: str, parts: list[Encoding], count: int) -> str:
        """Return the side of a text that its first `count` parts cover. The cut may change the tokens beside it."""
        if len(parts) <= count:
            return text
        offsets = parts[count - 1].offsets
        truncation = self.tokenizer.truncation or {}
        return text[offsets[0][0] :] if truncation["direction"] == "left" else text[: offsets[-1][1]]

    def pairs(self, encodings: list[Encoding]) -> Tensors:
        """Return the output that maps windows to the pairs of a request."""
        windows = [1 + len(encoding.overflowing) for encoding in encodings]
        if sum(windows) > self.max_windows:
            raise BadRequest(
                f"input '{self.inputs[-1]}': the request has more than {self.max_windows} windows of "
                f"{self.max_length} tokens: send fewer or shorter texts",
                self.inputs[-1],
            )
        return {PAIR: np.repeat(np.arange(len(encodings)), windows).reshape(-1, 1)}

    def check_lengths(self, encodings: list[Encoding]) -> None:
        for row, encoding in enumerate(encodings):
            if not self.min_length <= len(encoding) <= self.max_length:
                # A text that is too long may be shortened, to any number of tokens above the maximum.
                count = len(encoding) if len(encoding) <= self.max_length else f"more than {self.max_length}"
                raise BadRequest(
                    f"input '{self.inputs[0]}': text {row} has {count} tokens; "
                    f"it must have {self.min_length} to {self.max_length}",
                    self.inputs[0],
                )

    def check_required_token(self, encodings: list[Encoding]) -> None:
        """Check after truncation, which may have removed the token."""
        for row, encoding in enumerate(encodings):
            count = encoding.ids.count(self.required_id)
            if count != 1:
                raise BadRequest(
                    f"input '{self.inputs[0]}': each text must have {self.required_token} exactly once, within its "
                    f"first {self.max_length} tokens; text {row} has it {count} times",
                    self.inputs[0],
                )

    def padded(self, requests: list[list[Encoding]], longest: int) -> list[Tensors]:
        """Return the rows of each request as tensors. `longest`: the longest row of the execution."""
        encodings = [encoding for request in requests for encoding in request]
        # One array for the tokens of all texts: NumPy's time for a small array is longer than that for its numbers.
        values = {
            name: np.array(list(itertools.chain.from_iterable(map(FIELDS[name], encodings))), dtype)
            for name, dtype in self.dtypes.items()
            if name in FIELDS
        }
        tensors, first = [], 0
        for request in requests:
            lengths = np.fromiter(map(len, request), np.int64, len(request))
            end, width = first + int(lengths.sum()), self.width(request, longest)
            rows = {name: self.rectangle(name, array[first:end], lengths, width) for name, array in values.items()}
            if TOKEN_COUNT in self.dtypes:
                rows[TOKEN_COUNT] = lengths[:, None].astype(self.dtypes[TOKEN_COUNT])
            tensors.append(rows)
            first = end
        return tensors

    def rectangle(self, name: str, values: Array, lengths: Array, width: int) -> Array:
        """Return the values of the tokens of consecutive texts as rows of this width."""
        shape = (len(lengths), width, *((2,) if "offsets" in name else ()))
        if len(values) == len(lengths) * width:
            return values.reshape(shape)
        cells = np.arange(width) < lengths[:, None]
        rows = np.full(shape, self.pad_values[name], values.dtype)
        rows[cells[:, ::-1] if self.pad_left else cells] = values.reshape(-1, *shape[2:])
        return rows

    def width(self, encodings: list[Encoding], longest: int) -> int:
        """Return how many tokens a request's rows have with their padding."""
        own = max(self.min_width, *map(len, encodings), 0)
        if self.padding == "max_length":
            return self.max_length
        if self.padding == "longest":
            return longest
        if self.padding == "bucket":
            return min((bucket for bucket in self.buckets if bucket >= own), default=self.max_length)
        return own


def row_texts(request: pb_utils.InferenceRequest, name: str, count: int) -> list[str]:
    """Return an input with a value for each text of a request. Raise BadRequest if it has another number of rows."""
    values = responses.texts(request, name)
    if len(values) != count:
        raise BadRequest(f"input '{name}' must have a row for each text: {count}, not {len(values)}", name)
    return values


def is_set(request: pb_utils.InferenceRequest, name: str) -> bool:
    return pb_utils.get_input_tensor_by_name(request, name) is not None


def word_offsets(encoding: Encoding) -> list[tuple[int, int]]:
    """Return the characters of each token's word."""
    words = list(zip(encoding.word_ids, encoding.sequence_ids, strict=True))
    offsets = {
        (word, text): (-1, -1) if word is None or text is None else encoding.word_to_chars(word, text) or (-1, -1)
        for word, text in set(words)
    }
    return [offsets[word] for word in words]
