"""Save models as if compiled for AWS Neuron: TorchScript for one batch size or any, and SavedModels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from triton_transformers.settings import ROOT

STAND_IN = Path(__file__).resolve().parents[1] / "neuron_stand_in"
VOCABULARY, LENGTH, WIDTH = 50, 6, 4


class Tokens(torch.nn.Module):
    """Take three inputs and return two outputs, as BERT does. Fail on an unknown token.

    A row's outputs depend on that row alone, bit by bit: no sum changes its order with the batch.
    """

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        weights = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
        self.embedding = torch.nn.Embedding.from_pretrained(weights)
        self.form = form

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor):
        hidden = (self.embedding(ids) + types[..., None]) * mask[..., None]
        pooled = hidden.amax(dim=1)
        if self.form == "dict":
            return {"last_hidden_state": hidden, "pooler_output": pooled}
        if self.form == "single":
            return hidden
        return (hidden.bfloat16(), pooled) if self.form == "bfloat16" else (hidden, pooled)


def save_tokens(path: Path, form: str = "tuple", rows: int = 0) -> Path:
    """Save a model that takes only this number of rows; 0 means any."""
    examples = (torch.ones(rows or 2, LENGTH, dtype=torch.int64),) * 3
    model = Tokens(form).eval()
    if rows:
        return save_compiled(path, model, examples)
    torch.jit.save(torch.jit.trace(model, examples, strict=False, check_trace=False), str(path))
    return path


def save_compiled(path: Path, model: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> Path:
    """Save a model that takes only tensors of the examples' shapes and types."""
    sys.path.append(str(STAND_IN))
    from stand_in_torch import compiled

    sys.path.remove(str(STAND_IN))
    torch.jit.save(compiled(model, examples), str(path))
    return path


class Halver(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


# --- TensorFlow -------------------------------------------------------------------------------------------------------

# Large, so installed apart from the project's packages; it uses their numpy and protobuf.
TENSORFLOW = ROOT / os.environ.get("TENSORFLOW", ".local/tensorflow")
SAVE = """
import sys
import tensorflow as tf

class Doubler(tf.Module):
    # `rows`: for each row, the number of rows in its run.
    @tf.function(input_signature=[tf.TensorSpec([int(sys.argv[2]) or None, 3], tf.float32, name="x"),
                                  tf.TensorSpec([int(sys.argv[2]) or None, 1], tf.string, name="label")])
    def serve(self, x, label):
        rows = tf.shape(x)[0]
        return {"doubled": 2 * x, "echo": tf.strings.join([label, "!"]), "rows": tf.fill([rows, 1], rows)}

model = Doubler()
tf.saved_model.save(model, sys.argv[1], signatures={"serving_default": model.serve})
"""


def save_doubler(folder: Path, rows: int = 0) -> Path:
    environment = os.environ | {"PYTHONPATH": str(TENSORFLOW), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(folder), str(rows)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder
