"""Base class of text encoders that run the texts of many requests in packed runs.

It sorts the rows of all requests by length, cuts them into the cheapest set of runs and scatters the results back. A
run is an ONNX graph (backend packed_onnx), a PyTorch module (serving/encoders/on_torch.py) or a compiled model (backend
neuron).
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders.late_chunking import SPANS, SpanAnswers, SpanTokenization
from serving.encoders.long_requests import LongRequest, LongRequests
from serving.encoders.multi_vector import MULTI_VECTOR, MultiVectorAnswers, MultiVectorTokenization
from serving.engines.measurements import Measured, recall_or_measure
from serving.engines.packing import (
    MAXIMUM_TOKENS,
    Cost,
    RunCost,
    cheapest_cut,
    equal_lengths,
    flat_cut,
    row_lengths,
    spread_cut,
)
from serving.text.embedding_prompts import NAME, alternatives
from serving.text.token_ids import TOKENIZED, TokenIds
from serving.text.tokenization import (
    NUMBERS,
    PRESENT,
    REQUEST_CHARACTERS,
    TOKEN_COUNT,
    Answers,
    Rows,
    Tokenization,
    Tokens,
    is_set,
)
from serving.triton import responses, tracing
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, flag_parameter, int_parameter, mask_name, parameter
from serving.triton.types import Array, BadRequest, ConfigError, InstanceArgs, ModelConfig, Tensors

# Increase it when a new version of this project may measure another cost.
COST_VERSION = 3
SHORT = 16  # tokens
# A request is long if it takes longer than a run of so many short texts. Its rows then run in turns of that time.
# Larger runs computed no more tokens per second, with AMX and without.
TURN_ROWS = 16
# More long requests than these wait in Triton's queue, which Triton can bound.
WAITING = 64
# An output of a model that takes texts: the texts that it accepted, for a step after it.
TEXT = "text"
# The outputs that need no run.
OTHERS = (TEXT, TOKENIZED, TOKEN_COUNT)
# The name of a prompt -> the parameter that names its route; the last one is for all other requests.
ROUTES = {"query": "query_route", "document": "document_route", "": "default_route"}


@dataclass(frozen=True)
class TokenRequest:
    """One request: its token tensors [rows, width], each row's length without padding, and the requested outputs."""

    tokens: Tensors
    lengths: Array
    width: int
    outputs: list[str]
    traced: tracing.Traced | None = None
    others: Tensors = field(default_factory=dict)  # outputs that need no run
    finish: Callable[[Tensors], Tensors] = lambda outputs: outputs  # makes the requested outputs of the encoder's


class TimedRun(NamedTuple):
    """A run of these rows: when packing began, the model, the scattering of its results, and when that ended."""

    start_ns: int
    model_ns: int
    scatter_ns: int
    end_ns: int
    rows: Array


Run = Callable[[list[str], Tensors], list[Array]]


@dataclass(frozen=True)
class Encoder:
    """A model that takes token tensors [rows, length]."""

    inputs: dict[str, type]  # name -> numpy type; an input that requests lack is fed zeros
    outputs: list[str]
    per_token: set[str]  # the outputs that have a vector for each token
    run: Run
    run_alone: Run | None = None  # what runs while nothing else does; None: `run`
    parallel_runs: int = 1
    independent_runs: int | None = None  # as many of them as do not slow each other down; None: all
    cost: Cost | None = None  # None: measure it when the model is loaded
    # What a measured cost depends on; None: measure it at each load.
    cost_depends_on: Callable[[], Measured] | None = None
    # The shape that a run of (rows, length) is padded to, for models that take only some shapes.
    shape: Callable[[int, int], tuple[int, int]] = lambda rows, length: (rows, length)
    short: int = SHORT  # tokens of a short text, which the model accepts
    # Pad runs of several rows to a multiple of this, for engines whose first run of a shape is slow.
    length_step: int = 1
    is_flat: bool = False  # a run costs its tokens, whatever their texts' lengths
    rounds_alone: bool = False  # pad a run of one row, too
    skips_padding: bool = False  # compute the padding of a run in attention only
    # The layers after the pooling, for the vectors [rows, width] of spans.
    head: Callable[[Array], Array] | None = None


@dataclass(frozen=True)
class TextRequest:
    """One request of a model that takes texts, and the requested outputs."""

    rows: Rows
    outputs: list[str]


class PackedEncoder(BatchBackend[TokenRequest | TextRequest]):
    """A backend for texts, or for ragged batches of their tokens (`allow_ragged_batch: true`)."""

    counters = ("texts", "truncated_texts", "tokens", "padding_tokens", "runs")
    tokenization: Tokenization | None = None  # of a model that takes texts
    answers = Answers()
    text_outputs: Sequence[str] = ()  # that requests may name

    @abstractmethod
    def load_encoder(self, config: ModelConfig, args: InstanceArgs) -> Encoder: ...

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        if any(tensor["data_type"] == "TYPE_STRING" for tensor in config["input"]):
            config = self.set_up_tokenization(config, args)
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.mask = mask_name(config)
        if self.mask not in self.inputs:
            raise ConfigError(
                f"no input '{self.mask}': packing needs the mask to know a row's length; name it in parameter 'mask'"
            )
        # A model that finds a text's last token by the padding token's id needs that id in every padded column.
        self.pad_values = {"input_ids": int_parameter(config, "pad_token_id", 0)}
        padding = choice_parameter(config, "padding", ("longest", "none", "max_length"), "longest")
        self.pads, self.fills_rows = padding != "none", padding == "max_length"
        self.masks_padding = flag_parameter(config, "masks_padding", True)
        self.encoder = self.load_encoder(config, args)
        self.answers.use_head(self.encoder.head)
        self.workers = ThreadPoolExecutor(self.encoder.parallel_runs)
        self.maximum_rounded = self.longest_accepted() if self.encoder.length_step > 1 and self.pads else 0
        self.tokens_of_run = MAXIMUM_TOKENS  # of a flat one, until it is measured
        self.cost: Cost = self.encoder.cost or self.measured_cost(config, args)
        self.seconds_alone = lru_cache(lambda length: self.cost(np.array([1]), length))
        # The cheapest runs, because a compiled model may take fewer rows at once.
        turn_rows = self.tokens_of_run // self.encoder.short if self.encoder.is_flat else TURN_ROWS
        turn_seconds = float(self.seconds_of_rows(np.full(turn_rows, self.encoder.short)).sum())
        self.long_requests = LongRequests(turn_seconds, self.encoder.parallel_runs, self.run_rows, self.answer)

    def finalize(self) -> None:
        self.long_requests.close()
        super().finalize()

    def set_up_tokenization(self, config: ModelConfig, args: InstanceArgs) -> ModelConfig:
        """Return the configuration with the tokens in place of the texts."""
        texts = [tensor for tensor in config["input"] if tensor["name"] != SPANS]
        if others := [tensor["name"] for tensor in texts if tensor["data_type"] != "TYPE_STRING"]:
            raise ConfigError(f"input '{others[0]}' is no text: give the model texts (TYPE_STRING) or tokens, not both")
        names = parameter(config, "tokens", "input_ids,attention_mask").replace(" ", "").split(",")
        if unknown := [name for name in names if name not in NUMBERS]:
            raise ConfigError(f"parameter 'tokens': unknown tensor '{unknown[0]}'; use {', '.join(NUMBERS)}")
        dtypes = dict.fromkeys(names, np.int64) | {TOKEN_COUNT: np.int32}
        padding = "max_length" if parameter(config, "padding") == "max_length" else "none"
        self.tokenization, self.answers = text_model(config, args, dtypes, padding)
        if len(self.tokenization.inputs) > 1 and any(tensor["name"] == TEXT for tensor in config["output"]):
            raise ConfigError(f"a model of pairs of texts has no output '{TEXT}'")
        # A text without tokens is a row of padding, which only tables of vectors accept.
        self.tokenization.min_length, self.tokenization.min_width = int_parameter(config, "min_length", 1), 1
        self.text_outputs = [tensor["name"] for tensor in config["output"]]
        own = [tensor for tensor in config["output"] if tensor["name"] not in OTHERS]
        return config | {
            "input": [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in names],
            "output": self.answers.encoder_outputs(own),
        }

    def measured_cost(self, config: ModelConfig, args: InstanceArgs) -> RunCost:
        max_rows, depends_on = max(1, config["max_batch_size"]), self.encoder.cost_depends_on
        own = {"measuring": COST_VERSION, "parallel_runs": self.encoder.parallel_runs, "max_rows": max_rows}
        how = "measured before"

        def measure() -> Measured:
            nonlocal how
            how = "measured"
            if self.encoder.is_flat:
                flat, tokens = RunCost.measure_flat(self.seconds_of_run, self.encoder.short)
                return asdict(flat) | {"tokens": tokens}
            return asdict(RunCost.measure(self.seconds_of_run, max_rows))

        if depends_on is None:
            terms = measure()
        else:
            terms = recall_or_measure(
                f"{args['model_name']}-{args['model_version']}-cost",
                lambda: depends_on() | own,
                measure,
                lambda kept: (
                    all(0 <= kept[term.name] < math.inf for term in fields(RunCost))
                    and (not self.encoder.is_flat or kept["tokens"] > 0)
                ),
            )
        self.tokens_of_run = terms.get("tokens", MAXIMUM_TOKENS)
        if how != "measured":
            self.seconds_of_run(1, SHORT)  # the first run of a model takes longer, which no client should notice
        cost = RunCost(*(terms[term.name] for term in fields(RunCost)))
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {self.encoder.parallel_runs} run(s) in parallel; a run costs "
            f"{cost.per_run * 1e3:.2f} ms and {cost.per_token * 1e6:.2f} us per token ({how})"
            + (f", for up to {self.tokens_of_run} tokens" if self.encoder.is_flat else "")
        )
        return cost

    def longest_accepted(self) -> int:
        """Return a length that the model accepts: it may not accept the next multiple of `length_step`."""
        for length in (512, 256, 128, 64, 32, 16):
            with contextlib.suppress(Exception):
                self.seconds_of_run(1, length)
                return length
        return 0

    def rounded(self, lengths: Array) -> Array:
        """Return the length to pad each row to: multiples of `length_step`, so that there are fewer shapes."""
        step = self.encoder.length_step
        rounded: Array = np.maximum(lengths, np.minimum(-(-lengths // step) * step, self.maximum_rounded))
        return rounded

    def seconds_of_run(self, rows: int, length: int) -> float:
        """Time a run of this shape while all workers run the same shape."""
        feed: Tensors = {
            name: np.full((rows, length), int(name in self.inputs), dtype)
            for name, dtype in self.encoder.inputs.items()
        }
        start = time.perf_counter()
        list(
            self.workers.map(lambda _: self.encoder.run(self.encoder.outputs, feed), range(self.encoder.parallel_runs))
        )
        return (time.perf_counter() - start) / self.encoder.parallel_runs

    def prepare(self, request: pb_utils.InferenceRequest) -> TokenRequest | TextRequest:
        if self.tokenization:
            rows = self.tokenization.prepare(request)
            if not rows.texts:
                raise BadRequest(f"input '{self.tokenization.inputs[0]}' has no rows")
            outputs = responses.requested_outputs(request, self.text_outputs)
            if TOKENIZED in outputs and {*outputs} <= {*OTHERS}:
                rows = rows._replace(runs=False)
                if rows.characters > REQUEST_CHARACTERS * self.tokenization.max_length:
                    rows = rows._replace(shortened=None)  # all of the texts is tokenized
            return TextRequest(rows, outputs)
        outputs = responses.requested_outputs(request, self.encoder.outputs)
        traced = tracing.traced(request, time.time_ns())
        tokens = {name: responses.input_tensor(request, name) for name in self.inputs}
        mask = tokens[self.mask]
        if mask.ndim != 2 or not mask.size:
            raise BadRequest(f"input '{self.mask}' must have shape [rows, tokens] with at least one row and one token")
        for name, array in tokens.items():
            if array.shape != mask.shape:
                raise BadRequest(
                    f"input '{name}' has shape {list(array.shape)}, but '{self.mask}' has {list(mask.shape)}"
                )
        return TokenRequest(tokens, row_lengths(mask), mask.shape[1], outputs, traced)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        """Answer the short requests. The long ones leave Triton's queue, where short ones would wait behind them."""
        answers = super().execute(requests)
        while len(self.long_requests.waiting) > WAITING:
            self.long_requests.take_turn()
        return answers

    def run_batch(self, jobs: list[TokenRequest | TextRequest]) -> Sequence[Tensors | Exception | responses.Later]:
        if not self.tokenization:
            return self.run_tokens(cast(list[TokenRequest], jobs))
        return self.run_texts(self.tokenization, cast(list[TextRequest], jobs))

    def run_texts(
        self, tokenization: Tokenization, jobs: list[TextRequest]
    ) -> Sequence[Tensors | Exception | responses.Later]:
        """Tokenize, and run what can be tokenized as one batch."""
        results: dict[int, Tensors | Exception | responses.Later] = {}
        quick = {number: job for number, job in enumerate(jobs) if job.rows.shortened is not None}
        tokenized = responses.run_apart({number: job.rows for number, job in quick.items()}, tokenization.run)
        requests: dict[int, TokenRequest] = {}
        for number, job in enumerate(jobs):
            tokens = tokenized.get(number)
            if tokens is None:
                results[number] = tokenization.beside_batches(partial(self.run_later, tokenization, job))
            elif isinstance(tokens, Exception):
                results[number] = tokens
            else:
                requests[number] = self.token_request(tokenization, job, tokens)
        to_run = {number: request for number, request in requests.items() if request.outputs}
        results |= {number: self.answer(request, []) for number, request in requests.items() if not request.outputs}
        if to_run:
            results |= zip(to_run, self.run_tokens([*to_run.values()]), strict=True)
        self.count_texts([tokens for tokens in tokenized.values() if isinstance(tokens, Tokens)])
        return [results[number] for number in range(len(jobs))]

    def run_later(self, tokenization: Tokenization, job: TextRequest, response: responses.Response) -> None:
        """Tokenize a request in this thread, and let its rows run in turns."""
        (tokens,) = tokenization.run([job.rows])
        self.count_texts([tokens])
        request = self.token_request(tokenization, job, tokens)
        if request.outputs:
            self.add_long(request, self.seconds_of_rows(request.lengths), response)
        else:
            response.send(self.answer(request, []))

    def token_request(self, tokenization: Tokenization, job: TextRequest, tokens: Tokens) -> TokenRequest:
        mask = tokens.tensors[self.mask]
        own = [name for name in job.outputs if name not in OTHERS]
        outputs = self.answers.needed(own, job.rows)
        lengths = row_lengths(tokens.tensors.get(PRESENT, mask))
        if self.fills_rows:  # the model was trained on rows of one length
            lengths = np.full(len(mask), mask.shape[1])
            if not self.masks_padding:
                mask[:] = 1
        others = {TOKEN_COUNT: tokens.tensors[TOKEN_COUNT]}
        if TEXT in job.outputs:
            texts = [tokenization.decode(text, True) if isinstance(text, TokenIds) else text for text in job.rows.texts]
            others[TEXT] = np.array([[text.encode()] for text in texts], np.object_)
        if TOKENIZED in job.outputs:
            empty = np.full((len(job.rows.firsts), 1), b"", np.object_)
            others[TOKENIZED] = empty if outputs else tokenization.tokenized(job.rows)
        return TokenRequest(
            tokens={name: tokens.tensors[name] for name in self.inputs},
            lengths=lengths,
            width=mask.shape[1],
            outputs=outputs,
            traced=job.rows.traced and job.rows.traced._replace(since_ns=time.time_ns()),
            others=others,
            finish=partial(self.answers.finished, own, job.rows, tokens.tensors),
        )

    def count_texts(self, requests: list[Tokens]) -> None:
        self.metrics.add(
            texts=sum(tokens.texts for tokens in requests),
            truncated_texts=sum(tokens.truncated_texts for tokens in requests),
        )

    def run_tokens(self, jobs: list[TokenRequest]) -> list[Tensors | responses.Later]:
        """Run the rows of all short requests. The others run in turns."""
        seconds = [self.seconds_of_rows(job.lengths) for job in jobs]
        long = {number for number, of_rows in enumerate(seconds) if of_rows.sum() > self.long_requests.seconds}
        if len(long) == len(jobs) and all(len(job.lengths) == 1 for job in jobs):
            long -= {*range(self.encoder.parallel_runs)}  # Triton collects the next texts while these run
        rows = [(job, row) for number, job in enumerate(jobs) if number not in long for row in range(len(job.lengths))]
        if rows:
            with self.long_requests.batch():
                results = iter(self.run_rows(rows))
        return [
            responses.Later(partial(self.add_long, job, seconds[number]))
            if number in long
            else self.answer(job, [next(results) for _ in job.lengths])
            for number, job in enumerate(jobs)
        ]

    def seconds_of_rows(self, lengths: Array) -> Array:
        """Return the seconds that each row adds, in ascending order of their lengths, if no others run with them."""
        if len(lengths) == 1:
            return self.seconds_alone(int(lengths[0]))
        if self.encoder.is_flat and len(lengths) * lengths.max() <= self.tokens_of_run:  # one run
            return np.full(len(lengths), self.cost(lengths.sum(keepdims=True), 1) / len(lengths))
        lengths = np.sort(self.rounded(lengths))
        seconds = np.zeros(len(lengths))
        if self.encoder.is_flat:
            for start, end in flat_cut(lengths, self.tokens_of_run):
                seconds[start:end] = self.cost(lengths[start:end].sum(keepdims=True), 1) / (end - start)
            return seconds
        cuts = cheapest_cut(lengths, self.cost, self.encoder.skips_padding) if self.pads else equal_lengths(lengths)
        for start, end in cuts:
            tokens = lengths[start:end].sum(keepdims=True) if self.encoder.skips_padding else None
            seconds[start:end] = self.cost(np.array([end - start]), int(lengths[end - 1]), tokens) / (end - start)
        return seconds

    def add_long(self, request: TokenRequest, seconds: Array, response: responses.Response) -> None:
        # Triton reuses the memory of the inputs after the execution.
        request = replace(request, tokens={name: array.copy() for name, array in request.tokens.items()})
        self.long_requests.add(LongRequest(request, response, np.argsort(request.lengths, kind="stable"), seconds))

    def run_rows(self, rows: list[tuple[TokenRequest, int]]) -> list[dict[str, Array]]:
        """Pack these rows into runs, and return the outputs of each."""
        lengths = np.array([texts.lengths[row] for texts, row in rows])
        outputs = sorted({name for texts, _ in rows for name in texts.outputs})
        results: list[dict[str, Array]] = [{} for _ in rows]
        order = np.argsort(lengths, kind="stable")
        padded_lengths = self.rounded(lengths)
        timed: list[TimedRun] = []

        def shape(packed: Array) -> tuple[int, int]:
            last = packed[-1]  # the longest
            is_padded = self.encoder.rounds_alone or len(packed) > 1
            return self.encoder.shape(len(packed), int((padded_lengths if is_padded else lengths)[last]))

        def run(packed: Array, call: Run = self.encoder.run) -> None:
            start = time.time_ns()
            feed = self.feed([rows[i] for i in packed], *shape(packed))
            fed = time.time_ns()
            arrays = call(outputs, feed)
            computed = time.time_ns()
            for name, array in zip(outputs, arrays, strict=True):
                for i, result in zip(packed, array[: len(packed)], strict=True):
                    results[i][name] = result
            timed.append(TimedRun(start, fed, computed, time.time_ns(), packed))

        if self.encoder.is_flat:
            cuts = flat_cut(lengths[order], self.tokens_of_run)
        elif self.pads:
            cuts = spread_cut(
                padded_lengths[order],
                self.cost,
                self.encoder.independent_runs or self.encoder.parallel_runs,
                self.encoder.skips_padding,
            )
        else:
            cuts = equal_lengths(lengths[order])[::-1]
        runs = [order[start:end] for start, end in cuts]
        if len(runs) == 1:
            # Run in this thread: the way to another one and back would take longer than some runs.
            run(runs[0], self.encoder.run_alone or self.encoder.run)
        else:
            list(self.workers.map(run, runs))
        if tracing.sender:
            for steps in traced_steps(timed, [texts.traced for texts, _ in rows], lengths):
                tracing.sender.add(*steps)
        tokens = int(lengths.sum())
        is_unpadded = self.encoder.is_flat or self.encoder.skips_padding
        padded = tokens if is_unpadded else sum(math.prod(shape(packed)) for packed in runs)
        self.metrics.add(tokens=tokens, padding_tokens=padded - tokens, runs=len(runs))
        return results

    def answer(self, request: TokenRequest, results: list[dict[str, Array]]) -> Tensors:
        """Join the outputs of a request's rows."""
        outputs = {name: self.stack(name, [row[name] for row in results], request) for name in request.outputs}
        return request.finish(outputs) | request.others

    def feed(self, rows: list[tuple[TokenRequest, int]], count: int, length: int) -> Tensors:
        """Return the inputs of one run: these rows, padded to `count` rows of `length` tokens."""
        feed: Tensors = {
            name: np.full((count, length), self.pad_values.get(name, 0), dtype)
            for name, dtype in self.encoder.inputs.items()
        }
        for i, (texts, row) in enumerate(rows):
            end = texts.lengths[row]
            for name, array in texts.tokens.items():
                feed[name][i, :end] = array[row, :end]
        return feed

    def stack(self, name: str, results: list[Array], texts: TokenRequest) -> Array:
        """Return one request's rows of an output. A per-token output is padded to the width of the request."""
        if name not in self.encoder.per_token:
            return np.stack(results) if len(results) > 1 else results[0][None]
        out: Array = np.zeros((len(results), texts.width, *results[0].shape[1:]), results[0].dtype)
        for i, result in enumerate(results):
            end = texts.lengths[i]
            out[i, :end] = result[:end]
        return out


class RoutedEncoder(PackedEncoder):
    """A packed encoder, or one for each route of a Router of sentence-transformers.

    Each route has a folder in that of the version, and its own parameters.
    """

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.routes = {name: route for name, key in ROUTES.items() if (route := parameter(config, key))}
        self.encoders = {route: type(self)() for route in self.routes.values()}
        if not self.encoders:
            super().set_up(config, args)
        for route, encoder in self.encoders.items():
            encoder.set_up(*of_route(route, config, args))
            self.engine_labels = encoder.engine_labels

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        for encoder in self.encoders.values():
            encoder.metrics = self.metrics

    def finalize(self) -> None:
        for encoder in self.encoders.values():
            encoder.long_requests.close()
        if self.encoders:
            BatchBackend.finalize(self)
        else:
            super().finalize()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        if not self.encoders:
            return super().execute(requests)
        answers: dict[int, pb_utils.InferenceResponse | None] = {}
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            try:
                numbers[self.route(request)].append(number)
            except BadRequest as error:
                answers[number] = responses.error_response(error)
        for route, own in numbers.items():
            answers |= zip(own, self.encoders[route].execute([requests[number] for number in own]), strict=True)
        return [answers[number] for number in range(len(requests))]

    def route(self, request: pb_utils.InferenceRequest) -> str:
        """Return the route of all rows of a request."""
        names = responses.texts(request, NAME) if is_set(request, NAME) else []
        default = self.routes.get("", "")
        routes = {
            next((self.routes[choice] for choice in alternatives(name) if choice in self.routes), default)
            for name in names or [""]
        }
        if len(routes) > 1:
            raise BadRequest(f"input '{NAME}': send queries and documents in requests of their own")
        if "" in routes:
            raise BadRequest(f"input '{NAME}' must be {' or '.join(self.routes)}: this model has no other route")
        return routes.pop()


def of_route(route: str, config: ModelConfig, args: InstanceArgs) -> tuple[ModelConfig, InstanceArgs]:
    """Return the configuration and arguments of a route's encoder, with its own parameters and those of no route."""
    own, shared = {}, {}
    for name, value in config.get("parameters", {}).items():
        owner, dot, key = name.rpartition(".")
        if not dot and name not in ROUTES.values():
            shared[name] = value
        elif owner == route:
            own[key] = value
    folder = Path(args["model_repository"]) / args["model_version"]
    return config | {"parameters": shared | own}, args | {"model_repository": str(folder), "model_version": route}


def text_model(
    config: ModelConfig, args: InstanceArgs, dtypes: dict[str, Any], padding: str = "none"
) -> tuple[Tokenization, Answers]:
    """Return the model's tokenization, and the object that makes answers from its encoder's outputs."""
    if any(tensor["name"] == SPANS for tensor in config["input"]):
        return SpanTokenization(config, args, dtypes, padding), SpanAnswers(config)
    if (Path(args["model_repository"]) / args["model_version"] / MULTI_VECTOR).is_file():
        tokenization = MultiVectorTokenization(config, args, dtypes, padding)
        return tokenization, MultiVectorAnswers(tokenization)
    return Tokenization(config, args, dtypes, padding), Answers()


def traced_steps(
    runs: list[TimedRun], traced: list[tracing.Traced | None], lengths: Array
) -> Iterator[tuple[tracing.Step, ...]]:
    """Yield the steps of each run. `traced` and `lengths` have an entry for each row of the execution."""
    ahead: Counter[tracing.Traced] = Counter()
    longest_ahead = 0
    for number, run in enumerate(sorted(runs, key=lambda run: run.start_ns)):
        tokens: Counter[tracing.Traced] = Counter()
        for row in run.rows:
            if request := traced[row]:
                tokens[request] += int(lengths[row])
        longest = int(lengths[run.rows[-1]])
        before = {"runs_ahead": number, "longest_ahead": longest_ahead}
        together = {"rows": len(run.rows), "longest": longest}
        yield (
            tracing.Step("wait", None, run.start_ns, tokens, ahead.copy(), before),
            tracing.Step("pack", run.start_ns, run.model_ns, tokens),
            tracing.Step("run", run.model_ns, run.scatter_ns, tokens, tokens, together),
            tracing.Step("scatter", run.scatter_ns, run.end_ns, tokens),
        )
        ahead += tokens
        longest_ahead = max(longest_ahead, longest)
