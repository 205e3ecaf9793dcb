from serving.backends.tokenizer import TritonPythonModel as TritonPythonModel
