"""The names and limits that Triton's side and its clients share. It needs only the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# --- tensors ----------------------------------------------------------------------------------------------------------

# The output with the number of tokens of each text, special tokens included: of a truncated text, those that the model
# gets.
TOKEN_COUNT = "token_count"
# The output with each row in the other form, as JSON: of a text its token ids, of ids their text. Rows are empty if the
# request asks for outputs of the model, too, as requests do that name no outputs.
TOKENIZED = "tokenized"
# The output with the number of a text's vectors, unless each token has one.
VECTOR_COUNT = "vector_count"
# The output with a vector for each span of a text (serving/encoders/late_chunking.py).
SPAN_VECTORS = "span_embeddings"
LOGITS = "logits"
# The input of systems that take images: a file.
IMAGE = "image_bytes"
# The optional input of models that generate text: the id of a request to end.
CANCEL = "cancel"

# --- parameters of a request ------------------------------------------------------------------------------------------

# Asks for an empty response at once and every two seconds (serving/triton/heartbeats.py). If these stop for SILENCE_S,
# the process has crashed: TRITON-FAULTS.md#crashed-processes-of-texts.
HEARTBEATS, SILENCE_S = "heartbeats", 8.0

# --- parameters of a model --------------------------------------------------------------------------------------------

# The models that the backend `text_or_image` calls, and the one that generates for a model of the backend `generation`.
TEXT_MODEL, IMAGE_MODEL, ENGINE = "text_model", "image_model", "engine_model"
# The names of a language model's adapters.
ADAPTERS = "adapters"
# The accelerator cores (AWS Neuron) of each instance, which no other process may use. Other models have neither.
FIRST_CORE, LAST_CORE = "NEURON_CORE_START_INDEX", "NEURON_CORE_END_INDEX"

# --- Triton's own -----------------------------------------------------------------------------------------------------

# The file beside SYSTEMS_FILE that lists what the server is to serve, loaded or not.
REQUESTED = "requested"


def called_models(steps: Iterable[str], parameters: Mapping[str, str]) -> list[str]:
    """Return the models that a model calls, each once: the steps of an ensemble, and those of its parameters."""
    named = (parameters[key] for key in (TEXT_MODEL, IMAGE_MODEL, ENGINE) if key in parameters)
    return list(dict.fromkeys([*steps, *named]))
