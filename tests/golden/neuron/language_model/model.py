"""Serve opt on AWS Neuron. gen_triton_model.py wrote this file; it is yours to edit.

config.pbtxt names the compiled model and its cores; LanguageModel does the rest.
"""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(pb_utils.__file__).parents[1]))  # Triton's backends; `neuron` is one of them

from neuron.language import LanguageModel


class TritonPythonModel(LanguageModel):
    """Override a method to change what it does; super() has the original.

    load() returns the loaded model: any object with the generate() of Hugging Face's models.
    """
