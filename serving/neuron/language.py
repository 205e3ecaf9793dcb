"""Task `text-generation` on AWS Neuron: continues prompts with a large language model on several NeuronCores.

It imports torch only after the instance has claimed its cores, because torch-neuronx may start the Neuron runtime.
"""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from serving.neuron import llm
from serving.neuron.cores import Cores
from serving.neuron.llm import CompiledLLM
from serving.triton.backend import DelegatingBackend
from serving.triton.parameters import parameter


class LanguageModel(DelegatingBackend):
    """A TritonPythonModel. A subclass may override load() to load the model in another way."""

    def chosen_backend(self, config, args):
        self.cores = Cores.of_instance(config, args)
        self.cores.claim()
        self.model_class = parameter(config, "MODEL_CLASS")
        self.compiled = CompiledLLM.read(config, args, self.cores)
        idle = self.cores.count - self.compiled.tp_degree
        if idle:
            pb_utils.Logger.log_warn(
                f"{args['model_instance_name']}: {idle} of its {self.cores.count} NeuronCores stay idle, for "
                f"tp_degree is {self.compiled.tp_degree}"
            )
        from serving.neuron.generation import NeuronGeneration

        return NeuronGeneration(self.compiled, self.cores, self.load)

    def load(self):
        """Return the loaded model: of one of the three libraries, or any object with Hugging Face's generate()."""
        return llm.load(self.model_class, self.compiled, self.cores)
