"""Texts with a structure on OpenVINO GenAI: they begin when it is compiled, and no other text waits for that."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from openvino import opset13 as ops

from serving.generation.openvino.pipeline import MODEL, saved, tensor
from serving.structure.checks import MAX_CACHED_BYTES
from serving.structure.worker import Structure, use_parts

# The time for which a step waits for a grammar if no text runs.
PAUSE_S = 0.05


@dataclass(frozen=True)
class Waiting:
    """A text whose structure may not be compiled yet."""

    tokens: list[int]
    config: genai.GenerationConfig
    structure: Structure


class StructuredTexts:
    """Holds texts back until GenAI has compiled their structures.

    GenAI itself compiles when a text gets its first token, while all others wait, and keeps the result beside the
    tokenizer. So another pipeline with the same tokenizer and without weights compiles before, on a thread of its own.
    GenAI notes each use of a grammar in a list that two threads must not extend at once, so no text with a structure
    gets its first token while another structure is compiled.
    """

    def __init__(self, tokenizer: genai.Tokenizer, vocabulary: int, tokens: Sequence[bytes]) -> None:
        """Take also the size of the vocabulary and the bytes of its tokens."""
        self.tokens, self.compiler = tokens, ByteCompiler()
        self.pipeline, self.other_pipeline = (weightless(tokenizer, size) for size in (vocabulary, vocabulary + 1))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # A structure -> its grammar, compiled for ByteMatcher, or the reason why GenAI could not compile it.
        self.compiled: dict[Structure, Any] = {}
        self.compiling: tuple[Structure, Future[Any]] | None = None
        self.matchers: dict[int, ByteMatcher] = {}  # of the running texts
        self.waiting: dict[int, Waiting] = {}
        self.starting: set[int] = set()  # the keys of those without a token yet
        self.forget()

    def forget(self) -> None:
        """Make GenAI drop its grammars: it does if the size of the vocabulary changes.

        No text with a structure may run meanwhile.
        """
        self.compiled.clear()
        for pipeline in (self.other_pipeline, self.pipeline):
            generate_token(pipeline)

    def ready(self, is_idle: bool) -> Iterator[tuple[int, Waiting, str]]:
        """Yield the texts that can begin, or the reason why one cannot. Call this between two steps."""
        has_compiled = False
        if self.compiling:
            structure, future = self.compiling
            wait([future], PAUSE_S if is_idle else 0)
            if not future.done():
                return
            self.compiled[structure] = future.result()
            self.compiling, has_compiled = None, True
        missing = next((own for own in self.waiting.values() if own.structure not in self.compiled), None)
        if missing and not has_compiled:
            if not self.starting:
                self.compile(missing.structure)
            return
        for key, own in list(self.waiting.items()):
            if (compiled := self.compiled.get(own.structure)) is not None:
                del self.waiting[key]
                reason = compiled if isinstance(compiled, str) else ""
                if not reason:
                    self.starting.add(key)
                    self.matchers[key] = ByteMatcher(
                        self.compiler.matcher(compiled), self.tokens, own.config.stop_token_ids
                    )
                yield key, own, reason

    def compile(self, structure: Structure) -> None:
        # GenAI keeps each grammar that it compiled.
        if sum(kept.size for kept in self.compiled) + structure.size > MAX_CACHED_BYTES:
            self.forget()
        self.compiling = (structure, self.thread.submit(self.compile_now, structure))

    def compile_now(self, structure: Structure) -> Any:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # GenAI's threads for this inherit it
        try:
            generate_token(self.pipeline, structure)
            return self.compiler.compile(structure)
        except Exception as error:
            return str(error).strip().rpartition("\n")[2].rpartition(": ")[2] or type(error).__name__

    def accept(self, key: int, tokens: Sequence[int]) -> bool:
        """Return whether the structure of a running text, if it has one, allows the new tokens (about 1 us each)."""
        matcher = self.matchers.get(key)
        return matcher is None or all(map(matcher.accept, tokens))

    def end(self, key: int) -> None:
        self.waiting.pop(key, None)
        self.matchers.pop(key, None)


class ByteCompiler:
    """Compiles grammars for a vocabulary of bytes, which takes less time and memory than one for the model's."""

    END = 256

    def __init__(self) -> None:
        use_parts()
        # xgrammar's own class for matchers needs torch.
        self.core = importlib.import_module("xgrammar.base")._core
        tokens = [*(bytes([byte]) for byte in range(self.END)), b""]
        vocabulary = self.core.TokenizerInfo(tokens, 0, len(tokens), [self.END], False)
        self.compiler = self.core.GrammarCompiler(vocabulary, 1, False, -1)

    def compile(self, structure: Structure) -> Any:
        if structure.form == "structural_tag":
            return self.compiler.compile_structural_tag(structure.text)
        return self.compiler.compile_grammar(structure.text, "root")

    def matcher(self, compiled: Any) -> Any:
        return self.core.GrammarMatcher(compiled, None, False, -1)


class ByteMatcher:
    """Checks the tokens of one text. GenAI allows every token from the point where a grammar allows none."""

    def __init__(self, matcher: Any, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        """Take xgrammar's matcher, and the bytes of all tokens and the ids of those that end the text."""
        self.matcher, self.tokens, self.ends = matcher, tokens, ends

    def accept(self, token: int) -> bool:
        if self.matcher.is_terminated():  # a step can bring more tokens than the end token
            return True
        if token in self.ends and self.matcher.accept_token(ByteCompiler.END, False):
            return True
        text = self.tokens[token]
        return bool(text) and bool(self.matcher.accept_string(text, False))


def generate_token(pipeline: genai.LLMPipeline, structure: Structure | None = None) -> None:
    config = genai.GenerationConfig()
    config.max_new_tokens = 1
    # A token that the model has: xgrammar writes to its bit of the mask if a grammar allows the empty text.
    config.set_eos_token_id(0)
    if structure:
        config.structured_output_config = output_config(structure)
    pipeline.generate(tensor([0]), config)


def output_config(structure: Structure) -> genai.StructuredOutputConfig:
    if structure.form == "structural_tag":
        return genai.StructuredOutputConfig(structural_tags_config=structure.text)
    return genai.StructuredOutputConfig(grammar=structure.text)


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
