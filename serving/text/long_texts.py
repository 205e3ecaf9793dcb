"""Tokenize texts of any length: in a thread of low priority, and only the part whose tokens the model reads.

The library tokenizes a text whole and truncates it then: 3.9 MB of words take 2 to 5 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Encoding, Tokenizer

# The thread takes the CPU time that batches leave: a tenth of a core if they need all.
NICENESS = 10
HELD = 10_000  # characters: so many may hold up the other threads, for some milliseconds
_thread = threading.local()
# The first part has this many characters for each token. English has 4 to 5.
CHARACTERS = 8
GROWTH = 4  # from one part to the next
# Characters that a normalizer or a pre-tokenizer looks at together, such as those of a Korean syllable.
CONTEXT = 16
# These look no further than over a run of spaces or combining characters.
NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
    "StripAccents",
}  # fmt: skip
PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
SPACES = {r"\s+", " +", " {2,}"}  # patterns that match a run of spaces


def slow_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, initializer=_begin)


def encode(tokenizer: Tokenizer, *texts: str, add_special_tokens: bool = True) -> Encoding:
    """Tokenize a text, or a pair. In the slow thread, other threads may run meanwhile.

    `Tokenizer.encode` holds Python's lock until it ends, and `encode_batch` uses the threads of the batches.
    """
    first, second = texts[0], texts[1] if len(texts) > 1 else None
    if not hasattr(_thread, "is_slow") or sum(map(len, texts)) <= HELD:
        return tokenizer.encode(first, second, add_special_tokens=add_special_tokens)
    return asyncio.run(_encode(tokenizer, first, second, add_special_tokens))


async def _encode(tokenizer: Tokenizer, first: str, second: str | None, add_special_tokens: bool) -> Encoding:
    # It runs in threads that inherit the priority of the slow thread, which alone calls this.
    encoding: Encoding = await tokenizer.async_encode(first, second, add_special_tokens=add_special_tokens)
    return encoding


def _begin() -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    _thread.is_slow = True


class Shortener:
    """Finds the part of a text that has its first `needed` tokens, and more.

    It tokenizes growing parts. The tokens in and beside the last word of a part may differ from those of the text, and
    do not count.
    """

    def __init__(self, tokenizer: Tokenizer, needed: int) -> None:
        self.tokenizer = tokenizer
        self.needed = needed
        truncation = tokenizer.truncation or {}
        self.stride = truncation.get("stride", 0)
        self.only_second = truncation.get("strategy") == "only_second"
        self.is_exact = truncation.get("direction") != "left" and has_independent_words(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        self.margin = CONTEXT + max((len(token.content) for token in added), default=0)

    def shortened(self, text: str, limit: int | None = None) -> str | None:
        """Return a part that begins with the same tokens, or the text itself if it has no shorter one.

        Return None if more than `limit` characters would have to be tokenized.
        """
        size = CHARACTERS * self.needed
        while self.is_exact and size < len(text):
            if limit is not None and size > limit:
                return None
            if self.suffices(part := text[:size]):
                return part
            size *= GROWTH
        return text if limit is None or len(text) <= max(limit, CHARACTERS * self.needed) else None

    def suffices(self, part: str) -> bool:
        """Return whether more than the needed tokens are those of any text that begins with this part."""
        end = settled_end(part, self.margin)
        words: list[int | None] = []
        for (_, token_end), word in self.tokens(part):
            if token_end > end:
                while words and words[-1] == word:
                    words.pop()
                break
            words.append(word)
        return len(words) > self.needed

    def tokens(self, text: str) -> Iterator[tuple[tuple[int, int], int | None]]:
        """Yield the characters of each token, and the number of its word."""
        # With this strategy the library truncates no text that is alone.
        texts = ("", text) if self.only_second else (text,)
        encoding = encode(self.tokenizer, *texts, add_special_tokens=False)
        for number, piece in enumerate((encoding, *encoding.overflowing)):
            first = self.stride if number else 0
            yield from zip(piece.offsets[first:], piece.word_ids[first:], strict=True)


def has_independent_words(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer cuts a text into words from its beginning, and tokenizes each for itself."""
    pre_tokenizers = list(steps(tokenizer.pre_tokenizer, "pretokenizers"))
    return (
        bool(pre_tokenizers)
        and all(is_local_normalizer(step) for step in steps(tokenizer.normalizer, "normalizers"))
        and all(is_local_pre_tokenizer(step) for step in pre_tokenizers)
        and any(step.get("use_regex", True) and step.get("split", True) for step in pre_tokenizers)
    )


def steps(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield a normalizer or a pre-tokenizer, or the steps of a sequence of them."""
    pending = [json.loads(component.__getstate__())] if component else []
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[name]
        else:
            yield step


def is_local_normalizer(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace":
        return step["type"] in NORMALIZERS
    pattern = step["pattern"]
    if "Regex" in pattern:
        return pattern["Regex"] in SPACES
    # A pattern that is deleted would join what lies before and after a run of any length.
    return 0 < len(pattern["String"]) <= CONTEXT and bool(step["content"])


def is_local_pre_tokenizer(step: dict[str, Any]) -> bool:
    if step["type"] not in PRE_TOKENIZERS:
        return False
    # Other assertions may look further, such as those that group the digits of a number from its end.
    pattern = step.get("pattern", {}).get("Regex", "").replace(r"(?!\S)", "")
    return not any(assertion in pattern for assertion in ("(?=", "(?!", "(?<"))


def settled_end(part: str, margin: int) -> int:
    """Return where the part ends without its last `margin` characters and the one before them.

    Normalizers reorder or delete runs of spaces, combining and control characters of any length, so these do not count,
    nor do characters that become such ones.
    """
    count = 0
    for position in range(len(part) - 1, -1, -1):
        count += is_kept(part[position])
        if count > margin:
            return position
    return 0


def is_kept(character: str) -> bool:
    """Return whether no normalizer deletes the character or moves it: BERT's deletes U+FFFD."""
    first = unicodedata.normalize("NFKD", character)[0]
    return character != "\ufffd" and all(unicodedata.category(one)[0] in "LNPS" for one in (character, first))
