"""Backend `onnx_generate`: continues texts with an ONNX language model that the same server serves.

It generates greedily, one token per run, for the texts of all requests together. A text joins between two runs and
leaves as soon as it ends, because each has its own past (the model's keys and values of earlier tokens).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.generation.continuous import ContinuousGeneration, EngineStats, NewTokens, TokenEngine
from serving.generation.row import Options
from serving.text.prompts import RULES, TEXT_OUTPUT, PromptRequest
from serving.text.tokenizer import TextTokenizer
from serving.triton import responses
from serving.triton.parameters import parameter, version_file
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors
from triton_transformers.engines import TextEngine

COUNT = "max_new_tokens"
DEFAULTS = {COUNT: {"string_value": "20"}}
DETAILS = ("finish_reason", "num_input_tokens", "num_output_tokens")


class TritonPythonModel(ContinuousGeneration):
    text_engine = TextEngine("onnx_generate", "onnx_generate")
    names = ("TEXT", "out")
    rules = {name: RULES[name] for name in (COUNT, "exclude_input_in_output", *(f"return_{name}" for name in DETAILS))}  # noqa: RUF012

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        super().set_up(config | {"parameters": DEFAULTS | config.get("parameters", {})}, args)

    def load_model(self, config: ModelConfig, args: InstanceArgs) -> TextTokenizer:
        path = version_file(args, "generation_config.json")
        generation = json.loads(path.read_text())
        limits = {"context": generation["max_length"], "end_tokens": generation["eos_token_id"]}
        self.model_name = parameter(config, "model", "gpt2")
        return self.use(TextTokenizer(path.parent, limits), ModelEngine(self.model_name))

    def placement(self) -> str:
        return f"continues texts with model '{self.model_name}'"

    def echoes(self, read: PromptRequest, streams: bool) -> bool:
        return read.echoes(TEXT_OUTPUT in read.outputs)


@dataclass
class Text:
    """One text that is being continued."""

    unread: list[int]  # tokens that the model has not seen: the prompt, then the newest token
    max_new_tokens: int
    length: int = 0  # number of tokens that the model has seen
    past: Array = field(default_factory=lambda: np.empty((0, 0)))  # their keys and values: [positions, numbers]

    def mark_read(self, present: Array) -> None:
        """Append the unread tokens' keys and values, which are the last rows of `present` [tokens, numbers]."""
        if not self.length:
            self.past = np.empty((len(self.unread) + self.max_new_tokens, present.shape[1]), present.dtype)
        seen = slice(self.length, self.length + len(self.unread))
        self.past[seen] = present[-len(self.unread) :]
        self.length = seen.stop


class ModelEngine(TokenEngine):
    """Takes the most probable tokens from another model of the server."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.texts: dict[int, Text] = {}
        self.batch_inputs = BatchInputs()

    def add(self, key: int, tokens: list[int], options: Options) -> None:
        """Load the model if necessary: docs/triton-faults.md#errors-of-called-models."""
        if not pb_utils.is_model_ready(self.model):
            pb_utils.load_model(self.model)
        self.texts[key] = Text(tokens, options.max_new_tokens)

    def cancel(self, key: int) -> None:
        self.texts.pop(key, None)

    def step(self) -> list[NewTokens]:
        """Run new texts apart from the others: they have a whole prompt unread, the others one token."""
        new_tokens = []
        for is_new in (False, True):
            if not (batch := {key: text for key, text in self.texts.items() if (not text.length) == is_new}):
                continue
            texts = [*batch.values()]
            logits, present = self.run_model(self.batch_inputs(texts))
            present = present.reshape(len(texts), max(len(text.unread) for text in texts), -1)
            for key, token, own_present in zip(batch, logits.argmax(axis=1).tolist(), present, strict=True):
                batch[key].mark_read(own_present)
                batch[key].unread = [token]
                new_tokens.append(NewTokens(key, [token], finished=False))
        return new_tokens

    def run_model(self, inputs: Tensors) -> list[Array]:
        outputs = ["logits", "present"]
        tensors = responses.infer(self.model, inputs, outputs)
        return [tensors[name] for name in outputs if name in tensors]

    def stats(self) -> EngineStats:
        return EngineStats(cache_usage=0)

    def close(self) -> None: ...


class BatchInputs:
    """Builds the model's inputs for a batch of texts, with `past` in the same memory each time.

    The past of 8 texts of 70 tokens takes 41 MB with GPT-2, and new pages from the system take five times as long to
    fill.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(0, np.float32)

    def __call__(self, texts: list[Text]) -> Tensors:
        """Pad each past on its right and new tokens on their left.

        The mask marks what counts; the graph takes each token's position from it.
        """
        new, before = max(len(text.unread) for text in texts), max(text.length for text in texts)
        ids = np.zeros((len(texts), new), np.int64)
        mask = np.zeros((len(texts), before + new), np.int64)
        past = self.past(len(texts), before, texts[0].past.shape[1] if before else 0)
        for i, text in enumerate(texts):
            ids[i, new - len(text.unread) :] = text.unread
            mask[i, : text.length] = 1
            mask[i, before + new - len(text.unread) :] = 1
            if text.length:
                past[i, : text.length] = text.past[: text.length]
        return {"input_ids": ids, "attention_mask": mask, "past": past.reshape(len(texts), -1)}

    def past(self, *shape: int) -> Array:
        """Return uncleared memory: old values stay where no row writes, and there the mask is 0."""
        size = int(np.prod(shape))
        if size > self.memory.size:
            self.memory = np.zeros(2 * size, np.float32)
        return self.memory[:size].reshape(shape)
