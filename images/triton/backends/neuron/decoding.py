"""Texts continued by a compiled model, in batches of exactly the rows that it is compiled for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from neuron.libraries import imported_class
from neuron.llm import Compiled
from shared.decoding import Decoder, Row, Traits
from shared.errors import ConfigError


class NeuronDecoder(Decoder):
    def __init__(self, model, tokenizer, compiled: Compiled) -> None:
        self.compiled = compiled
        self.padding_side = padding_side(model, compiled)
        model.generation_config = generation_config(model, tokenizer, compiled)
        super().__init__(model, tokenizer)

    def traits(self) -> Traits:
        """Tokens stay on the CPU, from where the library takes them to its cores."""
        config = self.model.config
        config = getattr(config, "text_config", None) or config
        return Traits(config.vocab_size, self.compiled.n_positions, torch.device("cpu"))

    def measure(self) -> None:
        """A batch costs the same however many rows are somebody's. What is tried is whether we can choose tokens.

        A model that chooses on the device says so by never asking, or by an answer of its own. The first run also shows
        on load what would fail at every request.
        """
        # A release of NxD Inference hands this on to what samples on the device, where 1 is the likeliest.
        self.model.generation_config.top_k = 1
        choice = LeastLikely()
        tokens = torch.tensor([self.start or [self.padding]] * self.compiled.batch_size)
        answer = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=1,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.padding,
            logits_processor=LogitsProcessorList([choice]),
        )
        self.samples = choice.tokens is not None and answer[:, -1].tolist() == choice.tokens

    def batches(self, rows: list[Row]) -> list[list[Row]]:
        rows = sorted(rows, key=lambda row: len(row.prompt_tokens))
        size = self.compiled.batch_size
        return [part for at in range(0, len(rows), size) for part in self.within_context(rows[at : at + size])]

    def generate(self, rows: list[Row], after_token: Callable[[], None]) -> None:
        super().generate(rows + self.filling(rows[-1], self.compiled.batch_size - len(rows)), after_token)

    @staticmethod
    def filling(row: Row, count: int) -> list[Row]:
        """Rows that nobody waits for: a real prompt, for numbers out of nothing may be none at all."""
        rows = [Row(row.prompt, row.prompt_tokens, row.options) for _ in range(count)]
        for each in rows:
            each.done = True
        return rows


class LeastLikely(LogitsProcessor):
    """Leaves a token that no model chooses by itself."""

    tokens: list[int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = scores.argmin(-1, keepdim=True)
        self.tokens = places[:, 0].tolist()
        return torch.full_like(scores, -torch.inf).scatter(-1, places, 0)


# --- the libraries ----------------------------------------------------------------------------------------------------


def libraries(model) -> set[str]:
    """Packages that the model's class comes from, a user's subclass of one included."""
    return {kind.__module__.partition(".")[0] for kind in type(model).__mro__}


def generating(model, compiled: Compiled):
    """The model with Hugging Face's generate(), which two of the libraries put on from outside."""
    if hasattr(model, "generate"):
        return model
    if "neuronx_distributed_inference" in libraries(model):
        return imported_class("neuronx_distributed_inference.utils.hf_adapter.HuggingFaceGenerationAdapter")(model)
    if "transformers_neuronx" in libraries(model):
        kind = imported_class("transformers_neuronx.generation_utils.HuggingFaceGenerationModelAdapter")
        config = AutoConfig.from_pretrained(compiled.folder, local_files_only=True, trust_remote_code=False)
        adapter = kind(config, model)
        if not hasattr(adapter, "generate"):
            raise ConfigError(
                f"transformers {transformers.__version__} has no generate() for transformers-neuronx any more: "
                "install transformers < 4.50 where Triton runs"
            )
        return adapter
    raise ConfigError(f"load() gave a {type(model).__name__}, which has no generate() as Hugging Face's models have")


def padding_side(model, compiled: Compiled) -> str:
    right = {"neuronx_distributed_inference", "optimum"} & libraries(model)
    return compiled.padding_side or ("right" if right else "left")


def generation_config(model, tokenizer, compiled: Compiled) -> GenerationConfig:
    """With what begins and ends a text. The checkpoint's own file knows of more ends than the model's config."""
    if (compiled.folder / "generation_config.json").is_file():
        said = GenerationConfig.from_pretrained(compiled.folder, local_files_only=True)
    else:
        said = getattr(model, "generation_config", None) or GenerationConfig()
    if said.eos_token_id is None:
        said.eos_token_id = tokenizer.eos_token_id
    return said
