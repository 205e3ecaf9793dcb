"""Backend `detokenizer`: turns the logits of one position into the text of the most probable token."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import version_file
from serving.triton.types import BadRequest, InstanceArgs, ModelConfig, Tensors


class TritonPythonModel(BatchBackend[list[int]]):
    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json", "the model's tokenizer.json")))
        ((self.logits,), (self.text,)) = ([tensor["name"] for tensor in config[side]] for side in ("input", "output"))

    def prepare(self, request: pb_utils.InferenceRequest) -> list[int]:
        """Return the most probable token of each row."""
        logits = responses.input_tensor(request, self.logits)
        if logits.ndim != 2 or logits.shape[1] == 0:
            raise BadRequest(f"input '{self.logits}' must have shape [texts, vocabulary], not {list(logits.shape)}")
        return logits.argmax(axis=1).tolist()

    def run_batch(self, jobs: list[list[int]]) -> list[Tensors]:
        """Decode each token alone, with the space that it begins with. The end-of-text token decodes to ""."""
        decoded = [self.tokenizer.decode_batch([[token] for token in tokens]) for tokens in jobs]
        return [{self.text: np.array([text.encode() for text in texts], np.object_)} for texts in decoded]
