"""Task `text-generation` with continuous batching: a text joins and leaves the running ones between any two steps."""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from serving.generation.job import Job
from serving.generation.requests import TextGeneration
from serving.generation.row import Logprobs, Options, Row
from serving.text.chat_template import IMAGES
from serving.text.tokenizer import TextTokenizer
from serving.triton.parameters import has_input, weights_folder
from serving.triton.types import BadRequest, InstanceArgs, ModelConfig

# Each check whether a client still waits is a round trip to Triton: at most this share of the time goes into checks.
CHECK_SHARE = 0.05
# But a check that took long, on a busy machine, must not put off the next one for seconds.
CHECK_AFTER_S = 0.5


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a step added to one text."""

    key: int
    tokens: list[int]  # may end with the end token
    finished: bool  # the engine has dropped the text
    error: str | BadRequest = ""  # the reason why the engine could not continue it
    logprobs: Sequence[Logprobs] = ()  # those of the tokens, if the options ask for them
    cached_tokens: int | None = None  # tokens of the prompt whose keys and values the engine had, if it counts them
    # The logprobs of the prompt's tokens but the first. One step of an engine that scores prompts reports them.
    prompt_logprobs: Sequence[Logprobs] | None = None


@dataclass(frozen=True)
class EngineStats:
    cache_usage: float  # from 0 to 1
    # Tokens of prompts so far whose keys and values came from the prefix cache; None if the engine does not count them.
    prefix_tokens: int | None = None


class EngineFailed(RuntimeError):
    """Raised when the engine cannot continue any text; its process must restart."""


class TokenEngine(ABC):
    """Continues texts that have keys of the caller's choice. One thread makes all calls."""

    name: str  # label `engine` of the metric transformers_engine
    precision: str  # label `precision`, with what proposes tokens if anything does

    def can_begin(self, row: Row[Any], running: Collection[Row[Any]]) -> bool:
        """Return whether the engine can begin a text beside the running ones, or must run a step before."""
        return True

    @abstractmethod
    def add(self, key: int, tokens: list[int], options: Options) -> None:
        """Take a text. Raise if the engine refuses it; the other texts do not notice."""

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Drop a text, if the engine still has it."""

    @abstractmethod
    def step(self) -> list[NewTokens]:
        """Run the model once for all texts. Raise EngineFailed if it cannot run again."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the state after the last step."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class ContinuousGeneration(TextGeneration):
    def load_model(self, config: ModelConfig, args: InstanceArgs) -> TextTokenizer:
        folder = weights_folder(config, args)
        if has_input(config, IMAGES):
            from serving.vision.chat import ChatImages

            self.chat_images = ChatImages(config, args)
        self.tokenizer = TextTokenizer(folder)
        self.engine = self.load_engine(folder, config, args)
        self.engine_labels = {"engine": self.engine.name, "precision": self.engine.precision}
        self.rows: dict[int, Row[Job]] = {}
        self.keys = itertools.count()
        self.held: Row[Job] | None = None  # the first of the waiting rows
        self.next_check = 0.0
        self.prefix_tokens = 0
        return self.tokenizer

    def load_engine(self, folder: Path, config: ModelConfig, args: InstanceArgs) -> TokenEngine:
        """Load the weights of the folder. Raise ConfigError if the engine cannot serve them."""
        raise NotImplementedError

    def placement(self) -> str:
        return f"{self.engine.name} in {self.engine.precision}"

    def work(self) -> None:
        while self.admit():
            jobs = {row.owner for row in self.rows.values()}
            try:
                for new in self.engine.step():
                    self.add_tokens(new)
                for row in self.rows.values():
                    row.steps += 1
            except Exception as error:
                for job in jobs:
                    job.fail(error)
                if isinstance(error, EngineFailed):
                    self.fail_waiting(error)
                    pb_utils.Logger.log_warn(f"{error}: this process ends, so that the model is loaded again")
                    os._exit(1)
            self.update(jobs)
            for key in [key for key, row in self.rows.items() if row.done]:
                self.engine.cancel(key)
                self.count_end(self.rows.pop(key))
            self.report()
        self.engine.close()

    def admit(self) -> bool:
        """Give waiting rows to the engine while it has room; wait if it has none at all. Return False at the end."""
        while not self.rows or (len(self.rows) < self.max_batch and (self.held or not self.waiting.empty())):
            row, self.held = self.held or self.waiting.get(), None
            if row and not self.engine.can_begin(row, self.rows.values()):
                self.held = row
                break
            if row is None:  # finalize() was called
                if not self.rows:
                    return False
                self.waiting.put(None)
                break
            key = next(self.keys)
            try:
                row.owner.end_if_cancelled()  # the engine would read its prompt, and the other texts wait
                if not row.done:  # or another text of the same request failed
                    row.owner.begin()
                    self.begin(key, row)
                    self.rows[key] = row
            except Exception as error:
                row.owner.fail(error)
        return True

    def begin(self, key: int, row: Row[Job]) -> None:
        self.engine.add(key, row.prompt_tokens, row.options)

    def fail_waiting(self, error: Exception) -> None:
        if self.held:
            self.held.owner.fail(error)
        while not self.waiting.empty():
            if row := self.waiting.get():
                row.owner.fail(error)

    def add_tokens(self, new: NewTokens) -> None:
        row = self.rows[new.key]
        self.metrics.add(generated_tokens=len(new.tokens))
        row.cached_tokens = new.cached_tokens
        try:
            if new.prompt_logprobs is not None:
                row.score_prompt(new.prompt_logprobs, self.tokenizer.decode, self.tokenizer.bytes_of)
            for token, logprobs in itertools.zip_longest(new.tokens, new.logprobs):
                if not row.done:
                    row.add(token, self.tokenizer.end_tokens, self.tokenizer.decode, logprobs, self.tokenizer.bytes_of)
        except Exception as fault:  # the other texts of this step go on
            row.owner.fail(fault)
        if new.finished:
            self.count_end(self.rows.pop(new.key))
            if not row.done:
                error = new.error or "the engine stopped before the text was done"
                row.owner.fail(error if isinstance(error, BadRequest) else RuntimeError(error))

    def update(self, jobs: set[Job]) -> None:
        """Send what is ready, and end the jobs of clients that no longer wait."""
        begin = time.monotonic()
        check = begin >= self.next_check
        for job in jobs:
            try:
                job.update(check)
            except Exception as error:  # no shared memory for a piece, for example
                job.fail(error)
        if check:
            end = time.monotonic()
            self.next_check = end + min((end - begin) / CHECK_SHARE, CHECK_AFTER_S)

    def report(self) -> None:
        stats = self.engine.stats()
        self.metrics.add(runs=1)
        if stats.prefix_tokens is not None:
            self.metrics.add(prefix_cached_tokens=stats.prefix_tokens - self.prefix_tokens)
            self.prefix_tokens = stats.prefix_tokens
        self.metrics.set(
            running_texts=len(self.rows),
            waiting_texts=self.waiting.qsize() + bool(self.held),
            cache_usage_ratio=stats.cache_usage if self.rows else 0.0,
        )
