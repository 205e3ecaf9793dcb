"""Continues texts with a compiled model, in batches of exactly the rows that it is compiled for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from serving.engines.lean_transformers import transformers
from serving.generation.decoding import Decoder
from serving.generation.row import Row
from serving.neuron.libraries import imported_class
from serving.neuron.llm import CompiledLLM
from serving.triton.types import ConfigError


class NeuronDecoder(Decoder):
    def __init__(self, model, tokenizer, compiled: CompiledLLM) -> None:
        self.compiled = compiled
        self.padding_side = padding_side(model, compiled)
        model.generation_config = generation_config(model, tokenizer, compiled)
        super().__init__(model, tokenizer)

    def traits(self) -> tuple[int, int | None, int | None, torch.device]:
        """Return the CPU as the device: the library moves the tokens to its cores."""
        config = self.model.config
        config = getattr(config, "text_config", None) or config
        return config.vocab_size, self.compiled.n_positions, None, torch.device("cpu")

    def measure(self) -> None:
        """Test whether we can choose tokens. Costs are not measured: each batch costs the same.

        A model that chooses on the device never calls the processor, or returns another token. This first run also
        makes a broken model fail when it is loaded.
        """
        # A release of NxD Inference passes this to the sampler on the device; 1 is the most probable token.
        self.model.generation_config.top_k = 1
        choice = LeastProbable()
        tokens = torch.tensor([self.start or [self.padding]] * self.compiled.batch_size)
        answer = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=1,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.padding,
            logits_processor=transformers.LogitsProcessorList([choice]),
        )
        self.samples = choice.tokens is not None and answer[:, -1].tolist() == choice.tokens

    def batches(self, rows: list[Row]) -> list[list[Row]]:
        ascending = sorted(rows, key=lambda row: len(row.prompt_tokens))
        size = self.compiled.batch_size
        parts = (ascending[at : at + size] for at in range(0, len(ascending), size))
        return [batch for part in parts for batch in self.within_context(part)]

    def generate(self, rows: list[Row], after_token: Callable[[], None]) -> None:
        super().generate(rows + self.padding_rows(rows[-1], self.compiled.batch_size - len(rows)), after_token)

    @staticmethod
    def padding_rows(row: Row, count: int) -> list[Row]:
        """Return finished copies of a real row, because an invented prompt can make the model fail."""
        rows: list[Row] = [Row(row.prompt, row.prompt_tokens, row.options) for _ in range(count)]
        for copy in rows:
            copy.done = True
        return rows


class LeastProbable(transformers.LogitsProcessor):
    """Leaves only a token that no model chooses by itself."""

    tokens: list[int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = scores.argmin(-1, keepdim=True)
        self.tokens = places[:, 0].tolist()
        return torch.full_like(scores, -torch.inf).scatter(-1, places, 0)


# --- the libraries ----------------------------------------------------------------------------------------------------


def packages(model) -> set[str]:
    """Return the packages of the model's class and of all its base classes."""
    return {base.__module__.partition(".")[0] for base in type(model).__mro__}


def with_generate(model, compiled: CompiledLLM):
    """Return the model with Hugging Face's generate(), which two of the libraries have in an adapter."""
    if hasattr(model, "generate"):
        return model
    if "neuronx_distributed_inference" in packages(model):
        return imported_class("neuronx_distributed_inference.utils.hf_adapter.HuggingFaceGenerationAdapter")(model)
    if "transformers_neuronx" in packages(model):
        adapter_class = imported_class("transformers_neuronx.generation_utils.HuggingFaceGenerationModelAdapter")
        config = transformers.AutoConfig.from_pretrained(
            compiled.folder, local_files_only=True, trust_remote_code=False
        )
        adapter = adapter_class(config, model)
        if not hasattr(adapter, "generate"):
            raise ConfigError(
                f"transformers {transformers.__version__} has no generate() for transformers-neuronx: "
                "install transformers < 4.50 where Triton runs"
            )
        return adapter
    raise ConfigError(f"load() returned a {type(model).__name__}, which lacks the generate() of Hugging Face's models")


def padding_side(model, compiled: CompiledLLM) -> str:
    right = {"neuronx_distributed_inference", "optimum"} & packages(model)
    return compiled.padding_side or ("right" if right else "left")


def generation_config(model, tokenizer, compiled: CompiledLLM) -> transformers.GenerationConfig:
    """Return the begin and end tokens. The checkpoint's own file may have more end tokens than the model's config."""
    if (compiled.folder / "generation_config.json").is_file():
        config = transformers.GenerationConfig.from_pretrained(compiled.folder, local_files_only=True)
    else:
        config = getattr(model, "generation_config", None) or transformers.GenerationConfig()
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    return config
