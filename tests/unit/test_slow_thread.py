"""The thread for long texts: other threads run while it tokenizes."""

from __future__ import annotations

import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shared.long_texts import encode, slow_thread


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer):
    turns = 0
    with slow_thread() as thread:
        future = thread.submit(encode, tokenizer, "one two " * 200_000)
        while not future.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 20
    assert len(future.result()) == 400_000


@pytest.mark.parametrize("texts", [("one " * 9000,), ("one", "two " * 9000)])
def test_tokens_are_those_of_any_thread(tokenizer, texts):
    tokenizer.enable_truncation(8, strategy="longest_first")
    with slow_thread() as thread:
        slow = thread.submit(encode, tokenizer, *texts, add_special_tokens=False).result()
    quick = encode(tokenizer, *texts, add_special_tokens=False)
    assert (slow.ids, slow.offsets, slow.sequence_ids) == (quick.ids, quick.offsets, quick.sequence_ids)
    assert len(slow.overflowing) == len(quick.overflowing)


def test_error_of_the_tokenizer_keeps_its_message(tokenizer):
    tokenizer.enable_truncation(3, strategy="only_second")
    with slow_thread() as thread:
        future = thread.submit(encode, tokenizer, "one " * 9000, "two")
    with pytest.raises(Exception, match="Truncation error"):
        future.result()
