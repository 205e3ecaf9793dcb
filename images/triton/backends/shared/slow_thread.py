"""Tokenizes texts of any length in a thread of low priority, beside the threads of the batches."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Encoding, Tokenizer

# The thread takes the CPU time that batches leave: a tenth of a core if they need all.
NICENESS = 10
HELD = 10_000  # characters: so many may hold up the other threads, for some milliseconds
_thread = threading.local()


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
