"""Compare the ways to generate with GPT-2: a client that loops, and the loop in the server; with random weights."""

from __future__ import annotations

import itertools
import statistics
import string
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.server import command, environment, folder, server
from scripts.stack.generate import ask, one_by_one
from triton_transformers.cli import out, print_table
from triton_transformers.triton import Triton

PROMPT_TOKENS = 8
NEW_TOKENS = 32  # of each text: none ends by itself

# (clients, way) -> tokens per second of each round.
Rates = dict[tuple[int, str], list[float]]


def client_or_server_loop() -> None:
    """Compare a client that loops over gpt2_ensemble, one token per call, with the loop in gpt2_generate."""
    ways, rounds = ("loop in the client", "loop in the server"), 5
    with folder() as work:
        variables = environment(work, SYSTEMS="gpt2_ensemble gpt2_generate")
        words = save_checkpoint(work / "checkpoint")
        command("models", variables | {"SYSTEMS": "gpt2_ensemble", "SOURCE": f"{work}/checkpoint"})
        prompts = ["".join(words[i :: len(words) // PROMPT_TOKENS][:PROMPT_TOKENS]) for i in range(8)]
        with server(variables):
            triton = Triton(f"http://127.0.0.1:{variables['TRITON_HTTP_PORT']}")
            generate: dict[str, Callable[[str], object]] = {
                ways[0]: lambda text: list(one_by_one(triton, "gpt2_ensemble", text, NEW_TOKENS)),
                ways[1]: lambda text: ask(triton, "gpt2_generate", "TEXT", text, NEW_TOKENS),
            }
            rates: Rates = {}
            for number in range(rounds + 1):  # the first round warms up
                for clients, way in itertools.product((1, 8), ways):
                    rate = tokens_per_second(generate[way], prompts[:clients], clients)
                    if number:
                        rates.setdefault((clients, way), []).append(rate)
    show(
        rates,
        ways,
        f"new tokens per second: median (minimum to maximum) of {rounds} rounds; prompts of {PROMPT_TOKENS} tokens, "
        f"{NEW_TOKENS} new ones",
    )


def save_checkpoint(folder: Path) -> list[str]:
    """Save the model and return its words.

    Each token is a word with the space before it, so every token that the client gets is one that it sends.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(1)
    config = transformers.GPT2Config(eos_token_id=None)  # no text ends before it is NEW_TOKENS longer
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = [" " + "".join(letter) for letter in itertools.islice(letters, config.vocab_size)]
    vocabulary = {word.replace(" ", "Ġ"): i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="Ġaaaa"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return words


def tokens_per_second(generate: Callable[[str], object], prompts: list[str], clients: int) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(generate, prompts))
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - start)


def show(rates: Rates, ways: tuple[str, str], caption: str) -> None:
    rows = []
    for clients in sorted({clients for clients, _ in rates}):
        slow, fast = (rates[clients, way] for way in ways)
        ratio = statistics.median(f / s for s, f in zip(slow, fast, strict=True))
        rows.append([str(clients), spread(slow), spread(fast), f"{ratio:.2f}"])
    print_table(("clients", *ways, "ratio"), rows)
    out.print(caption)


def spread(measured: list[float], digits: int = 1) -> str:
    return f"{statistics.median(measured):.{digits}f} ({min(measured):.{digits}f} to {max(measured):.{digits}f})"
