"""Logits of one position in, the text of its most probable token out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import serving
from shared.config import version_file
from shared.errors import BadRequest
from shared.metrics import Metrics


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json", "the model's tokenizer.json")))
        ((self.logits,), (self.text,)) = ([tensor["name"] for tensor in config[side]] for side in ("input", "output"))
        self.metrics = Metrics(args)

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> list[int]:
        """The most probable token of each row."""
        logits = serving.input_tensor(request, self.logits)
        if logits.ndim != 2 or logits.shape[1] == 0:
            raise BadRequest(f"input '{self.logits}' must have shape [texts, vocabulary]")
        return logits.argmax(axis=1).tolist()

    def run(self, batch: list[list[int]]) -> list[list[str]]:
        """Each token's own text, with the space it begins with. The end of a text is a token that has none."""
        return [self.tokenizer.decode_batch([[token] for token in tokens]) for tokens in batch]

    def reply(self, request, texts: list[str]):
        array = np.array([text.encode() for text in texts], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.text, array)])
