"""Hugging Face tokenizers: text in, token tensors out, one encode_batch for all requests of an execution."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import serving
from shared.config import choice_parameter, int_parameter, parameter
from shared.errors import BadRequest, ConfigError
from shared.metrics import Metrics

# Output tensor -> the field of a tokenizers.Encoding that fills it.
FIELDS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "special_tokens_mask": "special_tokens_mask",
}
PADDING = ("none", "bucket", "max_length", "longest")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"]) / args["model_version"] / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: put the model's tokenizer.json there, or run `make models`")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.set_lengths(config)
        (text,) = config["input"]
        self.text = text["name"]
        self.outputs = {}
        for output in config["output"]:
            if output["name"] not in FIELDS:
                raise ConfigError(f"no output '{output['name']}' here; there are {', '.join(FIELDS)}")
            self.outputs[output["name"]] = pb_utils.triton_string_to_numpy(output["data_type"])
        self.metrics = Metrics(args, "texts", "truncated_texts", "tokens", "padding_tokens")

    def set_lengths(self, config: dict) -> None:
        """Truncation as in tokenizer.json unless the config says otherwise; padding is always the config's."""
        stated = self.tokenizer.truncation
        self.max_length = int_parameter(config, "max_length", stated["max_length"] if stated else 0)
        if not self.max_length:
            raise ConfigError("tokenizer.json sets no maximum: say one in the parameter 'max_length'")
        self.tokenizer.enable_truncation(**{**(stated or {}), "max_length": self.max_length})
        pad = self.tokenizer.padding or {}
        self.pad_left = pad.get("direction") == "left"
        self.pad_values = dict.fromkeys(FIELDS, 0) | {
            "input_ids": pad.get("pad_id", 0),
            "token_type_ids": pad.get("pad_type_id", 0),
            "special_tokens_mask": 1,
        }
        self.tokenizer.no_padding()
        self.padding = choice_parameter(config, "padding", PADDING, "none")
        widths = parameter(config, "buckets", "16,32,64,128,256,512").split(",")
        if not all(width.strip().isdecimal() for width in widths):
            raise ConfigError("parameter 'buckets' must be whole numbers with commas between them")
        # What no bucket holds goes to max_length, so that truncated texts of any model have a place.
        self.buckets = sorted(min(int(width), self.max_length) for width in widths)

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> list[str]:
        tensor = serving.input_tensor(request, self.text)
        texts = []
        for row, value in enumerate(tensor.ravel()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError as error:
                raise BadRequest(f"input '{self.text}': row {row} is not valid UTF-8 (byte {error.start})") from None
        return texts

    def run(self, batch: list[list[str]]) -> list[dict[str, np.ndarray]]:
        encodings = self.tokenizer.encode_batch_fast([text for texts in batch for text in texts])
        lengths = [len(encoding) for encoding in encodings]
        longest = max(lengths, default=0)
        ends = itertools.accumulate(map(len, batch))
        groups = [encodings[end - len(texts) : end] for texts, end in zip(batch, ends, strict=True)]
        rectangles = [self.rectangle(group, longest) for group in groups]
        cells = sum(next(iter(tensors.values())).size for tensors in rectangles)
        self.metrics.add(
            texts=len(encodings),
            truncated_texts=sum(bool(encoding.overflowing) for encoding in encodings),
            tokens=sum(lengths),
            padding_tokens=cells - sum(lengths),
        )
        return rectangles

    def rectangle(self, encodings: list, longest: int) -> dict[str, np.ndarray]:
        """One request's rows as tensors, padded as the policy says."""
        lengths = [len(encoding) for encoding in encodings]
        width = self.width(max(lengths, default=0), longest)
        tensors = {}
        for name, dtype in self.outputs.items():
            tensors[name] = np.full((len(encodings), width), self.pad_values[name], dtype)
            for row, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
                cells = slice(width - length, width) if self.pad_left else slice(0, length)
                tensors[name][row, cells] = getattr(encoding, FIELDS[name])
        return tensors

    def width(self, own: int, longest: int) -> int:
        if self.padding == "max_length":
            return self.max_length
        if self.padding == "longest":
            return longest
        if self.padding == "bucket":
            return min((b for b in self.buckets if b >= own), default=self.max_length)
        return own

    def reply(self, request, tensors: dict[str, np.ndarray]):
        wanted = serving.wanted_outputs(request, self.outputs)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in wanted])
