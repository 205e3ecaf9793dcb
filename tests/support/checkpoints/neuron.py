"""What the tests have as compiled for AWS Neuron: TorchScript, of one batch size or of any, and SavedModels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from scripts.common.settings import ROOT

STAND_IN = Path(__file__).resolve().parents[1] / "neuron_stand_in"
VOCABULARY, LENGTH, WIDTH = 50, 6, 4


class Tokens(torch.nn.Module):
    """Three inputs, two outputs, as BERT's; a token that it does not know is an error.

    What it says of a row depends on that row alone, and on nothing that sums in another order in another batch.
    """

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        drawn = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
        self.embedding = torch.nn.Embedding.from_pretrained(drawn)
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
    """`rows`: the one number of them that it takes; 0: any."""
    examples = (torch.ones(rows or 2, LENGTH, dtype=torch.int64),) * 3
    model = Tokens(form).eval()
    if rows:
        return save_compiled(path, model, examples)
    torch.jit.save(torch.jit.trace(model, examples, strict=False, check_trace=False), str(path))
    return path


def save_compiled(path: Path, model: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> Path:
    """It takes tensors of the examples' shapes and types, and no others."""
    sys.path.append(str(STAND_IN))
    from stand_in_torch import compiled

    sys.path.remove(str(STAND_IN))
    torch.jit.save(compiled(model, examples), str(path))
    return path


class Halver(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


# --- TensorFlow -------------------------------------------------------------------------------------------------------

# Beside the project's own packages, which it shares numpy and protobuf with, for it is large.
TENSORFLOW = ROOT / os.environ.get("TENSORFLOW", ".local/tensorflow")
SAVE = """
import sys
import tensorflow as tf

class Doubler(tf.Module):
    # `rows`: of how many rows each row's run was.
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
