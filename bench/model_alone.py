"""The embedding model in a process of its own: ONNX Runtime alone, without tokenizing and without a server."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from triton_transformers.cli import err
from triton_transformers.settings import ROOT, Settings

BATCHES = (1, 4, 8, 16, 32, 64)
TURNS = 2


def measure(cpu: int, variables: dict[str, str]) -> dict[str, float]:
    """Return texts per second at each batch size, on this CPU."""
    with err.status("the model alone, in a process of its own"):
        command = ["taskset", "-c", str(cpu), sys.executable, "-m", "bench.model_alone"]
        done = subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def rates() -> dict[str, float]:
    """Return texts per second of the committed texts, sorted by length, on the CPUs that this process may use."""
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    from triton_transformers.corpus import MIXED

    repository = Settings.load().model_repository
    tokenizer = Tokenizer.from_file(str(repository / "tokenizer/1/tokenizer.json"))
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = ort.InferenceSession(str(repository / "encoder/1/model.onnx"), options)
    tokenizer.no_padding()
    texts = MIXED.texts * 4  # as many as a window holds: the more there are, the tighter they sort
    texts.sort(key=lambda text: len(tokenizer.encode(text)))
    tokenizer.enable_padding()
    feeds = {}
    for batch in BATCHES:
        groups = [tokenizer.encode_batch(texts[i : i + batch]) for i in range(0, len(texts), batch)]
        feeds[batch] = [
            {
                "input_ids": np.array([encoding.ids for encoding in group], np.int64),
                "attention_mask": np.array([encoding.attention_mask for encoding in group], np.int64),
            }
            for group in groups
        ]
    measured: dict[int, list[float]] = {batch: [] for batch in feeds}
    for _ in range(TURNS):
        for batch, runs in feeds.items():
            start = time.perf_counter()
            for feed in runs:
                session.run(None, feed)
            measured[batch].append(len(texts) / (time.perf_counter() - start))
    return {str(batch): statistics.median(values) for batch, values in measured.items()}


if __name__ == "__main__":
    print(json.dumps(rates()))
