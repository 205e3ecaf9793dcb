"""Base class of text encoders that run the texts of many requests in packed runs.

It reads and tokenizes the requests. A plan (plan.py) sorts the rows of all requests by length and cuts them into the
cheapest set of runs. The runs (runs.py) fill an ONNX graph (backend packed_onnx), a PyTorch module (on_torch.py) or a
compiled model (backend neuron). Each request is then answered with the results of its rows.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders.late_chunking import SPANS, SpanAnswers, SpanTokenization
from serving.encoders.long_requests import LongRequest, LongRequests
from serving.encoders.multi_vector import MULTI_VECTOR, MultiVectorAnswers, MultiVectorTokenization
from serving.encoders.plan import Encoder, Plan
from serving.encoders.runs import Runs, TokenRequest
from serving.encoders.token_answers import ANSWERS, TokenAnswers
from serving.engines.packing import row_lengths
from serving.text.token_ids import TokenIds
from serving.text.tokenization import (
    NUMBERS,
    PRESENT,
    REQUEST_CHARACTERS,
    Answers,
    Rows,
    Tokenization,
    Tokens,
)
from serving.triton import responses, tracing
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, flag_parameter, int_parameter, mask_name, parameter
from serving.triton.types import Array, BadRequest, ConfigError, InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import TOKEN_COUNT, TOKENIZED

# A request is long if it takes longer than a run of so many short texts. Its rows then run in turns of that time.
# Larger runs computed no more tokens per second, with AMX and without.
TURN_ROWS = 16
# More long requests than these wait in Triton's queue, which Triton can bound.
WAITING = 64
# An output of a model that takes texts: the texts that it accepted, for a step after it.
TEXT = "text"
# The outputs that need no run.
OTHERS = (TEXT, TOKENIZED, TOKEN_COUNT)


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
        self.plan = Plan(config, args, self.encoder, self.pads, pb_utils.Logger.log_info)
        # `metrics` is set after this method, and a RoutedEncoder replaces it.
        self.runs = Runs(self.plan, self.pad_values, lambda **counts: self.metrics.add(**counts))
        # The cheapest runs, because a compiled model may take fewer rows at once.
        turn_rows = self.plan.tokens_of_run // self.encoder.short if self.encoder.is_flat else TURN_ROWS
        turn_seconds = float(self.plan.seconds_of_rows(np.full(turn_rows, self.encoder.short)).sum())
        self.long_requests = LongRequests(turn_seconds, self.encoder.parallel_runs, self.runs.run_rows, self.answer)

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
        own = self.answers.encoder_outputs([tensor for tensor in config["output"] if tensor["name"] not in OTHERS])
        # Triton passes no name that the configuration lacks. `make models` compares the outputs of the graph.
        self.text_outputs = list(dict.fromkeys(tensor["name"] for tensor in [*config["output"], *own]))
        return config | {
            "input": [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in names],
            "output": own,
        }

    def prepare(self, request: pb_utils.InferenceRequest) -> TokenRequest | TextRequest:
        if self.tokenization:
            rows = self.tokenization.prepare(request)
            if not rows.texts:
                raise BadRequest(f"input '{self.tokenization.inputs[0]}' has no rows", self.tokenization.inputs[0])
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
            raise BadRequest(
                f"input '{self.mask}' must have shape [rows, tokens] with at least one row and one token", self.mask
            )
        for name, array in tokens.items():
            if array.shape != mask.shape:
                raise BadRequest(
                    f"input '{name}' has shape {list(array.shape)}, but '{self.mask}' has {list(mask.shape)}",
                    name,
                    self.mask,
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
            self.add_long(request, self.plan.seconds_of_rows(request.lengths), response)
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
        seconds = [self.plan.seconds_of_rows(job.lengths) for job in jobs]
        long = {number for number, of_rows in enumerate(seconds) if of_rows.sum() > self.long_requests.seconds}
        if len(long) == len(jobs) and all(len(job.lengths) == 1 for job in jobs):
            long -= {*range(self.encoder.parallel_runs)}  # Triton collects the next texts while these run
        rows = [(job, row) for number, job in enumerate(jobs) if number not in long for row in range(len(job.lengths))]
        if rows:
            with self.long_requests.batch():
                results = iter(self.runs.run_rows(rows))
        return [
            responses.Later(partial(self.add_long, job, seconds[number]))
            if number in long
            else self.answer(job, [next(results) for _ in job.lengths])
            for number, job in enumerate(jobs)
        ]

    def add_long(self, request: TokenRequest, seconds: Array, response: responses.Response) -> None:
        # Triton reuses the memory of the inputs after the execution.
        request = replace(request, tokens={name: array.copy() for name, array in request.tokens.items()})
        self.long_requests.add(LongRequest(request, response, np.argsort(request.lengths, kind="stable"), seconds))

    def answer(self, request: TokenRequest, results: list[dict[str, Array]]) -> Tensors:
        """Join the outputs of a request's rows."""
        outputs = {name: self.stack(name, [row[name] for row in results], request) for name in request.outputs}
        return request.finish(outputs) | request.others

    def stack(self, name: str, results: list[Array], texts: TokenRequest) -> Array:
        """Return one request's rows of an output. A per-token output is padded to the width of the request."""
        if name not in self.encoder.per_token:
            return np.stack(results) if len(results) > 1 else results[0][None]
        out: Array = np.zeros((len(results), texts.width, *results[0].shape[1:]), results[0].dtype)
        for i, result in enumerate(results):
            end = texts.lengths[i]
            out[i, :end] = result[:end]
        return out


def text_model(
    config: ModelConfig, args: InstanceArgs, dtypes: dict[str, Any], padding: str = "none"
) -> tuple[Tokenization, Answers]:
    """Return the model's tokenization, and the object that makes answers from its encoder's outputs."""
    if parameter(config, ANSWERS):
        answers = TokenAnswers(config, args)
        dtypes = dtypes | dict.fromkeys(answers.encoder.from_tokenizer, np.int64)
        return Tokenization(config, args, dtypes, padding), answers
    if any(tensor["name"] == SPANS for tensor in config["input"]):
        return SpanTokenization(config, args, dtypes, padding), SpanAnswers(config)
    if (Path(args["model_repository"]) / args["model_version"] / MULTI_VECTOR).is_file():
        tokenization = MultiVectorTokenization(config, args, dtypes, padding)
        return tokenization, MultiVectorAnswers(tokenization)
    return Tokenization(config, args, dtypes, padding), Answers()
