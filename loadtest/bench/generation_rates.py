"""Continuous batching of generated text, compared with one text at a time and with transformers' generate().

The model is a Llama of 125 million parameters with random weights, and the prompts are the committed texts. Texts are
compared of the trained `chat`: of random weights, the likeliest tokens are nearly as likely as the next.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import secrets
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench.tables import in_turns, ratios, spread
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table
from triton_transformers.corpus import MIXED
from triton_transformers.triton import Triton

NEW_TOKENS = 32  # of each text: none ends by itself
CLIENTS = (1, 8, 32)
ROUNDS = 3
SYSTEM, REFERENCE, TRAINED = "story", "story_transformers", "chat"
ONE_AT_A_TIME, TOGETHER = "one at a time", "together"
# transformers computes in either, and which is faster depends on the CPU.
TRANSFORMERS = {"transformers f32": "float32", "transformers bf16": "bfloat16"}
# The columns -> the model, and its parameters beside those of its configuration.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    ONE_AT_A_TIME: (SYSTEM, {"max_batch": "1"}),
    TOGETHER: (SYSTEM, {}),
    **{way: (REFERENCE, {"dtype": dtype}) for way, dtype in TRANSFORMERS.items()},
}
UNKNOWN = "Ġ?"
LONG_PROMPT, SHORT_REQUESTS, SHORT_CLIENTS, SHORT_TOKENS = 1000, 100, 8, 16


@dataclass(frozen=True)
class Answer:
    """A streamed text, and when its pieces came, in seconds since the request."""

    text: str
    pieces: list[float]


def run() -> None:
    with folder() as work:
        save_checkpoint(work / "checkpoint")
        models = f"{SYSTEM}_stream {REFERENCE}_stream {TRAINED}_stream"
        stack = OwnStack(work, SYSTEMS=models, TRITON_ADMIN_KEY=secrets.token_urlsafe())
        source = {"SOURCE": f"{work}/checkpoint", "TASK": "text-generation"}
        for system, form in ((SYSTEM, "openvino"), (REFERENCE, "python")):
            stack.command("models", SYSTEMS=system, FORMAT=form, **source)
        stack.command("models", SYSTEMS=TRAINED)
        with stack.serving():
            show_rates(measure_rates(stack.triton))
            show_arrival(stack.triton)
            show_differences(stack.triton)
            show_fairness(stack.triton)


# --- throughput -------------------------------------------------------------------------------------------------------

# (clients, way) -> tokens per second of each round.
Rates = dict[tuple[int, str], list[float]]


def measure_rates(triton: Triton) -> Rates:
    originals = {system: triton.config(f"{system}_stream") for system, _ in WAYS.values()}
    rates: Rates = {}
    for way in in_turns(WAYS, ROUNDS, f"{CLIENTS[0]} to {CLIENTS[-1]} clients"):
        system, parameters = WAYS[way]
        config = copy.deepcopy(originals[system])
        config["parameters"] |= {name: {"string_value": value} for name, value in parameters.items()}
        triton.load(f"{system}_stream", config)
        ask(triton, system, "warm")
        for clients in CLIENTS:
            own = rates.setdefault((clients, way), [])
            texts = prompts(2 * clients, f"{len(own)} {way} {clients}")
            own.append(tokens_per_second(triton, system, texts, clients))
    triton.load(f"{SYSTEM}_stream", originals[SYSTEM])
    return rates


def prompts(count: int, mark: str) -> list[str]:
    """Return texts that no run before has sent, so that none of their tokens is in the prefix cache."""
    words = random.Random(mark)
    return [f"word{words.randrange(10_000)} word{number} {text}" for number, text in enumerate(MIXED.texts[:count])]


def tokens_per_second(triton: Triton, system: str, texts: list[str], clients: int) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda text: ask(triton, system, text, stream=False), texts))
    return len(texts) * NEW_TOKENS / (time.perf_counter() - start)


def show_rates(rates: Rates) -> None:
    rows = []
    for clients in CLIENTS:
        best = max(TRANSFORMERS, key=lambda way: statistics.median(rates[clients, way]))
        gains = [ratios(rates[clients, TOGETHER], rates[clients, way]) for way in (ONE_AT_A_TIME, best)]
        medians = (f"{statistics.median(gain):.2f}" for gain in gains)
        rows.append([str(clients), *(spread(rates[clients, way]) for way in WAYS), *medians])
    print_table(("clients", *WAYS, f"/ {ONE_AT_A_TIME}", "/ best transformers"), rows)
    out.print(
        f"new tokens per second: median (minimum to maximum) of {ROUNDS} interleaved rounds; {NEW_TOKENS} new tokens "
        f"per text; transformers: its generate(), up to 32 texts padded together"
    )


# --- the others of a batch --------------------------------------------------------------------------------------------


def show_arrival(triton: Triton) -> None:
    """Print how soon a text begins that arrives while 31 others run."""
    shares = []
    for number in range(ROUNDS):
        with ThreadPoolExecutor(32) as pool, err.status("a request that arrives while 31 run"):
            start = time.perf_counter()
            others = [pool.submit(ask, triton, SYSTEM, text) for text in prompts(31, f"others {number}")]
            while not any(other.done() for other in others) and time.perf_counter() - start < 1:
                time.sleep(0.01)
            first_piece = ask(triton, SYSTEM, prompts(41, f"late {number}")[40]).pieces[0]
            for other in others:
                other.result()
        shares.append(first_piece / (time.perf_counter() - start))
    out.print(f"a request that arrives while 31 run: time to its first token / time of all 32: {spread(shares, 2)}")


def show_differences(triton: Triton) -> None:
    """Print how many greedy texts differ from what the same prompt gets alone."""
    with err.status("the same prompts alone and together"):
        texts = prompts(32, "same")
        alone = [ask(triton, TRAINED, text).text for text in texts]
        with ThreadPoolExecutor(32) as pool:
            together = [answer.text for answer in pool.map(lambda text: ask(triton, TRAINED, text), texts)]
    out.print(f"greedy texts that differ alone and among 31 others: {sum(map(str.__ne__, alone, together))} of 32")


def show_fairness(triton: Triton) -> None:
    """Print the time between the tokens of short texts, without and beside a long prompt."""
    gaps = {}
    for beside in (False, True):
        with ThreadPoolExecutor(SHORT_CLIENTS + 1) as pool, err.status("short texts beside a long prompt"):
            words = MIXED.texts[0].split()
            long = " ".join(words[number % len(words)] for number in range(LONG_PROMPT))
            pending = [pool.submit(ask, triton, SYSTEM, long, SHORT_TOKENS)] if beside else []
            texts = [f"word{number} word{int(beside)} and so" for number in range(SHORT_REQUESTS)]
            answers = list(pool.map(lambda text: ask(triton, SYSTEM, text, SHORT_TOKENS), texts))
            for long_answer in pending:
                long_answer.result()
        times = [later - earlier for answer in answers for earlier, later in itertools.pairwise(answer.pieces)]
        gaps[beside] = statistics.median(times), max(times)
    lines = (f"{1000 * median:.0f} ms (maximum {1000 * maximum:.0f})" for median, maximum in gaps.values())
    out.print(
        f"{SHORT_REQUESTS} short texts of {SHORT_CLIENTS} clients, time per token: {next(lines)}; beside a prompt of "
        f"{LONG_PROMPT} words: {next(lines)}"
    )


# --- requests and the model -------------------------------------------------------------------------------------------


def ask(triton: Triton, system: str, prompt: str, new_tokens: int = NEW_TOKENS, stream: bool = True) -> Answer:
    """Return the answer, in one piece if `stream` is false."""
    fields = {"prompt": prompt, "max_new_tokens": new_tokens, "stream": stream, "exclude_input_in_output": True}
    body = json.dumps(fields).encode()
    start = time.perf_counter()
    text, pieces = "", []
    with urllib.request.urlopen(f"{triton.url}/v2/models/{system}_stream/generate_stream", body) as response:
        for line in response:
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                if "text" not in event:
                    raise RuntimeError(event.get("error", "the stream has an event without text"))
                text += event["text"]
                pieces.append(time.perf_counter() - start)
    return Answer(text, pieces)


def save_checkpoint(folder: Path) -> None:
    """Save the model, with a tokenizer in which every token has a text: a client sees each as it comes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size = 32_000
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word for text in MIXED.texts for word, _ in split.pre_tokenize_str(text)}
    fillers = (f"Ġword{number}" for number in range(size))
    vocabulary = dict.fromkeys([UNKNOWN, *sorted(words), *fillers])
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(itertools.islice(vocabulary, size))}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,  # no text ends before it is NEW_TOKENS longer
    )
    # Weights that 16 bits hold exactly, so that every server computes with the same.
    transformers.LlamaForCausalLM(config).bfloat16().float().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
