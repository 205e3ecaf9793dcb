from serving.backends.neuron import TritonPythonModel as TritonPythonModel
