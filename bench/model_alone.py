"""The model `embedding` in a process of its own, on one core: the engine without server and tokenizer.

Run python -m bench.model_alone with the options of an Embedder as JSON in the environment.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.embedder import VARIABLE, Embedder, Options
from triton_transformers.corpus import MIXED
from triton_transformers.settings import ROOT

GROUP = 64  # texts that are sorted together, as many as clients wait
BATCHES = (1, 4, 8, 16, 32, 64)
Figures = dict[str, float]  # by batch: texts per second; "one_text_ms"


def measure(cpu: int, repository: str, engine: str) -> Figures:
    """Measure the engine, as Triton's metrics name it, on this CPU."""
    options = json.dumps({"repository": repository, "port": 0, "engine": engine.partition(" ")[0]})
    program = ["taskset", "-c", str(cpu), sys.executable, "-m", "bench.model_alone"]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {VARIABLE: options}, check=True, stdout=subprocess.PIPE, text=True
    )
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
