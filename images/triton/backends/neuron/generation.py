"""Text generation by a compiled model, for Triton's requests."""

from __future__ import annotations

import re
from collections.abc import Callable

import transformers
from transformers import AutoTokenizer

from neuron.cores import Cores
from neuron.decoding import NeuronDecoder, generating
from neuron.libraries import loading
from neuron.llm import Compiled
from shared.decoding import Decoder, Row
from shared.errors import BadRequest, ConfigError
from shared.generation import TextGeneration

# The first whose stopping criteria speak for each row.
OLDEST_TRANSFORMERS = (4, 39)


class NeuronGeneration(TextGeneration):
    def __init__(self, compiled: Compiled, cores: Cores, load: Callable[[], object]) -> None:
        self.compiled = compiled
        self.cores = cores
        self.load = load
        self.default_max_batch = compiled.batch_size

    def load_decoder(self, config: dict, args: dict[str, str]) -> Decoder:
        check_transformers()
        transformers.logging.set_verbosity_error()  # it would warn of every batch that is padded on the right
        tokenizer = load_tokenizer(self.compiled)  # first, for to load the model takes minutes
        model = self.load()
        with loading(self.compiled.folder, self.cores):  # of which the first run is a part
            decoder = NeuronDecoder(generating(model, self.compiled), tokenizer, self.compiled)
        if self.defaults["temperature"] and not decoder.samples:
            raise ConfigError(f"parameter 'temperature' must be 0: {NO_SAMPLING}")
        return decoder

    def placement(self) -> str:
        cores = f"NeuronCores {self.cores.first} to {self.cores.last}" if self.cores.count > 1 else "one NeuronCore"
        return f"{cores}, batches of {self.compiled.batch_size}"

    def row(self, *said) -> Row:
        row = super().row(*said)
        if len(row.prompt_tokens) > self.compiled.longest_prompt:
            raise BadRequest(
                f"input 'prompt' has {len(row.prompt_tokens)} tokens; the model is compiled for prompts of up to "
                f"{self.compiled.longest_prompt}"
            )
        if row.options.temperature and not self.decoder.samples:
            raise BadRequest(f"input 'temperature' must be 0: {NO_SAMPLING}")
        return row

    def count(self, rows: list[Row]) -> None:
        super().count(rows)
        spare = self.compiled.batch_size - len(rows)
        self.metrics.add(padding_tokens=spare * max(len(row.prompt_tokens) for row in rows))


NO_SAMPLING = "this model is compiled to choose each token on the device, the likeliest one"


def load_tokenizer(compiled: Compiled):
    try:
        return AutoTokenizer.from_pretrained(compiled.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"COMPILED_MODEL: {compiled.folder} has no tokenizer that loads: save the checkpoint's there with "
            f"tokenizer.save_pretrained() ({type(error).__name__})"
        ) from None


def check_transformers() -> None:
    release = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if release < OLDEST_TRANSFORMERS:
        raise ConfigError(
            f"transformers {transformers.__version__} is too old to generate several texts at once: install "
            f"{'.'.join(map(str, OLDEST_TRANSFORMERS))} or newer where Triton runs"
        )
