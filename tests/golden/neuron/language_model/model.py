"""Serve opt on AWS Neuron. gen_triton_model.py wrote this file; it is yours to edit.

config.pbtxt names the compiled model and its cores; LanguageModel does the rest.
"""

from serving.neuron.language import LanguageModel


class TritonPythonModel(LanguageModel):
    """Override a method to change what it does; super() has the original.

    load() returns the loaded model: any object with the generate() of Hugging Face's models.
    """
