"""Let a process of its own generate a few tokens in bfloat16, because OpenVINO may end that process.

On a CPU with AMX, the paged attention of OpenVINO GenAI 2026.4 did, with a floating-point exception.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import openvino_genai as genai

from serving.generation.openvino.pipeline import NO_TOKEN, load_pipeline, tensor
from serving.triton.parameters import check_bf16
from serving.triton.types import ConfigError
from serving.triton.worker_process import start_module

PROMPTS = [list(range(length)) for length in (1, 8, 40)]


def check_bfloat16(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ConfigError if the model of this folder does not generate in bfloat16 on this CPU."""
    check_bf16("dtype 'bfloat16'", "float32")
    process = start_module("serving.generation.openvino.trial")
    process.communicate(json.dumps([str(folder), settings]).encode())
    if status := process.returncode:
        reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        raise ConfigError(f"OpenVINO GenAI cannot compute {folder} in bfloat16 on this CPU ({reason}): choose float32")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would have the weights
    folder, settings = json.loads(sys.stdin.readline())
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    config = genai.GenerationConfig(max_new_tokens=4, eos_token_id=NO_TOKEN)
    with contextlib.suppress(RuntimeError):  # the process that serves the model gets the same error, and reports it
        pipeline = load_pipeline(Path(folder), scheduler, **settings)
        handles = [pipeline.add_request(key, tensor(prompt), config) for key, prompt in enumerate(PROMPTS)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        del handles


if __name__ == "__main__":
    main()
