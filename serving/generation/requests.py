"""Requests of the task `text-generation`: reads and checks them, and queues their prompts.

Triton does not batch these requests, because the published request has no batch dimension. So execute() only checks a
request and queues its prompts; a thread generates, and responds when a text is done.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import random
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import triton_python_backend_utils as pb_utils

from serving.generation.adapters import check_adapter
from serving.generation.job import Job
from serving.generation.row import Options, Row
from serving.structure.checks import Structures
from serving.structure.worker import Structure
from serving.text.chat_template import IMAGES, MESSAGES
from serving.text.prompts import (
    NUMBERS,
    PROMPT,
    TEXT,
    TEXT_OUTPUT,
    Piece,
    PromptRequest,
    Rule,
    check_available,
    parameters,
    read_option,
    read_request,
)
from serving.text.token_ids import TokenIds, check_ids, tokenized
from serving.triton import responses
from serving.triton.backend import Backend
from serving.triton.heartbeats import Heartbeats
from serving.triton.metrics import REQUEST_COUNTERS
from serving.triton.parameters import flag_parameter, int_parameter, parameter, usable_cpus
from serving.triton.types import BadRequest, Busy, ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import TextEngine
from triton_transformers.errors import CONTEXT_LENGTH
from triton_transformers.protocol import CANCEL, TOKENIZED

if TYPE_CHECKING:
    from serving.generation.decoding import Decoder
    from serving.text.tokenizer import TextTokenizer
    from serving.vision.chat import ChatImages

# The options that chat templates read.
TEMPLATE_OPTIONS = ("tools", "chat_template_kwargs")
# Requests with more text than this are prepared aside: a megabyte takes a second.
LONG_BYTES = 100_000
# The default limit of an answer in a chat, for models whose context is unlimited.
CHAT_TOKENS = 1024


class TextGeneration(Backend):
    counters: ClassVar[tuple[str, ...]] = (
        "texts",
        "tokens",
        "padding_tokens",
        "generated_tokens",
        "first_tokens",
        "first_token_microseconds",
        "later_tokens",
        "later_token_microseconds",
        "runs",
        *REQUEST_COUNTERS,
    )
    gauges = ("running_texts", "waiting_texts", "cache_usage_ratio")
    default_max_batch = 32
    text_engine: ClassVar[TextEngine]

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.streams = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.defaults = default_options(config)
        # The names of the input with prompts, and of the output with texts.
        self.names = parameter(config, "prompt_input", PROMPT), parameter(config, "text_output", TEXT)
        self.max_batch = int_parameter(config, "max_batch", self.default_max_batch)
        self.max_waiting = int_parameter(config, "max_waiting", 1000)
        if self.max_batch < 1 or self.max_waiting < 1:
            raise ConfigError("parameters 'max_batch' and 'max_waiting' must be at least 1")
        self.waiting: queue.Queue[Row[Job] | None] = queue.Queue()
        # The jobs that another request may end, by the ids of their requests.
        self.cancellable: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()
        self.chat_images: ChatImages | None = None  # load_model() sets it for a model that takes images
        self.workers = ThreadPoolExecutor(usable_cpus(), thread_name_prefix="requests")
        # Prepared images take many times the memory of their files: those of the running batch and the next one exist.
        self.image_room = threading.Semaphore(2 * self.max_batch)
        self.image_requests = threading.Semaphore(self.max_waiting)  # those that wait for room, or are prepared
        self.model = self.load_model(config, args)
        self.structures = Structures(
            lambda: self.model.token_bytes(),
            sorted(self.model.end_tokens),
            flag_parameter(config, "client_grammars", False),
            lambda own: self.prepare_structure(own),
        )

    @abstractmethod
    def load_model(self, config: ModelConfig, args: InstanceArgs) -> Decoder | TextTokenizer:
        """Load the model. Raise ConfigError if it cannot be served."""

    @abstractmethod
    def placement(self) -> str:
        """Return the model's precision and device, for the log."""

    @abstractmethod
    def work(self) -> None:
        """Continue the rows of `waiting`, until it yields None."""

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        self.heartbeats = Heartbeats()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {self.placement()}, "
            f"context {self.model.context or 'unlimited'}, up to {self.max_batch} texts at a time"
        )

    def finalize(self) -> None:
        """End the thread. Triton unloads a model only after all its requests got responses, so no text waits."""
        self.structures.close()
        self.waiting.put(None)
        self.thread.join(timeout=2)
        self.heartbeats.close()
        super().finalize()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            sent: dict[str, Any] = {}
            try:
                sent = parameters(request)
                read = read_request(request, sent, *self.names)
                if id := read.options.get(CANCEL):
                    self.cancel(id)
                    responses.send_last(sender, read.response([Piece("", "", 0, 0)] * math.prod(read.shape)))
                    continue
                if read.outputs != [TOKENIZED]:
                    check_available(read, self.text_engine)
                if read.wants_heartbeats:
                    sender = self.heartbeats.sender(sender)
            except Exception as error:
                responses.send_last(sender, responses.error_response(error, responses.asks_typed(request)))
                continue
            accept = partial(self.accept, read, sender, request.request_id())
            # To prepare images or a long text takes seconds, and other requests wait for this thread.
            if read.images and self.image_requests.acquire(blocking=False):
                self.workers.submit(self.accept_images, accept)
            elif read.images:
                busy = Busy(f"{self.max_waiting} requests with images wait already: try again later")
                responses.send_last(sender, responses.error_response(busy, read.wants_typed_errors))
            elif responses.text_bytes(request) > LONG_BYTES:
                self.workers.submit(accept)
            else:
                accept()

    def accept_images(self, accept: Callable[..., None]) -> None:
        """Accept a request with images when there is room, which it holds until it is answered."""
        self.image_room.acquire()
        try:
            accept(on_finish=self.image_room.release)
        finally:
            self.image_requests.release()

    def accept(
        self,
        read: PromptRequest,
        sender: pb_utils.InferenceResponseSender,
        id: str,
        on_finish: Callable[[], object] | None = None,
    ) -> None:
        """Queue the prompts of a request, or answer it with the error."""
        try:
            if read.outputs == [TOKENIZED]:
                responses.send_last(sender, self.tokenized(read))
                if on_finish:
                    on_finish()
                return
            job = self.prepare(read, sender)
            job.on_finish = on_finish
            structure = read.options.get("structured_outputs")
            compiled = self.structures.compile(structure) if structure else None
        except Exception as error:
            responses.send_last(sender, read.error_response(error))
            if on_finish:
                on_finish()
            return
        for key in filter(None, (id, read.answer_key)):
            self.cancellable[key] = job
        if compiled:
            compiled.add_done_callback(partial(self.queue, job))
        else:
            self.queue(job)

    def queue(self, job: Job, compiled: Future[Any] | None = None) -> None:
        """Queue a job, with its structure if it has one. Fail the job if that could not be compiled."""
        try:
            structure = compiled.result() if compiled else None
        except Exception as error:
            job.fail(error)
            return
        for row in job.rows:
            row.options = dataclasses.replace(row.options, structured_outputs=structure)
            self.waiting.put(row)

    def prepare_structure(self, structure: Structure) -> Any:
        """Return a structure as the engine takes it; another thread generates meanwhile."""
        return structure

    def cancel(self, id: str) -> None:
        """End the request with this id: TRITON-FAULTS.md#cancellations."""
        if job := self.cancellable.get(id):
            job.end_requested = True

    def prepare(self, read: PromptRequest, sender: pb_utils.InferenceResponseSender) -> Job:
        can_stream = self.streams and not read.answer_key
        streams = read.options.get("stream", can_stream)
        if streams and not can_stream:
            raise BadRequest(
                "option 'stream' is true, but this model answers once: send it to <this model>_stream", "stream"
            )
        if streams and len(read.prompts) > 1:
            raise BadRequest(
                f"input '{read.name}' holds {len(read.prompts)} prompts; streaming takes one per request", read.name
            )
        for name in ("ignore_eos", "min_tokens"):
            if read.options.get("structured_outputs") and read.options.get(name):
                raise BadRequest(
                    f"options '{name}' and 'structured_outputs' exclude each other: the structure ends the text",
                    name,
                    "structured_outputs",
                )
        job = Job(read, sender, streams, self.echoes(read, streams), self.metrics)
        prompts = self.prompts(read)
        if len(prompts) > self.max_waiting:
            raise BadRequest(
                f"input '{read.name}' holds {len(prompts)} prompts; at most {self.max_waiting} may wait", read.name
            )
        if self.waiting.qsize() + len(prompts) > self.max_waiting:
            raise Busy(f"{self.waiting.qsize()} texts wait already: try again later")
        job.rows = [self.row(job, prompt, number) for number, prompt in enumerate(prompts)]
        return job

    def echoes(self, read: PromptRequest, streams: bool) -> bool:
        """Return whether texts begin with their prompts.

        Clients of vLLM's backend ask for a stream, without them. So do those of an output with another name.
        """
        has_prompts = self.names[1] == TEXT or TEXT_OUTPUT in read.outputs
        return read.echoes(default=has_prompts and not (streams and "stream" in read.options))

    def prompts(self, read: PromptRequest) -> list[str | TokenIds]:
        variables = [read.options.get(name) for name in TEMPLATE_OPTIONS]
        if read.messages is not None:
            messages = read.messages
            if self.chat_images:
                messages = self.chat_images.parts(messages, len(read.images))
            elif read.images:
                raise BadRequest(f"input '{IMAGES}': this model takes texts only", IMAGES)
            return [self.model.chat_template.prompt(messages, *variables)]
        for name, value in zip(TEMPLATE_OPTIONS, variables, strict=True):
            if value:
                raise BadRequest(f"option '{name}' is for the chat template: send '{MESSAGES}' with it", name, MESSAGES)
        return read.prompts

    def tokenized(self, read: PromptRequest) -> pb_utils.InferenceResponse:
        """Return the prompts in their other form: texts, or a chat, as token ids, and token ids as text."""
        prompts = self.prompts(read)
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, TokenIds):
                check_ids(prompt, self.model.vocabulary, read.name, number)
        is_chat = read.messages is not None  # whose template writes the special tokens
        rows = tokenized(
            prompts,
            lambda text, special: (self.encoded(read, text)[0] if is_chat else self.model.encode(text, special), None),
            self.model.decode,
            self.model.context,
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor(TOKENIZED, rows.reshape(read.shape))])

    def encoded(self, read: PromptRequest, prompt: str) -> tuple[list[int], Any]:
        """Return the tokens of a prompt, and the model's inputs for its images."""
        if self.chat_images and read.messages is not None:
            return self.chat_images.encode(prompt, read.images)
        return self.model.encode(prompt, special_tokens=read.messages is None), None

    def row(self, job: Job, prompt: str | TokenIds, number: int) -> Row[Job]:
        name, requested = job.request.name, job.request.options
        is_chat = job.request.messages is not None
        options: dict[str, Any] = {"seed": random.getrandbits(63), "stop": ()} | self.defaults
        if is_chat:
            options["max_new_tokens"] = self.model.context or CHAT_TOKENS
        options |= {name: requested[name] for name in Options.__dataclass_fields__ if name in requested}
        self.check_options(options)
        if "lora_name" in requested:
            options["adapter"] = self.find_adapter(requested["lora_name"])
        images = None
        if isinstance(prompt, TokenIds):
            check_ids(prompt, self.model.vocabulary, name, number)
            prompt, tokens = self.model.decode(prompt), [*prompt]
        else:
            tokens, images = self.encoded(job.request, prompt)
        if self.chat_images and not images:
            self.chat_images.check_text(tokens, name)
        if not tokens:
            raise BadRequest(f"input '{name}' is empty, and this model has no token to begin a text with", name)
        if max(tokens) >= self.model.vocabulary:
            raise BadRequest(f"input '{name}' has a token that the tokenizer knows and the model does not", name)
        if images and "prompt_logprobs" in requested:
            raise BadRequest(
                "option 'prompt_logprobs' is for prompts of text, and this one has images", "prompt_logprobs"
            )
        asked = options["max_new_tokens"]
        options["max_new_tokens"] = max(1, asked)
        room = (self.model.context or math.inf) - len(tokens)
        if room < max(1, requested.get("max_new_tokens", 1)):
            left = f"room for {room} new ones" if room > 0 else "no room for new ones"
            raise BadRequest(
                f"input '{name}' has {len(tokens)} tokens; in the model's context of {self.model.context} that "
                f"leaves {left}, and 'max_new_tokens' is {asked}",
                name,
                "max_new_tokens",
                code=CONTEXT_LENGTH,
            )
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
        self.check_options(options)
        row: Row[Job] = Row(prompt, tokens, Options(**options), job)
        row.drops_tokens = asked == 0
        row.images = self.seen(tokens, images) if images else images
        return row

    def seen(self, tokens: list[int], images: Any) -> Any:
        """Return the images of a prompt as Row holds them for the engine."""
        return images

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise BadRequest for values that do not fit the model or each other."""
        for name in ("stop_token_ids", "logit_bias"):
            if unknown := [id for id in options.get(name, ()) if id >= self.model.vocabulary]:
                raise BadRequest(
                    f"option '{name}' has the token id {unknown[0]}; this model's ids are 0 to "
                    f"{self.model.vocabulary - 1}",
                    name,
                )
        most = options["max_new_tokens"]
        if (least := options.get("min_tokens", 0)) > most:
            raise BadRequest(
                f"option 'min_tokens' is {least}, and 'max_new_tokens' is {most}: it must not be larger",
                "min_tokens",
                "max_new_tokens",
            )

    def find_adapter(self, name: str) -> Any:
        """Return the adapter as Options holds it for the engine. Raise BadRequest if the model does not have it."""
        check_adapter(name, ())

    def count_end(self, row: Row[Job]) -> None:
        """Count a text that has ended, and how long its client waited."""
        self.metrics.add(texts=1, tokens=len(row.prompt_tokens))
        if row.new_tokens:
            self.metrics.add(
                first_tokens=1,
                first_token_microseconds=round(1e6 * (row.first_token_at - row.owner.arrived_at)),
                later_tokens=row.new_tokens - 1,
                later_token_microseconds=round(1e6 * (row.last_token_at - row.first_token_at)),
            )


def default_options(config: ModelConfig) -> dict[str, Any]:
    """Return the config's options, for requests that do not set them."""
    values = {name: default_option(config, name, rule) for name, rule in NUMBERS.items()}
    return {name: value for name, value in values.items() if value is not None}


def default_option(config: ModelConfig, name: str, rule: Rule) -> float | None:
    if not (text := parameter(config, name)):
        return rule.default
    try:
        value: float = read_option(rule, "parameter", name, text)
    except BadRequest as error:
        raise ConfigError(f"{error}, not '{text}'") from None
    return value
