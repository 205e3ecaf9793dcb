from serving.backends.pipeline import TritonPythonModel as TritonPythonModel
