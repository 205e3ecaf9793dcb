"""Long texts: they are shortened, with the truncated tokens of the whole text, and tokenized beside other threads."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Iterator

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serving.text.long_texts import GROWTH, Shortener, encode, slow_thread
from triton_transformers.corpus import MIXED

MAX_LENGTH = 8
PIECES = [
    " ", "  ", " " * 150, "\n\n\t", "\u00a0", "hello", "World's", "don't", "x" * 300, "1234567", "٣٤", "é", "e\u0301",
    "e" + "\u0301\u0327" * 60, "\u0301" * 9, "ﬁ", "漢字", "ᄒ\u1161ᆫ", "한", "🦜", "👩\u200d🚀",
    "🇩🇪🇫🇷", "\u200b", "\x00",
    "\x07" * 40, "[SEP]", "[SEP", "SEP]", "[MASK]", "<x y>", "ab" * 50, ".", "...", "--", "\ufffd", "ß", "İ", "▁", "``",
]  # fmt: skip
EDGE = MAX_LENGTH * 8 * GROWTH  # characters of the second part


def unigram() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Replace("``", '"'), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=2000, unk_token="[UNK]", special_tokens=["[UNK]"])


def wordpiece() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"])


def byte_level() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)


def split_digits() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer, trainer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    pre = [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre)
    return tokenizer, trainer


def one_word() -> tuple[Tokenizer, trainers.Trainer]:
    """Return the kind of Gemma, which joins words: no cut is known to be safe."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], max_token_length=8)


def trained(kind: Callable[[], tuple[Tokenizer, trainers.Trainer]], direction: str = "right") -> Tokenizer:
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator(MIXED.texts[:200], trainer)
    tokenizer.add_special_tokens(["[SEP]", AddedToken("[MASK]", lstrip=True, rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<x y>", normalized=True), AddedToken("ab", single_word=True)])
    tokenizer.enable_truncation(MAX_LENGTH, direction=direction)
    return tokenizer


def nasty_texts(count: int) -> Iterator[str]:
    """Yield texts in which any piece may lie at the end of a part."""
    choice = random.Random(7)
    for _ in range(count):
        few = choice.sample(PIECES, 4)
        text = "".join(choice.choice(few if choice.random() < 0.7 else PIECES) for _ in range(choice.randint(5, 500)))
        yield text
        for piece in few:
            start = EDGE - choice.randint(0, len(piece) + 1)
            yield text[:start] + " word" * max(0, (start - len(text)) // 5) + piece * 3 + text


@pytest.mark.parametrize("kind", [wordpiece, byte_level, split_digits, unigram])
def test_truncated_tokens_are_those_of_the_whole_text(kind):
    tokenizer = trained(kind)
    shortener = Shortener(tokenizer, MAX_LENGTH)
    shortened = 0
    for text in nasty_texts(20):
        short = shortener.shortened(text)
        assert short is not None
        cut, whole = tokenizer.encode(short), tokenizer.encode(text)
        assert (cut.ids, cut.offsets, cut.word_ids) == (whole.ids, whole.offsets, whole.word_ids), (text[:EDGE], short)
        assert bool(cut.overflowing) == bool(whole.overflowing)
        shortened += len(short) < len(text)
    assert shortened > 30


def word_pieces(normalizer: normalizers.Normalizer) -> Tokenizer:
    """Return a tokenizer that has a whole word and the pieces of its beginning."""
    pieces = ["[UNK]", "a", "em", "##b", "##ed", "##d", "embedding"]
    tokenizer = Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(MAX_LENGTH)
    return tokenizer


@pytest.mark.parametrize(
    ("normalizer", "deleted"),
    [
        (normalizers.BertNormalizer(), "\ufffd"),
        (normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]), "\uff9e"),
        (normalizers.Replace("-", ""), "-"),
    ],
)
def test_word_goes_on_after_a_run_of_deleted_characters(normalizer, deleted):
    tokenizer = word_pieces(normalizer)
    text = "a " * (MAX_LENGTH - 1) + "embed" + deleted * 1000 + "ding" + " a" * 100
    short = Shortener(tokenizer, MAX_LENGTH).shortened(text)
    assert short is not None
    assert tokenizer.encode(short).tokens == tokenizer.encode(text).tokens == ["a"] * 7 + ["embedding"]


@pytest.mark.parametrize("digits", [1000, 1001, 1002])
def test_digits_that_are_grouped_from_the_end_of_a_number_stay_whole(digits):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "1": 1, "11": 2, "111": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*(?!\d))"), "isolated")
    tokenizer.enable_truncation(MAX_LENGTH)
    text = "1" * digits + " a" * 100
    assert Shortener(tokenizer, MAX_LENGTH).shortened(text) == text


@pytest.mark.parametrize(("kind", "direction"), [(one_word, "right"), (wordpiece, "left")])
def test_text_without_known_bound_stays_whole(kind, direction):
    shortener = Shortener(trained(kind, direction), MAX_LENGTH)
    text = "many words " * 1000
    assert shortener.shortened(text) == text
    assert shortener.shortened(text, limit=1000) is None


def test_longer_text_of_a_pair_stays_the_longer_one(pb_utils, tmp_path):
    """It keeps the token that is left, even if few bytes of the other become many tokens."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"b+|."), "isolated")
    tokenizer.enable_truncation(7)
    (tmp_path / "1").mkdir()
    tokenizer.save(str(tmp_path / "1/tokenizer.json"))
    config = {"input": [{"name": name, "data_type": "TYPE_STRING"} for name in ("a", "b")], "max_batch_size": 8}
    args = {"model_repository": str(tmp_path), "model_version": "1"}
    tokenization = importlib.import_module("serving.text.tokenization").Tokenization(
        config, args, {"input_ids": int}, "none"
    )
    pair = ("\ufdfa" * 2, ("b" * 20 + " ") * 1000)
    whole, short = (tokenizer.encode(*texts) for texts in (pair, tokenization.shortened_row(pair, limit=None)))
    assert short.type_ids == whole.type_ids == [0] * 3 + [1] * 4


@pytest.mark.parametrize("letter", ["a", " ", "\u0301", "🦜"])
def test_text_that_needs_more_than_the_limit_is_left_alone(letter):
    shortener = Shortener(trained(wordpiece), MAX_LENGTH)
    assert shortener.shortened(letter * 5000, limit=1000) is None
    assert shortener.shortened(letter * 5000) == letter * 5000
    assert shortener.shortened("many words " * 1000, limit=1000) == ("many words " * 1000)[: MAX_LENGTH * 8]


def test_windows_of_second_texts_are_counted_with_their_overlap():
    """With the strategy of question answering, the library truncates no text that is alone."""
    tokenizer = trained(wordpiece)
    tokenizer.enable_truncation(MAX_LENGTH, stride=3, strategy="only_second")
    text = MIXED.texts[0] + " many words" * 300
    short = Shortener(tokenizer, 4 * MAX_LENGTH).shortened(text)
    assert short is not None and len(short) < len(text)
    whole, cut = tokenizer.encode("why", text), tokenizer.encode("why", short)
    windows = [[window.ids for window in (encoding, *encoding.overflowing)] for encoding in (whole, cut)]
    assert windows[0][:4] == windows[1][:4]
    assert len(windows[1]) > 4


# --- the slow thread --------------------------------------------------------------------------------------------------


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
