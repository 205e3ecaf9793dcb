"""Continuous batching with OpenVINO GenAI, on a CPU."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openvino_genai as genai

from serving.generation.adapters import check_adapter
from serving.generation.continuous import ContinuousGeneration, EngineStats, NewTokens, TokenEngine
from serving.generation.openvino.draft import DRAFT, Draft
from serving.generation.openvino.image_rows import FIRST
from serving.generation.openvino.pipeline import (
    BFLOAT16,
    FLOAT32,
    MODEL,
    NO_TOKEN,
    PRECISIONS,
    load_pipeline,
    new_tokenizer,
    precision_settings,
    read_graph,
    tensor,
)
from serving.generation.openvino.scores import PromptScores
from serving.generation.openvino.structure import StructuredTexts, Waiting, output_config
from serving.generation.openvino.trial import check_bfloat16
from serving.generation.row import Logprobs, Options, Row
from serving.structure.checks import DEAD_END
from serving.structure.worker import Structure
from serving.text.tokenizer import LIMITS
from serving.triton.memory import HEADROOM, check_it_fits, memory, one_load_at_a_time
from serving.triton.parameters import choice_parameter, instance_count, int_parameter, usable_cpus
from serving.triton.types import BadRequest, Busy, ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import OPENVINO

if TYPE_CHECKING:
    from serving.generation.job import Job
    from serving.generation.openvino.image_rows import Rows
    from serving.generation.openvino.vision_part import VisionPart
    from serving.vision.chat import Inputs

# The engine computes probabilities in float32. It refuses a temperature or top_p that is 0 there, or a min_p of 1.
SMALLEST, LARGEST = 1e-30, 1 - 1e-7


class GenAIGeneration(ContinuousGeneration):
    text_engine = OPENVINO
    vision: VisionPart | None = None
    engine: GenAIEngine

    def load_engine(self, folder: Path, config: ModelConfig, args: InstanceArgs) -> TokenEngine:
        limits = json.loads((folder / LIMITS).read_text())
        dtype = choice_parameter(config, "dtype", ("auto", *PRECISIONS), "auto")
        if dtype == "auto":
            dtype = limits.get("dtype", FLOAT32)
        choice_parameter(config, "device", ("auto", "cpu"), "auto")
        cache_precision = choice_parameter(config, "cache_precision", PRECISIONS[dtype], PRECISIONS[dtype][0])
        cache_gigabytes = int_parameter(config, "cache_gigabytes", 2)
        batched_tokens = int_parameter(config, "batched_tokens", 128)
        draft_tokens = int_parameter(config, "draft_tokens", 4)
        if min(cache_gigabytes, batched_tokens, draft_tokens) < 1:
            raise ConfigError("parameters 'cache_gigabytes', 'batched_tokens' and 'draft_tokens' must be at least 1")
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = 2 * self.max_batch  # with a search for alternatives beside each text
        scheduler.cache_size = cache_gigabytes
        scheduler.enable_prefix_caching = True
        # A prompt is read in parts of this many tokens, between which the other texts get theirs.
        scheduler.max_num_batched_tokens = max(batched_tokens, self.max_batch)
        scheduler.dynamic_split_fuse = True
        draft = Draft(limits.get(DRAFT, ""), draft_tokens, self.max_batch)
        caches = draft.prepare(scheduler, folder, cache_gigabytes, cache_precision)
        self.tokenizer.context = draft.context(self.tokenizer.context)
        threads = max(1, usable_cpus() // instance_count(config))
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **precision_settings(dtype, cache_precision)}
        with one_load_at_a_time():
            used, limit = memory()
            parts = [folder, folder / DRAFT] if draft.has_model else [folder]
            weights = sum((part / f"{MODEL}.bin").stat().st_size for part in parts)
            if self.chat_images:  # without images, an image of a container may have no torch
                from serving.generation.openvino.vision_part import VisionPart, memory_needed

                weights += memory_needed(folder)
            check_it_fits(args["model_name"], weights * HEADROOM + caches * 1e9, limit - used)
            if self.chat_images:
                self.vision = VisionPart(folder, threads)
            if dtype == BFLOAT16:
                for part in parts:
                    check_bfloat16(part, settings)
            try:
                tokens = self.vocabulary()
                tokenizer = new_tokenizer(tokens)
                own = draft.settings(scheduler, folder, settings)
                pipeline = load_pipeline(folder, scheduler, tokenizer=tokenizer, **settings, **own)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise ConfigError(f"OpenVINO GenAI cannot load {folder}: {reason}") from None
        self.adapters = limits.get("adapters", [])
        self.scores = PromptScores(args["model_name"], folder, settings)
        self.scorer = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self.scored_requests = threading.Semaphore(self.max_waiting)  # those that wait for it, or have it
        load_structured = partial(structured_texts, folder, tokenizer, tokens)
        precision = precision_label(limits["weights"], dtype)
        return GenAIEngine(pipeline, precision, self.tokenizer.end_tokens, load_structured, draft)

    def queue(self, job: Job, compiled: Future[Any] | None = None) -> None:
        if job.rows[0].options.prompt_logprobs is None:
            super().queue(job, compiled)
        elif self.scored_requests.acquire(blocking=False):
            self.scorer.submit(self.score, job, compiled)
        else:
            job.fail(Busy(f"{self.max_waiting} requests wait already until their prompts are scored: try again later"))

    def score(self, job: Job, compiled: Future[Any] | None) -> None:
        """Score the prompts of a job, then queue it."""
        try:
            for row in job.rows:
                job.end_if_cancelled()
                if job.finished:
                    return
                options = row.options
                logprobs = self.scores.of(row.prompt_tokens, options.adapter or 0, options.prompt_logprobs or 0)
                row.score_prompt(logprobs, self.tokenizer.decode, self.tokenizer.bytes_of)
            super().queue(job, compiled)
        except Exception as error:
            job.fail(error)
        finally:
            self.scored_requests.release()

    def prepare_structure(self, structure: Structure) -> Structure:
        self.engine.prepare_structures()
        return structure

    def seen(self, tokens: list[int], images: Inputs) -> Rows:
        assert self.vision
        return self.vision.rows(tokens, images)

    def begin(self, key: int, row: Row[Job]) -> None:
        tokens = row.images.numbered(row.prompt_tokens) if row.images else row.prompt_tokens
        self.engine.add(key, tokens, row.options)
        if row.images:
            self.engine.images[key] = row.images

    def find_adapter(self, name: str) -> int:
        """Return the number that marks a text of the adapter, as export/recipes/language/adapters.py made the graph."""
        check_adapter(name, self.adapters)
        place: int = self.adapters.index(name)
        return self.tokenizer.vocabulary * (1 + place)

    def vocabulary(self) -> list[bytes]:
        try:
            return self.tokenizer.token_bytes()
        except BadRequest:  # which a request with a structure gets
            return [b""]


def precision_label(weights: str, dtype: str) -> str:
    if dtype == FLOAT32:
        return weights
    return f"{weights}, {dtype}" if weights.startswith("int") else dtype


def structured_texts(folder: Path, tokenizer: genai.Tokenizer, tokens: list[bytes]) -> StructuredTexts:
    return StructuredTexts(tokenizer, read_graph(folder).output(0).partial_shape[-1].get_length(), tokens)


class GenAIEngine(TokenEngine):
    name = OPENVINO.name

    def __init__(
        self,
        pipeline: genai.ContinuousBatchingPipeline,
        precision: str,
        end_tokens: frozenset[int],
        load_structured: Callable[[], StructuredTexts],
        draft: Draft,
    ) -> None:
        self.pipeline = pipeline
        self.precision = precision + draft.label
        self.end_tokens = end_tokens
        self.handles: dict[int, genai.GenerationHandle] = {}
        self.alternatives: dict[int, Alternatives] = {}  # of the texts that report them
        # A step after the text's end may still read its prompt, and what it computes may stay in the prefix cache.
        self.images: dict[int, Rows] = {}
        self.load_structured = load_structured
        self.loading = threading.Lock()
        self.structured: StructuredTexts | None = None  # until the first one arrives
        self.draft = draft

    def can_begin(self, row: Row[Any], running: Collection[Row[Any]]) -> bool:
        """Hold a text back for a step if it would begin in a block of the cache that a running text fills.

        With prefix caching, in 2026.4.1: of 3,840 texts among others that began like them, 19 were wrong. The engine
        reads prompts one after the other anyway.
        """
        prompt, has_draft = row.prompt_tokens, bool(self.draft.kind)
        shares = any(may_share_block(prompt, other, has_draft) for other in running)
        return not shares and self.draft.has_room(prompt, row.options)

    def prepare_structures(self) -> None:
        """Load what texts with a structure need, on another thread than that of the texts: it takes seconds."""
        with self.loading:
            self.structured = self.structured or self.load_structured()

    def add(self, key: int, tokens: list[int], options: Options) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = options.max_new_tokens
        ends = {*self.end_tokens, *options.stop_token_ids}
        config.set_eos_token_id(min(ends, default=NO_TOKEN))
        config.stop_token_ids = {*config.stop_token_ids, *ends}
        # The engine then ignores all of them; the row ends at those in `stop_token_ids`.
        config.ignore_eos = options.ignore_eos
        if ends:  # the engine would forbid NO_TOKEN and crash, because the model has no such token
            config.min_new_tokens = options.min_tokens
        config.presence_penalty = options.presence_penalty
        config.frequency_penalty = options.frequency_penalty
        config.repetition_penalty = options.repetition_penalty
        config.logprobs = int(options.logprobs is not None)
        if options.temperature:
            config.do_sample = True
            config.temperature = max(options.temperature, SMALLEST)
            config.top_p = max(options.top_p, SMALLEST)
            config.rng_seed = options.seed
            config.min_p = min(options.min_p, LARGEST)
            if options.top_k:
                config.top_k = options.top_k
        if options.adapter:
            tokens = [tokens[0] + options.adapter, *tokens[1:]]
        if options.repetition_penalty != 1 and (options.adapter or tokens[0] >= FIRST):
            # The engine looks for all tokens of the prompt in the vocabulary.
            other = "an adapter" if options.adapter else "images"
            raise BadRequest(
                f"option 'repetition_penalty': {OPENVINO.title} does not have it together with {other}",
                "repetition_penalty",
            )
        self.draft.begin(key, tokens, options, config)
        if options.structured_outputs:
            assert self.structured
            config.structured_output_config = output_config(options.structured_outputs)
            self.structured.waiting[key] = Waiting(tokens, config, options.structured_outputs)
        else:
            self.handles[key] = self.pipeline.add_request(key, tensor(tokens), config)
        if options.logprobs:
            self.alternatives[key] = Alternatives(self.pipeline, tokens, options.logprobs)

    def cancel(self, key: int) -> None:
        if alternatives := self.alternatives.pop(key, None):
            alternatives.cancel()
        if self.structured:
            self.structured.end(key)
        if handle := self.handles.pop(key, None):
            handle.cancel()

    def step(self) -> list[NewTokens]:
        refused = list(self.begin_structured()) if self.structured else []
        self.pipeline.step()
        new = [new for key in list(self.handles) if (new := self.new_tokens(key))]
        kept = self.handles.keys() | (self.structured.waiting.keys() if self.structured else set())
        self.draft.keep(kept)
        self.images = {key: rows for key, rows in self.images.items() if key in kept}
        if self.structured:
            self.structured.starting &= self.handles.keys() - {own.key for own in new}
        return refused + new

    def begin_structured(self) -> Iterator[NewTokens]:
        """Begin the texts whose structures are compiled, and yield those whose structures cannot be."""
        assert self.structured
        for key, own, reason in self.structured.ready(is_idle=not self.handles):
            if reason:
                self.alternatives.pop(key, None)
                yield NewTokens(
                    key, [], True, BadRequest(f"option 'structured_outputs': {reason}", "structured_outputs")
                )
            else:
                self.handles[key] = self.pipeline.add_request(key, tensor(own.tokens), own.config)

    def new_tokens(self, key: int) -> NewTokens | None:
        handle = self.handles[key]
        tokens: list[int] = []
        logprobs: list[Logprobs] = []
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
                logprobs += map(Logprobs, output.generated_log_probs)
        status = handle.get_status()
        finished = status != genai.GenerationStatus.RUNNING
        if self.structured and not self.structured.accept(key, tokens):
            self.cancel(key)
            return NewTokens(key, [], True, BadRequest(DEAD_END, "structured_outputs"))
        full = status == genai.GenerationStatus.IGNORED
        if alternatives := self.alternatives.get(key):
            alternatives.search(tokens, logprobs)
            tokens, logprobs = alternatives.found()
            full = full or alternatives.cache_is_full
            finished = full or (finished and not alternatives.searches)
        if full:
            self.cancel(key)
        if finished:
            self.handles.pop(key, None)
            self.alternatives.pop(key, None)
            if self.structured:
                self.structured.end(key)
        error = "the text needs more than the cache for keys and values: raise 'cache_gigabytes'" if full else ""
        return NewTokens(key, tokens, finished, error, logprobs) if tokens or finished else None

    def stats(self) -> EngineStats:
        return EngineStats(self.pipeline.get_metrics().cache_usage / 100)

    def close(self) -> None:
        del self.pipeline


def may_share_block(prompt: list[int], running: Row[Any], has_draft: bool) -> bool:
    """Return whether the last block of the running text may hold only tokens that the prompt begins with."""
    other = running.prompt_tokens
    begins_with_other = prompt[: len(other)] == other
    if running.new_tokens > 1:  # the block has tokens of its own
        return False
    if has_draft and begins_with_other:
        # GenAI copies a block that two texts share before it adds a token to it, but not if proposed ones exceed it.
        return True
    if running.new_tokens:
        return begins_with_other and prompt != other
    return running.steps > 0 and prompt[0] == other[0]  # a step has read a part of its prompt


class Alternatives:
    """Finds the most probable tokens beside each new token of a text, of which the pipeline reports only the new one.

    A beam search of one token has them. The cache has the keys and values of the tokens before it.
    """

    numbers = itertools.count(2**62)  # of the searches; no text has such a key

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, tokens: list[int], count: int) -> None:
        self.pipeline = pipeline
        self.tokens = list(tokens)
        self.config = genai.GenerationConfig()
        self.config.max_new_tokens = 1
        self.config.set_eos_token_id(NO_TOKEN)
        self.config.num_beams = self.config.num_return_sequences = count
        self.config.logprobs = 1
        self.searches: deque[tuple[int, float, genai.GenerationHandle]] = deque()
        self.cache_is_full = False

    def search(self, tokens: list[int], logprobs: list[Logprobs]) -> None:
        """Begin a search for each of these new tokens; it ends with the next step."""
        for token, own in zip(tokens, logprobs, strict=True):
            handle = self.pipeline.add_request(next(self.numbers), tensor(self.tokens), self.config)
            self.searches.append((token, own.logprob, handle))
            self.tokens.append(token)

    def found(self) -> tuple[list[int], list[Logprobs]]:
        """Return the new tokens whose searches have ended, in their order."""
        tokens, logprobs = [], []
        while self.searches and self.searches[0][2].get_status() != genai.GenerationStatus.RUNNING:
            token, logprob, handle = self.searches.popleft()
            self.cache_is_full = self.cache_is_full or handle.get_status() == genai.GenerationStatus.IGNORED
            outputs = handle.read().values() if handle.can_read() else ()
            top = sorted(((output.score, output.generated_ids[0]) for output in outputs), reverse=True)
            tokens.append(token)
            logprobs.append(Logprobs(logprob, [(id, score) for score, id in top]))
        return tokens, logprobs

    def cancel(self) -> None:
        for _, _, handle in self.searches:
            handle.cancel()
