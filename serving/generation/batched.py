"""Task `text-generation` with transformers' generate(): continues the prompts that wait at the same time together."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

from serving.engines import pretrained
from serving.engines.lean_transformers import transformers
from serving.generation.adapters import AdapterFiles, adapted
from serving.generation.decoding import Decoder
from serving.generation.job import Job
from serving.generation.requests import TextGeneration
from serving.generation.row import Row
from serving.structure.worker import Structure, compile_structure
from serving.text.chat_template import IMAGES
from serving.triton.parameters import flag_parameter, has_input, int_parameter, weights_folder
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import TRANSFORMERS

# Each check whether a client still waits is a round trip to Triton.
CANCEL_CHECK_S = 0.25


class BatchedGeneration(TextGeneration):
    text_engine = TRANSFORMERS
    adapters: AdapterFiles | None = None

    def load_model(self, config: ModelConfig, args: InstanceArgs) -> Decoder:
        self.gather_s = int_parameter(config, "gather_milliseconds", 10) / 1000
        if self.gather_s < 0:
            raise ConfigError("parameter 'gather_milliseconds' must be at least 0")
        self.decoder = self.load_decoder(config, args)
        return self.decoder

    def load_decoder(self, config: ModelConfig, args: InstanceArgs) -> Decoder:
        self.adapters = AdapterFiles(weights_folder(config, args))
        if not has_input(config, IMAGES):
            model = pretrained.load(transformers.AutoModelForCausalLM, config, args)
            tokenizer = load_tokenizer(config, args)
        else:
            from serving.vision.chat import ChatImages

            self.chat_images = ChatImages(config, args)
            model = pretrained.load(transformers.AutoModelForImageTextToText, config, args)
            tokenizer = self.chat_images.tokenizer
        self.engine_labels = {"engine": TRANSFORMERS.name, "precision": pretrained.name_of(model.dtype)}
        return Decoder(model, tokenizer)

    def find_adapter(self, name: str) -> Any:
        return self.adapters.find(name) if self.adapters else super().find_adapter(name)

    def placement(self) -> str:
        """Return the model's precision and device, for the log."""
        return f"{pretrained.name_of(self.decoder.model.dtype)} on {self.decoder.model.device}"

    def prepare_structure(self, structure: Structure) -> Any:
        return compile_structure(self.decoder.compiler, structure)

    def work(self) -> None:
        while first := self.waiting.get():
            for batch in self.decoder.batches(self.gather(first)):
                self.run_apart(batch)

    def gather(self, first: Row[Job]) -> list[Row[Job]]:
        """Return all rows that wait or arrive within `gather_s`: clients of the last batch may ask again."""
        rows = [first]
        deadline = time.monotonic() + self.gather_s
        with contextlib.suppress(queue.Empty):
            while len(rows) < self.max_batch:
                row = self.waiting.get(timeout=max(0, deadline - time.monotonic()))
                if row is None:  # finalize() was called
                    self.waiting.put(None)
                    break
                rows.append(row)
        return rows

    def run_apart(self, rows: list[Row[Job]]) -> None:
        """Run the rows at once. If that fails, run each alone, so that only the row at fault gets the error."""
        rows = [row for row in rows if not row.done]
        error = self.run(rows) if rows else None
        if error and len(rows) == 1:
            rows[0].owner.fail(error)
        elif error:
            for row in rows:
                self.run_apart([row])

    def run(self, rows: list[Row[Job]]) -> Exception | None:
        jobs = {row.owner for row in rows}
        for job in jobs:
            job.begin()
        self.metrics.set(running_texts=len(rows), waiting_texts=self.waiting.qsize())
        self.count_padding([len(row.prompt_tokens) for row in rows])
        generated, next_check = 0, 0.0

        def after_token() -> None:
            nonlocal generated, next_check
            before, generated = generated, sum(row.new_tokens for row in rows)
            self.metrics.add(runs=1, generated_tokens=generated - before)
            check = time.monotonic() >= next_check
            if check:
                next_check = time.monotonic() + CANCEL_CHECK_S
            for job in jobs:
                job.update(check)

        try:
            for row in rows:
                self.score_prompt(row)
            with adapted(self.decoder.model, [row.options.adapter for row in rows]):
                self.decoder.generate(rows, after_token)
        except Exception as error:
            return error.with_traceback(None)  # the traceback's frames hold the batch's memory
        finally:
            self.metrics.set(running_texts=0)
        for row in rows:
            self.count_end(row)
        return None

    def row(self, job: Job, *arguments: Any) -> Row[Job]:
        row = super().row(job, *arguments)
        if row.options.prompt_logprobs is not None:
            self.decoder.check_scores(row.prompt_tokens)
        return row

    def score_prompt(self, row: Row[Job]) -> None:
        if (count := row.options.prompt_logprobs) is None or row.scored:
            return
        row.owner.end_if_cancelled()
        if not row.done:
            with adapted(self.decoder.model, [row.options.adapter]):
                scores = self.decoder.prompt_logprobs(row.prompt_tokens, count)
                row.score_prompt(scores, self.decoder.decode, self.decoder.bytes_of)

    def count_padding(self, lengths: list[int]) -> None:
        """Count what fills the prompts of these lengths up to the longest."""
        self.metrics.add(padding_tokens=max(lengths) * len(lengths) - sum(lengths))


def load_tokenizer(config: ModelConfig, args: InstanceArgs) -> transformers.PreTrainedTokenizerBase:
    tokenizer: transformers.PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
        weights_folder(config, args),
        local_files_only=True,
        trust_remote_code=flag_parameter(config, "trust_remote_code", False),
    )
    return tokenizer
