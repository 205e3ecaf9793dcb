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
from shared.config import choice_parameter, int_parameter, parameter, version_file
from shared.errors import BadRequest, ConfigError
from shared.metrics import Metrics

# Output tensor -> what of a tokenizers.Encoding fills it.
FIELDS = {
    "input_ids": lambda encoding: encoding.ids,
    "attention_mask": lambda encoding: encoding.attention_mask,
    "token_type_ids": lambda encoding: encoding.type_ids,
    "special_tokens_mask": lambda encoding: encoding.special_tokens_mask,
    # Characters of the text [start, end) that the token stands for.
    "offsets": lambda encoding: encoding.offsets,
    # 1 for the tokens of the second of two texts.
    "second_text_mask": lambda encoding: [int(part == 1) for part in encoding.sequence_ids],
}
# The output no text fills: what a language model keeps of earlier tokens, of which there are none. Its graph reads the
# number of earlier tokens from the mask and takes [rows, 0] for none, so nothing here need know the model's sizes.
PAST = "past"
TRUNCATION = ("longest_first", "only_first", "only_second", "none")
PADDING = ("none", "bucket", "max_length", "longest")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json", "the model's tokenizer.json")))
        self.set_lengths(config)
        self.texts = [tensor["name"] for tensor in config["input"]]
        if len(self.texts) > 2:
            raise ConfigError("a tokenizer takes one text, or two that belong together")
        self.outputs = {}
        for output in config["output"]:
            if output["name"] not in (*FIELDS, PAST):
                raise ConfigError(f"no output '{output['name']}' here; there are {', '.join((*FIELDS, PAST))}")
            self.outputs[output["name"]] = pb_utils.triton_string_to_numpy(output["data_type"])
        # The plain call is slower, and knows where in the text each token is.
        self.encode_batch = self.tokenizer.encode_batch_fast
        if "offsets" in self.outputs:
            self.encode_batch = self.tokenizer.encode_batch
        self.once = parameter(config, "exactly_one")
        if self.once and self.tokenizer.token_to_id(self.once) is None:
            raise ConfigError(f"parameter 'exactly_one': the tokenizer has no token '{self.once}'")
        self.metrics = Metrics(args, "texts", "truncated_texts", "tokens", "padding_tokens")

    def set_lengths(self, config: dict) -> None:
        """Truncation as in tokenizer.json unless the config says otherwise; padding is always the config's."""
        stated = self.tokenizer.truncation
        self.max_length = int_parameter(config, "max_length", stated["max_length"] if stated else 0)
        if not self.max_length:
            raise ConfigError("tokenizer.json sets no maximum: say one in the parameter 'max_length'")
        strategy = choice_parameter(config, "truncation", TRUNCATION, (stated or {}).get("strategy", TRUNCATION[0]))
        self.min_length = int_parameter(config, "min_length", 0)
        if strategy == "none":
            self.tokenizer.no_truncation()
        else:
            self.tokenizer.enable_truncation(**{**(stated or {}), "max_length": self.max_length, "strategy": strategy})
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

    def prepare(self, request) -> list:
        """Its rows: texts, or pairs of them."""
        columns = [serving.texts(request, name) for name in self.texts]
        if len({len(column) for column in columns}) > 1:
            raise BadRequest(f"inputs {', '.join(self.texts)}: there must be as many of the one as of the other")
        return list(zip(*columns, strict=True)) if len(columns) > 1 else columns[0]

    def encode(self, rows: list) -> list:
        try:
            return self.encode_batch(rows)
        except Exception as error:  # tokenizers' exceptions share no class of their own
            if "Truncation error" not in str(error):
                raise
            raise BadRequest(f"input '{self.texts[0]}' leaves no room for '{self.texts[-1]}': it is too long") from None

    def run(self, batch: list[list]) -> list[dict[str, np.ndarray]]:
        encodings = self.encode([row for rows in batch for row in rows])
        self.check_lengths(encodings)
        if self.once:
            self.check_once(encodings)
        lengths = [len(encoding) for encoding in encodings]
        longest = max(lengths, default=0)
        ends = itertools.accumulate(map(len, batch))
        groups = [encodings[end - len(rows) : end] for rows, end in zip(batch, ends, strict=True)]
        rectangles = [self.rectangle(group, longest) for group in groups]
        cells = sum(int(np.prod(next(iter(tensors.values())).shape[:2])) for tensors in rectangles)
        self.metrics.add(
            texts=len(encodings),
            truncated_texts=sum(bool(encoding.overflowing) for encoding in encodings),
            tokens=sum(lengths),
            padding_tokens=cells - sum(lengths),
        )
        return rectangles

    def check_lengths(self, encodings: list) -> None:
        for row, encoding in enumerate(encodings):
            if not self.min_length <= len(encoding) <= self.max_length:
                raise BadRequest(
                    f"input '{self.texts[0]}': text {row} has {len(encoding)} tokens; "
                    f"it must have {self.min_length} to {self.max_length}"
                )

    def check_once(self, encodings: list) -> None:
        """After truncation, which may have cut it off."""
        wanted = self.tokenizer.token_to_id(self.once)
        for row, encoding in enumerate(encodings):
            if encoding.ids.count(wanted) != 1:
                raise BadRequest(
                    f"input '{self.texts[0]}': each text must have {self.once} exactly once, within its first "
                    f"{self.max_length} tokens; text {row} has it {encoding.ids.count(wanted)} times"
                )

    def rectangle(self, encodings: list, longest: int) -> dict[str, np.ndarray]:
        """One request's rows as tensors, padded as the policy says."""
        lengths = [len(encoding) for encoding in encodings]
        width = self.width(max(lengths, default=0), longest)
        tensors = {}
        for name, dtype in self.outputs.items():
            if name == PAST:
                continue
            tail = (2,) if name == "offsets" else ()
            tensors[name] = np.full((len(encodings), width, *tail), self.pad_values[name], dtype)
            for row, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
                cells = slice(width - length, width) if self.pad_left else slice(0, length)
                tensors[name][row, cells] = FIELDS[name](encoding)
        if PAST in self.outputs:
            tensors[PAST] = np.empty((len(encodings), 0), self.outputs[PAST])
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
