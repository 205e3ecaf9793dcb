"""Backend `tokenizer`: turns text into token tensors."""

from __future__ import annotations

from functools import partial

import triton_python_backend_utils as pb_utils

from serving.text.tokenization import PADDING, Rows, Tokenization
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter
from serving.triton.types import InstanceArgs, ModelConfig, Tensors


class TritonPythonModel(BatchBackend[Rows]):
    counters = ("texts", "truncated_texts", "tokens", "padding_tokens")

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        outputs = config["output"]
        dtypes = {tensor["name"]: pb_utils.triton_string_to_numpy(tensor["data_type"]) for tensor in outputs}
        padding = choice_parameter(config, "padding", PADDING, "none")
        self.tokenization = Tokenization(config, args, dtypes, padding)

    def prepare(self, request: pb_utils.InferenceRequest) -> Rows:
        return self.tokenization.prepare(request)

    def run_batch(self, jobs: list[Rows]) -> list[Tensors | responses.Later]:
        quick = [rows for rows in jobs if rows.shortened is not None]
        tensors = iter(self.tokenize(quick))
        return [
            self.tokenization.beside_batches(partial(self.respond_later, rows))
            if rows.shortened is None
            else next(tensors)
            for rows in jobs
        ]

    def respond_later(self, rows: Rows, response: responses.Response) -> None:
        (tensors,) = self.tokenize([rows])
        response.send(tensors)

    def tokenize(self, jobs: list[Rows]) -> list[Tensors]:
        requests = self.tokenization.run(jobs)
        self.metrics.add(**{name: sum(getattr(tokens, name) for tokens in requests) for name in self.counters})
        return [tokens.tensors for tokens in requests]
