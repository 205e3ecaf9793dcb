"""rn50-1neuroncores-bs1x1 on AWS Neuron, as gen_triton_model.py wrote it: yours to edit.

config.pbtxt says what is loaded and on which cores; TensorModel does the rest.
"""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(pb_utils.__file__).parents[1]))  # Triton's backends, of which `neuron` is one

from neuron.tensors import TensorModel


class TritonPythonModel(TensorModel):
    """What you define here is done instead; super() has the original.

    load(path): the compiled model, loaded. run(inputs): what becomes of a batch, numpy arrays by name in and out.
    """
