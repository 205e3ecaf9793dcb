"""The model `embedding` in this process: one batch, padded to its longest text."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from triton_transformers.settings import ROOT

OUTPUT = "sentence_embedding"
VARIABLE = "BENCH_PEER"


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
    threads: int = 1  # of one run
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
        self.run = ENGINES[options.engine](repository / "encoder/1/model.onnx", options.threads)

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
        (vectors,) = self.run([OUTPUT], feed)
        return vectors


def onnx_runtime(path: Path, threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run


def openvino(path: Path, threads: int) -> Any:
    """Load the graph with the engine that this project's own backends use."""
    sys.path.append(str(ROOT / "images/triton/backends"))
    from shared.engine_choice import has_bf16
    from shared.engines import OpenVinoGraph

    graph = OpenVinoGraph(path, [OUTPUT])
    return graph.compile("bf16" if has_bf16() else "f32", threads, parallel_runs=1).run


ENGINES = {"onnxruntime": onnx_runtime, "openvino": openvino}
