"""BENCH=gpt2: tokens/s of a client that loops over gpt2_ensemble, and of gpt2_generate.

A GPT-2 of the small one's size with random weights (speed asks no more of them), on a server of its own.
"""

from __future__ import annotations

import itertools
import statistics
import string
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.table import Table

from scripts.bench.server import command, environment, folder, server
from scripts.common.cli import out
from scripts.common.triton import Triton
from scripts.stack.generate import ask, one_by_one

CLIENTS = (1, 8)
PROMPT_TOKENS = 8
NEW_TOKENS = 32
ROUNDS = 5


def main() -> None:
    with folder() as work:
        variables = environment(work, SYSTEMS="gpt2_ensemble gpt2_generate")
        words = save_checkpoint(work / "checkpoint")
        command("models", variables | {"SYSTEMS": "gpt2_ensemble", "SOURCE": f"{work}/checkpoint"})
        with server(variables):
            rates = measure(Triton(f"http://127.0.0.1:{variables['TRITON_HTTP_PORT']}"), words)
    show(rates)


def save_checkpoint(folder: Path) -> list[str]:
    """Each of its tokens is a word with the space before it, so that every token the client gets is one it sends."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(1)
    config = transformers.GPT2Config(eos_token_id=None)  # no text ends before it is NEW_TOKENS longer
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = [" " + "".join(each) for each in itertools.islice(letters, config.vocab_size)]
    vocabulary = {word.replace(" ", "Ġ"): i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="Ġaaaa"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return words


def measure(triton: Triton, words: list[str]) -> dict[tuple[int, str], list[float]]:
    """(clients, way) -> tokens/s of each round."""
    ways: dict[str, Callable[[str], object]] = {
        "loop": lambda text: list(one_by_one(triton, "gpt2_ensemble", text, NEW_TOKENS)),
        "server": lambda text: ask(triton, "gpt2_generate", "TEXT", text, NEW_TOKENS),
    }
    texts = ["".join(words[i :: len(words) // PROMPT_TOKENS][:PROMPT_TOKENS]) for i in range(max(CLIENTS))]
    rates: dict[tuple[int, str], list[float]] = {}
    for number in range(ROUNDS + 1):  # the first is not counted
        for clients, (way, generate) in itertools.product(CLIENTS, ways.items()):
            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(generate, texts[:clients]))
            if number:
                rates.setdefault((clients, way), []).append(clients * NEW_TOKENS / (time.perf_counter() - start))
    return rates


def show(rates: dict[tuple[int, str], list[float]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("clients", "client's loop, tokens/s", "gpt2_generate, tokens/s", "times as fast"):
        table.add_column(column, justify="right")
    for clients in CLIENTS:
        loop, server = rates[clients, "loop"], rates[clients, "server"]
        ratio = statistics.median(s / c for c, s in zip(loop, server, strict=True))
        table.add_row(
            str(clients), f"{statistics.median(loop):.1f}", f"{statistics.median(server):.1f}", f"{ratio:.1f}"
        )
    out.print(table)
    out.print(
        f"medians of {ROUNDS} rounds, one after the other; prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones"
    )
