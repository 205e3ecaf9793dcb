"""The model as the small servers run it: one batch, padded to its longest text."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from scripts.common.settings import ROOT

VARIABLE = "BENCH_PEER"


@dataclass(frozen=True)
class Options:
    """The options of one server. They travel in an environment variable, so a server's own workers have them too."""

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
        encodings = self.tokenizer.encode_batch_fast(texts)
        feed = {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }
        (vectors,) = self.run(None, feed)
        return list(vectors)


def onnx_runtime(path: Path, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run


def openvino(path: Path, threads: int) -> Any:
    """Load the graph with the engine that this project's own backends use."""
    sys.path.append(str(ROOT / "images/triton/backends"))
    from shared.engines import OpenVinoGraph

    graph = OpenVinoGraph(path, {"input_ids": np.int64, "attention_mask": np.int64}, {"sentence_embedding": np.float32})
    # OpenVINO lists BF16 only if the CPU has instructions for it.
    has_bf16 = "BF16" in graph.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return graph.compile("bf16" if has_bf16 else "f32", threads, streams=1).run


ENGINES = {"onnxruntime": onnx_runtime, "openvino": openvino}
