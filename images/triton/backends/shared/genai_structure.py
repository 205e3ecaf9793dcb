"""Texts with a structure on OpenVINO GenAI: they begin when it is compiled, and no other text waits for that."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import openvino
import openvino_genai as genai
from openvino import opset13 as ops

from shared.genai_pipeline import MODEL, NO_TOKEN, saved, tensor
from shared.structure import Structure

# GenAI keeps each grammar that it compiled; with more, ours are compiled again.
MAX_GRAMMARS = 100
# The time for which a step waits for a grammar if no text runs.
PAUSE_S = 0.05


@dataclass(frozen=True)
class Waiting:
    """A text whose structure may not be compiled yet."""

    tokens: list[int]
    config: genai.GenerationConfig
    structure: Structure

    @cached_property
    def name(self) -> str:
        return json.dumps(self.structure)


class StructuredTexts:
    """Holds texts back until GenAI has compiled their structures.

    GenAI itself compiles when a text gets its first token, while all others wait, and keeps the result beside the
    tokenizer. So another pipeline with the same tokenizer and without weights compiles before, on a thread of its own.
    GenAI notes each use of a grammar in a list that two threads must not extend at once, so no text with a structure
    gets its first token while another structure is compiled.
    """

    def __init__(self, tokenizer: genai.Tokenizer, vocabulary: int) -> None:
        self.pipeline, self.other_pipeline = (weightless(tokenizer, size) for size in (vocabulary, vocabulary + 1))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.compiled: dict[str, str] = {}  # by name: the reason why GenAI could not compile it, or ""
        self.compiling: tuple[str, Future[str]] | None = None
        self.waiting: dict[int, Waiting] = {}
        self.starting: set[int] = set()  # the keys of those without a token yet
        self.forget()

    def forget(self) -> None:
        """Make GenAI drop its grammars: it does if the size of the vocabulary changes. No text may run meanwhile."""
        self.compiled.clear()
        for pipeline in (self.other_pipeline, self.pipeline):
            generate_token(pipeline)

    def ready(self, is_idle: bool) -> Iterator[tuple[int, Waiting, str]]:
        """Yield the texts that can begin, or the reason why one cannot. Call this between two steps."""
        has_compiled = False
        if self.compiling:
            name, future = self.compiling
            wait([future], PAUSE_S if is_idle else 0)
            if not future.done():
                return
            self.compiled[name] = future.result()
            self.compiling, has_compiled = None, True
        missing = next((own for own in self.waiting.values() if own.name not in self.compiled), None)
        if missing and not has_compiled:
            if not self.starting:
                self.compile(missing)
            return
        for key, own in list(self.waiting.items()):
            if (reason := self.compiled.get(own.name)) is not None:
                del self.waiting[key]
                if not reason:
                    self.starting.add(key)
                yield key, own, reason

    def compile(self, own: Waiting) -> None:
        if len(self.compiled) >= MAX_GRAMMARS:
            self.forget()
        self.compiling = (own.name, self.thread.submit(self.compile_now, own.structure))

    def compile_now(self, structure: Structure) -> str:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # GenAI's threads for this inherit it
        try:
            generate_token(self.pipeline, structure)
        except RuntimeError as error:
            return str(error).strip().splitlines()[-1].rpartition(": ")[2]
        return ""


def generate_token(pipeline: genai.LLMPipeline, structure: Structure | None = None) -> None:
    config = genai.GenerationConfig()
    config.max_new_tokens = 1
    config.set_eos_token_id(NO_TOKEN)
    if structure:
        config.structured_output_config = output_config(structure)
    pipeline.generate(tensor([0]), config)


def output_config(structure: Structure) -> genai.StructuredOutputConfig:
    if "structural_tag" in structure:
        return genai.StructuredOutputConfig(structural_tags_config=structure["structural_tag"])
    return genai.StructuredOutputConfig(grammar=structure["grammar"])


def weightless(tokenizer: genai.Tokenizer, vocabulary: int) -> genai.LLMPipeline:
    """Return a pipeline that finds all tokens equally probable."""
    names = {"input_ids": np.int64, "attention_mask": np.int64, "beam_idx": np.int32}
    inputs = [ops.parameter([-1] * (1 if name == "beam_idx" else 2), kind, name=name) for name, kind in names.items()]
    for own, name in zip(inputs, names, strict=True):
        own.output(0).get_tensor().set_names({name})
    shape = ops.concat([ops.shape_of(inputs[0]), ops.constant(np.array([vocabulary]))], 0)
    logits = ops.result(ops.broadcast(ops.constant(np.float32(0)), shape))
    logits.output(0).get_tensor().set_names({"logits"})
    model = openvino.Model([logits], inputs, "weightless")
    return saved(model, MODEL, lambda folder: genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA"))
