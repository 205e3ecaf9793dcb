"""The options of a server whose source is here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

VARIABLE = "BENCH_PEER"


@dataclass(frozen=True)
class Options:
    """Options travel in an environment variable, so a server's own workers have them too."""

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
