"""Text generation by this project, vLLM and llama.cpp, with the same weights and 32 clients.

Each server has one core, and the clients the other. A server is measured only if its greedy texts in float32 are those
of transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.bench.clients import percentile
from loadtest.bench.generation_rates import NEW_TOKENS, ROUNDS, SYSTEM, Answer, prompts, save_checkpoint
from loadtest.bench.peers.known_peers import Peer, Site, run_module
from loadtest.bench.peers.running import Running
from loadtest.bench.tables import in_turns, ratios, spread
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table
from triton_transformers.load import JSON
from triton_transformers.settings import UserError

SERVER_CPU, CLIENT_CPU = 0, 1
CLIENTS, CHECKED = 32, 8
VLLM = (
    "python -m vllm.entrypoints.openai.api_server --model {weights} --served-model-name story --port {port} "
    "--dtype {dtype} --max-num-seqs 32 --max-model-len 512 --no-enable-log-requests"
)
# vLLM keeps 1 GB of keys and values, and binds its threads to CPUs of its own choice if it is not told which.
VLLM_VARIABLES = (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", str(SERVER_CPU)))
PEERS = {
    "vLLM": Peer("vLLM", "vllm", tuple(VLLM.split()), lambda _: [], "completions", environment=VLLM_VARIABLES),
    "llama.cpp": Peer(
        "llama.cpp", "llama", (*run_module("llama_server"), "{weights}", "{port}"), lambda _: [], "completions"
    ),
}


@dataclass(frozen=True)
class Way:
    """A server, and the precision of the weights that it computes with."""

    name: str
    bits: int  # 16: bfloat16
    precision: str  # FORMAT of this project, --dtype of vLLM, or a type of a GGUF file
    is_exact: bool = False  # computes in float32

    @property
    def title(self) -> str:
        return f"{self.name}, {self.precision}"


OURS = "this project"
WAYS = (
    Way(OURS, 32, "openvino-fp32", is_exact=True),
    Way(OURS, 16, "openvino-bf16"),
    Way(OURS, 8, "openvino"),
    Way("vLLM", 32, "float32", is_exact=True),
    Way("vLLM", 16, "bfloat16"),
    Way("llama.cpp", 32, "F32", is_exact=True),
    Way("llama.cpp", 16, "BF16"),
    Way("llama.cpp", 8, "Q8_0"),
)


@dataclass
class Window:
    rates: list[float] = field(default_factory=list)  # new tokens per second of each round
    first_ms: list[float] = field(default_factory=list)  # the 95th percentile of the time to the first token
    same: str = ""  # how many tokens are those of float32


def run() -> None:
    if not {SERVER_CPU, CLIENT_CPU} <= os.sched_getaffinity(0):
        raise UserError("this benchmark takes the first two CPUs of the machine: one for a server, one for the clients")
    with folder() as work, contextlib.ExitStack() as stack:
        save_checkpoint(work / "checkpoint")
        checked = token_ids(work / "checkpoint", prompts(CHECKED, "check"))
        expected = reference(work / "checkpoint", checked)
        windows: dict[Way, Window] = {}
        running: dict[str, tuple[Way, Running]] = {}
        for way in WAYS:
            try:
                with contextlib.ExitStack() as trial, err.status(f"starting {way.title}"):
                    own = trial.enter_context(serve(way, work))
                    same = [
                        leading(ask(own.url, ids).text, right) for ids, right in zip(checked, expected, strict=True)
                    ]
                    if way.is_exact and min(same) < NEW_TOKENS:
                        raise UserError(f"its text differs from transformers' after {min(same)} tokens")
                    own.pause()
                    stack.push(trial.pop_all())
                    running[way.title] = way, own
                    windows[way] = Window(same=f"{statistics.median(same):.0f} of {NEW_TOKENS}")
            except (UserError, OSError) as error:
                out.print(f"{way.title}: {error}")
        os.sched_setaffinity(0, {CLIENT_CPU})
        for title in in_turns(running, ROUNDS, f"{CLIENTS} clients"):
            way, own = running[title]
            texts = prompts(2 * CLIENTS, f"round {len(windows[way].rates)}")  # the same for each server
            own.resume()
            measure(own.url, token_ids(work / "checkpoint", texts), windows[way])
            own.pause()
        show(windows)


def token_ids(checkpoint: Path, texts: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


def reference(checkpoint: Path, texts: list[list[int]]) -> list[str]:
    """Return the greedy texts of transformers in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    answers = (model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0] for ids in texts)
    return [str(tokenizer.decode(answer[len(ids) :])) for answer, ids in zip(answers, texts, strict=True)]


def leading(text: str, expected: str) -> int:
    """Return how many tokens, which are words here, agree before the first that differs."""
    pairs = zip(text.split(), expected.split(), strict=False)
    return next((number for number, (own, right) in enumerate(pairs) if own != right), NEW_TOKENS)


# --- the servers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(way: Way, work: Path) -> Iterator[Running]:
    checkpoint = work / "checkpoint"
    if way.name == OURS:
        with own_stack(way.precision, work) as running:
            yield running
        return
    weights = checkpoint
    if way.name == "llama.cpp":
        import gguf

        from loadtest.bench.peers import gguf_files

        kind = gguf.GGMLQuantizationType[way.precision]
        weights = gguf_files.write_gguf(checkpoint, work / f"{way.precision}.gguf", kind)
    site = Site((SERVER_CPU,), weights, checkpoint, work)
    with PEERS[way.name].serve(site, {"dtype": way.precision}) as running:
        yield running


@contextlib.contextmanager
def own_stack(form: str, work: Path) -> Iterator[Running]:
    """Serve the checkpoint in this FORMAT, with the gateway on the server's CPU too."""
    own = OwnStack(work / form, quiet=True, SYSTEMS=SYSTEM, TRITON_CPUS=str(SERVER_CPU))
    own.command("models", SOURCE=f"{work}/checkpoint", TASK="text-generation", FORMAT=form)
    every_cpu = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SERVER_CPU})  # which the stack's processes inherit
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(own.serving())
        finally:
            os.sched_setaffinity(0, every_cpu)
        running = Running(own.url("GATEWAY_PORT"), "completions", own.leader().pid)
        try:
            yield running
        finally:
            running.resume()


# --- requests and figures ---------------------------------------------------------------------------------------------


def measure(url: str, texts: list[list[int]], window: Window) -> None:
    ask(url, texts[0][:4])
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(partial(ask, url), texts))
    window.rates.append(len(texts) * NEW_TOKENS / (time.perf_counter() - start))
    window.first_ms.append(1000 * percentile([answer.pieces[0] for answer in answers], 95))


def ask(url: str, prompt: list[int]) -> Answer:
    """Return the greedy text after these token ids, as it streams."""
    fields = {"model": SYSTEM, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode(), JSON)
    start = time.perf_counter()
    text, pieces = "", []
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {") and (piece := json.loads(line[6:])["choices"][0]["text"]):
                text += piece
                pieces.append(time.perf_counter() - start)
    return Answer(text, pieces)


def show(windows: dict[Way, Window]) -> None:
    for bits, title in ((32, "float32"), (16, "bfloat16"), (8, "weights of 8 bits")):
        measured = {way: window for way, window in windows.items() if way.bits == bits and window.rates}
        rows = [[way.title, spread(own.rates), spread(own.first_ms, 0), own.same] for way, own in measured.items()]
        print_table((title, "tokens/s", "first token p95 ms", "as float32"), rows, text_columns=(title,))
        ours = next((own for way, own in measured.items() if way.name == OURS), None)
        others = [own for way, own in measured.items() if way.name != OURS]
        if ours and others:
            best = max(others, key=lambda own: statistics.median(own.rates))
            out.print(f"tokens/s, {OURS} / best other: {spread(ratios(ours.rates, best.rates), 2)}")
    out.print(
        f"new tokens per second of {CLIENTS} clients, with one core for the server: median (minimum to maximum) of "
        f"{ROUNDS} interleaved rounds; {NEW_TOKENS} new tokens per text; as float32: the leading tokens of a text that "
        f"are those of transformers in float32, median of {CHECKED} texts"
    )
