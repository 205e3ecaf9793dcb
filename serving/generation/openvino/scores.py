"""Score prompts beside OpenVINO GenAI, which reports the tokens of a prompt only where its prefix cache has no others.

The graph of the engine is compiled a second time, as it is in its file, when the first request asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from serving.generation.openvino.pipeline import MODEL, SETTINGS, read_graph
from serving.generation.row import CHUNK, Logprobs, logprobs_of
from serving.triton.memory import HEADROOM, check_it_fits, memory, one_load_at_a_time
from serving.triton.types import Busy, ConfigError


class PromptScores:
    """One thread makes all calls."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]) -> None:
        self.name, self.folder, self.settings = name, folder, SETTINGS | settings
        self.request: openvino.InferRequest | None = None  # until the first prompt

    def of(self, tokens: Sequence[int], mark: int, count: int) -> list[Logprobs]:
        """Return the logprobs of each token but the first, to which the graph expects the mark of an adapter added."""
        ids = np.array([tokens], np.int64)
        ids[0, 0] += mark
        logprobs: list[Logprobs] = []
        if len(tokens) == 1:
            return logprobs
        request = self.request = self.request or self.load()
        request.reset_state()
        for begin in range(0, len(tokens) - 1, CHUNK):
            end = min(begin + CHUNK, len(tokens) - 1)
            feed = {
                "input_ids": ids[:, begin:end],
                "position_ids": np.arange(begin, end)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            scores = request.infer(feed)["logits"][0]
            logprobs += logprobs_of(scores, tokens[begin + 1 : end + 1], count)
        return logprobs

    def load(self) -> openvino.InferRequest:
        weights = (self.folder / f"{MODEL}.bin").stat().st_size
        with one_load_at_a_time():
            used, limit = memory()
            try:
                check_it_fits(f"a second copy of {self.name}, which scores prompts,", weights * HEADROOM, limit - used)
            except ConfigError as error:
                raise Busy(f"option 'prompt_logprobs': {error}", "prompt_logprobs") from None
            return openvino.Core().compile_model(read_graph(self.folder), "CPU", self.settings).create_infer_request()
