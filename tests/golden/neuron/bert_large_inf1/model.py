"""Serve bert-large-mlperf-bs1x4 on AWS Neuron. gen_triton_model.py wrote this file; it is yours to edit.

config.pbtxt names the compiled model and its cores; TensorModel does the rest.
"""

from serving.neuron.tensors import TensorModel


class TritonPythonModel(TensorModel):
    """Override a method to change what it does; super() has the original.

    load(path) returns the loaded model. run(inputs) runs a batch: numpy arrays by name in and out.
    """
