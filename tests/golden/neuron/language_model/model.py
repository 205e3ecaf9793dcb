"""opt on AWS Neuron, as gen_triton_model.py wrote it: yours to edit.

config.pbtxt says what is loaded and on which cores; LanguageModel does the rest.
"""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(pb_utils.__file__).parents[1]))  # Triton's backends, of which `neuron` is one

from neuron.language import LanguageModel


class TritonPythonModel(LanguageModel):
    """What you define here is done instead; super() has the original.

    load(): the model, loaded: anything that has the generate() of Hugging Face's models.
    """
