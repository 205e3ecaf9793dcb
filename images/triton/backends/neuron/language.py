"""Task `text-generation` on AWS Neuron: prompts in, texts out, by a large language model on several NeuronCores.

Nothing here imports torch: where torch-neuronx is installed that may load the Neuron runtime, and an instance takes its
cores before.
"""

from __future__ import annotations

import json
import os

import triton_python_backend_utils as pb_utils

from neuron import llm
from neuron.cores import Cores
from neuron.llm import Compiled
from shared.parameters import parameter


class LanguageModel:
    """A TritonPythonModel. A subclass may override load() for a model that is to be loaded in another way."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        os.environ["HF_HUB_OFFLINE"] = "1"  # what is served lies in the model's folder
        config = json.loads(args["model_config"])
        self.cores = Cores.of(config, args)
        self.cores.claim()
        self.model_class = parameter(config, "MODEL_CLASS")
        self.compiled = Compiled.of(config, args, self.cores)
        spare = self.cores.count - self.compiled.tp_degree
        if spare:
            pb_utils.Logger.log_warn(
                f"{args['model_instance_name']}: {spare} of its {self.cores.count} NeuronCores stay idle, for "
                f"tp_degree is {self.compiled.tp_degree}"
            )
        from neuron.generation import NeuronGeneration

        self.task = NeuronGeneration(self.compiled, self.cores, self.load)
        self.task.initialize(args)

    def load(self):
        """The model on its NeuronCores: one of the three libraries', or any other with Hugging Face's generate()."""
        return llm.load(self.model_class, self.compiled, self.cores)

    def execute(self, requests):
        return self.task.execute(requests)

    def finalize(self):
        self.task.finalize()
