"""Text generation by a compiled model, for Triton's requests."""

from __future__ import annotations

import re
from collections.abc import Callable

from serving.engines.lean_transformers import transformers
from serving.generation.batched import BatchedGeneration
from serving.generation.decoding import Decoder
from serving.generation.row import Row
from serving.neuron.cores import Cores
from serving.neuron.decoding import NeuronDecoder, with_generate
from serving.neuron.libraries import loading
from serving.neuron.llm import CompiledLLM
from serving.triton.types import BadRequest, ConfigError
from triton_transformers.engines import NEURON
from triton_transformers.errors import CONTEXT_LENGTH

# The first release whose stopping criteria return a value for each row.
MIN_TRANSFORMERS = (4, 39)
NO_SAMPLING = "this model is compiled to choose the most probable token on the device"


class NeuronGeneration(BatchedGeneration):
    text_engine = NEURON

    def __init__(self, compiled: CompiledLLM, cores: Cores, load: Callable[[], object]) -> None:
        self.compiled = compiled
        self.cores = cores
        self.load = load
        self.default_max_batch = compiled.batch_size

    decoder: NeuronDecoder

    def load_decoder(self, config: dict, args: dict[str, str]) -> Decoder:
        check_transformers()
        transformers.logging.set_verbosity_error()  # or it warns of every batch that is padded on the right
        tokenizer = load_tokenizer(self.compiled)  # before the model, whose loading takes minutes
        model = self.load()
        with loading(self.compiled.folder, self.cores):  # the decoder makes the first run
            decoder = NeuronDecoder(with_generate(model, self.compiled), tokenizer, self.compiled)
        if self.defaults["temperature"] and not decoder.samples:
            raise ConfigError(f"parameter 'temperature' must be 0: {NO_SAMPLING}")
        return decoder

    def placement(self) -> str:
        cores = f"NeuronCores {self.cores.first} to {self.cores.last}" if self.cores.count > 1 else "one NeuronCore"
        return f"{cores}, batches of {self.compiled.batch_size}"

    def row(self, *arguments) -> Row:
        row = super().row(*arguments)
        if len(row.prompt_tokens) > self.compiled.max_prompt:
            raise BadRequest(
                f"input '{row.owner.request.name}' has {len(row.prompt_tokens)} tokens; the model is compiled for "
                f"prompts of up to {self.compiled.max_prompt}",
                row.owner.request.name,
                code=CONTEXT_LENGTH,
            )
        if row.options.temperature and not self.decoder.samples:
            raise BadRequest(f"option 'temperature' must be 0: {NO_SAMPLING}", "temperature")
        if (row.options.adjusts or row.options.logprobs is not None) and not self.decoder.samples:
            raise BadRequest(f"options that change or report the probabilities of tokens are refused: {NO_SAMPLING}")
        return row

    def count_padding(self, lengths: list[int]) -> None:
        super().count_padding(lengths)
        self.metrics.add(padding_tokens=(self.compiled.batch_size - len(lengths)) * max(lengths))


def load_tokenizer(compiled: CompiledLLM):
    try:
        return transformers.AutoTokenizer.from_pretrained(
            compiled.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ConfigError(
            f"COMPILED_MODEL: {compiled.folder} has no tokenizer that loads: save the checkpoint's there with "
            f"tokenizer.save_pretrained() ({type(error).__name__})"
        ) from None


def check_transformers() -> None:
    release = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if release < MIN_TRANSFORMERS:
        raise ConfigError(
            f"transformers {transformers.__version__} is too old to generate several texts at once: install "
            f"{'.'.join(map(str, MIN_TRANSFORMERS))} or newer where Triton runs"
        )
