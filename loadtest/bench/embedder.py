"""The model `embedding` in this process, for other servers, and alone on one core: without server and tokenizer.

Run python -m loadtest.bench.embedder with the options of an Embedder as JSON in the environment.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from triton_transformers.corpus import MIXED
from triton_transformers.settings import ROOT

OUTPUT = "sentence_embedding"
VARIABLE = "BENCH_PEER"
# serve.sh gives Triton these pages. What is compared with it gets them, too.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class Options:
    """The options of a server whose source is here.

    They travel in an environment variable, so a server's own workers have them too.
    """

    repository: str
    port: int
    engine: str = "onnxruntime"
    processes: int = 1
    pool: int = 1  # threads that run the model side by side, in each process
    threads: int = 1  # of one run; of all streams together
    streams: int = 1  # OpenVINO's: runs that go on side by side
    batch: int = 1
    wait_ms: int = 0

    @classmethod
    def read(cls) -> Options:
        return cls(**json.loads(os.environ[VARIABLE]))


class Embedder:
    """Tokenizer and engine. Threads may call it at the same time."""

    def __init__(self, options: Options) -> None:
        repository = Path(options.repository)
        self.tokenizer = Tokenizer.from_file(str(repository / "tokenizer/1/tokenizer.json"))
        self.tokenizer.enable_padding()
        graph = next(repository.glob("encoder/1/*.xml"), repository / "encoder/1/model.onnx")
        engine = "openvino" if graph.suffix == ".xml" else options.engine
        self.engine = ENGINES[engine](graph, options)

    def embed(self, texts: list[str]) -> list[Any]:
        """Return the vector of each text."""
        return list(self.run_feed(self.feed(texts)))

    def feed(self, texts: list[str]) -> dict[str, Any]:
        encodings = self.tokenizer.encode_batch_fast(texts)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }

    def run_feed(self, feed: dict[str, Any]) -> Any:
        (vectors,) = self.engine.run([OUTPUT], feed)
        return vectors


def onnx_runtime(path: Path, options: Options) -> Any:
    import onnxruntime as ort

    session = ort.SessionOptions()
    session.intra_op_num_threads = options.threads
    return ort.InferenceSession(str(path), session, providers=["CPUExecutionProvider"])


def openvino(path: Path, options: Options) -> Any:
    """Load the graph with the engine that this project's own backends use."""
    from serving.engines.graphs import OpenVinoGraph

    # What an int8 graph does not have in 8 bits stays in f32.
    precision = "bf16" if runs_bf16() and path.suffix == ".onnx" else "f32"
    threads, streams = (max(count, options.pool) for count in (options.threads, options.streams))
    return OpenVinoGraph(path, [OUTPUT]).compile(precision, threads, streams)


@cache
def runs_bf16() -> bool:
    """Return whether OpenVINO computes in bfloat16 on this CPU."""
    from serving.triton.parameters import has_bf16

    return has_bf16()


ENGINES = {"onnxruntime": onnx_runtime, "openvino": openvino}


# --- the engine alone, in a process of its own ------------------------------------------------------------------------

GROUP = 64  # texts that are sorted together, as many as clients wait
BATCHES = (1, 4, 8, 16, 32, 64)
Figures = dict[str, float]  # by batch: texts per second; "one_text_ms"


def measure(cpu: int, repository: str, engine: str) -> Figures:
    """Measure the engine, as Triton's metrics name it, on this CPU."""
    options = json.dumps({"repository": repository, "port": 0, "engine": engine.partition(" ")[0]})
    program = ["taskset", "-c", str(cpu), sys.executable, "-m", "loadtest.bench.embedder"]
    environment = os.environ | LARGE_PAGES | {VARIABLE: options}
    done = subprocess.run(program, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def best(figures: Figures) -> float:
    """Return the texts per second at the best size of a batch."""
    return max(figures[str(batch)] for batch in BATCHES)


def run() -> Figures:
    embedder = Embedder(Options.read())
    texts = random.Random(0).sample(MIXED.texts, len(MIXED.texts))
    lengths = {text: len(embedder.tokenizer.encode(text).ids) for text in texts}
    groups = [sorted(texts[i : i + GROUP], key=lengths.__getitem__) for i in range(0, len(texts), GROUP)]
    figures = {}
    for batch in BATCHES:
        feeds = [embedder.feed(group[i : i + batch]) for group in groups for i in range(0, len(group), batch)]
        taken = seconds(embedder, feeds)
        figures[str(batch)] = len(texts) / sum(taken)
        if batch == 1:
            figures["one_text_ms"] = 1e3 * statistics.median(taken)
    return figures


def seconds(embedder: Embedder, feeds: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each run, in the second of two turns: the first of a shape takes longer."""
    for _ in range(2):
        taken = []
        for feed in feeds:
            start = time.perf_counter()
            embedder.run_feed(feed)
            taken.append(time.perf_counter() - start)
    return taken


if __name__ == "__main__":
    print(json.dumps(run()))
