"""Proposed tokens with OpenVINO GenAI: a draft model or the text itself proposes several, which the model checks."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import openvino_genai as genai

from serving.generation.openvino.pipeline import SETTINGS, read_graph
from serving.generation.row import Options
from serving.triton.types import BadRequest
from triton_transformers.engines import OPENVINO

# The kinds in limits.json. A draft model is in the folder of its name.
DRAFT, LOOKUP = "draft", "lookup"
NGRAM = 3  # a text that repeats up to this many tokens is proposed what followed them
BLOCK = 32  # tokens of a block of the cache
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1}


class Draft:
    """Lets tokens be proposed, and texts begin only where GenAI 2026.4.1 then computes them right.

    A step that reads a part of a prompt, checks a part of the proposed tokens or takes the cache from a running text
    gives wrong tokens or fails. So each prompt is read in one step, and the cache has room for each text to its end.
    """

    def __init__(self, kind: str, tokens: int, batch: int) -> None:
        self.kind, self.tokens = kind, tokens
        self.has_model = kind == DRAFT
        self.label = {DRAFT: ", draft model", LOOKUP: ", lookup"}.get(kind, "")
        self.margin = 1 + tokens  # a step checks so many tokens of each text
        self.checked = self.margin * batch
        self.blocks = 0
        self.begun: dict[int, int] = {}  # the blocks of each text

    def prepare(self, scheduler: genai.SchedulerConfig, folder: Path, gigabytes: int, precision: str) -> float:
        """Set the scheduler's limits, and return the gigabytes of both caches."""
        if not self.kind:
            return gigabytes
        width = cache_width(folder)
        self.blocks = int(gigabytes * 1e9 / (width * BYTES[precision] * BLOCK))
        scheduler.cache_size, scheduler.num_kv_blocks = 0, self.blocks
        scheduler.max_num_batched_tokens += self.checked
        if self.has_model:
            scheduler.max_num_batched_tokens = self.blocks * BLOCK + self.checked
        return gigabytes * (1 + (cache_width(folder / DRAFT) / width if self.has_model else 0))

    def context(self, context: int | None) -> int | None:
        """Return the model's context, or the number of tokens of one text that fit the cache if it is smaller."""
        fits = self.blocks * BLOCK - self.margin
        return min(context or fits, fits) if self.kind else context

    def settings(self, scheduler: genai.SchedulerConfig, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        if self.has_model:
            own = SETTINGS | settings
            return {"draft_model": genai.draft_model(folder / DRAFT, "CPU", scheduler_config=scheduler, **own)}
        return {"prompt_lookup": True} if self.kind else {}

    def has_room(self, prompt: list[int], options: Options) -> bool:
        return not self.begun or sum(self.begun.values()) + self.needed(prompt, options) <= self.blocks

    def needed(self, prompt: list[int], options: Options) -> int:
        return math.ceil((len(prompt) + options.max_new_tokens + self.margin) / BLOCK)

    def begin(self, key: int, prompt: list[int], options: Options, config: genai.GenerationConfig) -> None:
        """Let a text's tokens be proposed. Raise BadRequest for what GenAI 2026.4.1 then cannot do."""
        if not self.kind:
            return
        refused = {
            "logprobs": bool(options.logprobs),  # it finds no alternatives; 0 asks for none
            "min_tokens": options.min_tokens > 0,  # it counts proposed tokens, too
            "structured_outputs": self.has_model and bool(options.structured_outputs),  # and fails
        }
        for name in (name for name, is_set in refused.items() if is_set):
            raise BadRequest(f"option '{name}': {OPENVINO.title} does not have it together with a draft (DRAFT)", name)
        config.num_assistant_tokens = self.tokens
        # Also with a draft model: otherwise GenAI accepts its tokens by chance, so that a seed gives other texts, and
        # fails where it refuses one.
        config.max_ngram_size = NGRAM
        self.begun[key] = self.needed(prompt, options)

    def keep(self, running: Collection[int]) -> None:
        """Forget all other texts, after the step that took them out of the cache."""
        self.begun = {key: own for key, own in self.begun.items() if key in running}


def cache_width(folder: Path) -> int:
    """Return how many numbers a model of this folder keeps for each token."""
    sinks = read_graph(folder).get_sinks()
    shapes = [list(sink.input(0).get_partial_shape()) for sink in sinks]
    return sum(math.prod(side.get_length() for side in shape if side.is_static) for shape in shapes)
