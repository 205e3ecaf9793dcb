"""Requests that continue prompts: they name their inputs, options and outputs in several ways, with one meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.text.chat_template import IMAGES, MESSAGES, Message
from serving.text.token_ids import TokenIds, read_rows
from serving.triton import responses
from serving.triton.types import BadRequest
from triton_transformers.engines import TEXT_ENGINES, TextEngine, titles
from triton_transformers.errors import ERROR_STATUS
from triton_transformers.protocol import CANCEL, HEARTBEATS, TOKENIZED

# The names of the prompts and of the output with their texts, unless a model's config.pbtxt sets others.
PROMPT, TEXT = "prompt", "text"
# The name that NVIDIA's tutorial and vLLM's backend give to the prompts, and to the output with their texts.
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
# The outputs beside a text, with vLLM's names. Only requests that name them get them.
DETAILS = {
    "finish_reason": np.object_,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
    "num_cached_tokens": np.uint32,
    "logprobs": np.object_,
    "stop_reason": np.object_,
}
# vLLM's name for an option, and ours.
SYNONYMS = {"max_tokens": "max_new_tokens"}
# vLLM's input for options: one JSON object.
SAMPLING_PARAMETERS = "sampling_parameters"
# Parameters that only other parts of this project send: the front of a model asks for one answer, with a key by which
# it can cancel the request, because several clients may choose the same id. It and the gateway ask for typed errors
# (ERROR_STATUS) and heartbeats.
ONE_ANSWER = "one_answer"
# The loop searches for stop strings after every token, and every row waits for that.
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
# The limits of OpenAI's API and of vLLM.
MAX_BIASES, MAX_BIAS, MAX_PENALTY, MAX_LOGPROBS = 300, 100, 2, 20
MAX_STOP_TOKENS = 128
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class Rule(NamedTuple):
    """The values that an option accepts, and its default."""

    read: Callable[[Any], Any]
    accepts: Callable[[Any], bool]
    description: str
    default: float | None = None


def whole_number(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool):
        raise TypeError
    if not isinstance(value, str) and number != value:
        raise ValueError
    return number


def count_limit(value: Any) -> int:
    """Return 0 for -1, which is vLLM's other way to set no limit."""
    return 0 if (number := whole_number(value)) == -1 else number


def flag(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def string(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise TypeError
    return value.decode() if isinstance(value, bytes) else value


def strings(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else tuple(parsed(value, list))
    if not all(isinstance(string, str) for string in values):
        raise TypeError
    return values


def parsed(value: Any, kind: type) -> Any:
    """Return a JSON value of this type. A parameter of a request cannot be an object, so there it is a string."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, kind):
        raise TypeError
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    return tuple(map(whole_number, parsed(value, list)))


def biases(value: Any) -> dict[int, float]:
    return {whole_number(token): float(bias) for token, bias in parsed(value, dict).items()}


PENALTY = Rule(float, lambda p: -MAX_PENALTY <= p <= MAX_PENALTY, f"from -{MAX_PENALTY} to {MAX_PENALTY}")
LOGPROBS = Rule(whole_number, lambda n: 0 <= n <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}")
FLAG = Rule(flag, lambda _: True, "true or false")
JSON_OBJECT = Rule(partial(parsed, kind=dict), lambda _: True, "an object")
# The options that a model's config.pbtxt may set as parameters.
NUMBERS = {
    "max_new_tokens": Rule(whole_number, lambda n: 1 <= n < 2**31, "a whole number of at least 1", 64),
    "temperature": Rule(float, lambda t: 0 <= t < math.inf, "0 (always the most probable token) or more", 0.0),
    "top_p": Rule(float, lambda p: 0 < p <= 1, "more than 0 and at most 1", 1.0),
    "seed": Rule(whole_number, lambda seed: 0 <= seed < 2**63, "a whole number from 0 to 2^63 - 1"),
    "top_k": Rule(count_limit, lambda k: 0 <= k < 2**31, "a whole number of at least 1; 0 or -1: no limit"),
    "min_p": Rule(float, lambda p: 0 <= p <= 1, "from 0 to 1"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": Rule(float, lambda p: 0.01 <= p <= 100, "from 0.01 to 100 (1: none)"),
}
RULES = NUMBERS | {
    "max_new_tokens": Rule(whole_number, lambda n: 0 <= n < 2**31, "a whole number of at least 0"),
    "stop": Rule(
        strings,
        lambda stops: len(stops) <= MAX_STOPS and all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops),
        f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters",
    ),
    CANCEL: Rule(string, bool, "the id of another request"),
    "stream": FLAG,
    "exclude_input_in_output": FLAG,
    # For clients of /generate, whose requests cannot name outputs.
    **{f"return_{name}": FLAG for name in DETAILS},
    "logit_bias": Rule(
        biases,
        lambda own: len(own) <= MAX_BIASES and all(id >= 0 and abs(bias) <= MAX_BIAS for id, bias in own.items()),
        f"an object of at most {MAX_BIASES} token ids with numbers from -{MAX_BIAS} to {MAX_BIAS}",
    ),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "ignore_eos": FLAG,
    "min_tokens": Rule(whole_number, lambda n: 0 <= n < 2**31, "a whole number of at least 0"),
    "stop_token_ids": Rule(
        token_ids,
        lambda ids: len(ids) <= MAX_STOP_TOKENS and all(0 <= id < 2**31 for id in ids),
        f"a list of at most {MAX_STOP_TOKENS} token ids",
    ),
    "skip_special_tokens": FLAG,
    "structured_outputs": Rule(
        JSON_OBJECT.read,
        lambda own: len(own) == 1 and own.keys() <= {*STRUCTURES},
        f"an object with one of {', '.join(STRUCTURES)}",
    ),
    "lora_name": Rule(string, bool, "the name of an adapter"),
    "tools": Rule(
        partial(parsed, kind=list), lambda own: all(isinstance(tool, dict) for tool in own), "a list of objects"
    ),
    "chat_template_kwargs": JSON_OBJECT,
}


class Piece(NamedTuple):
    """The content of a response for one prompt. In a stream, `text` and `num_output_tokens` are those of the piece."""

    text: str
    finish_reason: str  # "stop", "length", or "" while the text goes on
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None  # tokens of the prompt whose keys and values the engine had, if it counts them
    logprobs: str = "[]"  # JSON list with an object for each new token; empty if the request does not ask for them
    stop_reason: str = ""  # the stop string that ended the text, if one did


@dataclass(frozen=True)
class PromptRequest:
    """The prompts and options of a request, and the names that its response uses."""

    name: str  # of the input with the prompts
    prompts: list[str | TokenIds]
    shape: tuple[int, ...]  # of that input, and of the response's outputs
    outputs: list[str]
    options: dict[str, Any]
    sent: Mapping[str, Any]  # the parameters of the request
    messages: list[Message] | None = None  # a chat, which becomes the only prompt
    images: Sequence[bytes] = ()  # encoded files, in the order of the images in the messages

    @property
    def answer_key(self) -> str:
        """Return the key by which the front may cancel the request, which then gets one answer."""
        return str(self.sent.get(ONE_ANSWER, ""))

    @property
    def wants_typed_errors(self) -> bool:
        return bool(self.sent.get(ERROR_STATUS))

    @property
    def wants_heartbeats(self) -> bool:
        return bool(self.sent.get(HEARTBEATS))

    def error_response(self, error: Exception) -> pb_utils.InferenceResponse:
        """Return the error that ends the request. The front's may follow another response, so it is an output.

        See TRITON-FAULTS.md#errors-of-called-models.
        """
        if not (self.answer_key and self.wants_heartbeats):
            return responses.error_response(error, self.wants_typed_errors)
        message = np.array([responses.typed(error).encode().encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor(TOKENIZED, message)])

    def echoes(self, default: bool) -> bool:
        """Return whether the response's texts begin with their prompts."""
        return self.messages is None and not self.options.get("exclude_input_in_output", not default)

    def response(self, pieces: Sequence[Piece]) -> pb_utils.InferenceResponse:
        """Return a response with the outputs whose values are known."""
        known = [name for name in self.outputs if getattr(pieces[0], name, "") is not None]
        return pb_utils.InferenceResponse([self.output(name, pieces) for name in known])

    def output(self, name: str, pieces: Sequence[Piece]) -> pb_utils.Tensor:
        values = [getattr(piece, name if name in DETAILS else "text") for piece in pieces]
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        return pb_utils.Tensor(name, np.array(encoded, DETAILS.get(name, np.object_)).reshape(self.shape))


def read_request(request: pb_utils.InferenceRequest, sent: Mapping[str, Any], name: str, output: str) -> PromptRequest:
    """Read a request with the input `name`, `text_input` or `messages`. Raise BadRequest if it is wrong."""
    answers = {name: output, TEXT_INPUT: TEXT_OUTPUT, MESSAGES: output}
    options = read_options(request, sent)
    names = [name for name in answers if pb_utils.get_input_tensor_by_name(request, name) is not None]
    if len(names) > 1:
        raise BadRequest(f"inputs '{names[0]}' and '{names[1]}' exclude each other: send one", names[0], names[1])
    if not names:
        raise BadRequest(f"input '{name}' is missing: send it, or name it '{TEXT_INPUT}'", name, TEXT_INPUT)
    (name,) = names
    shape = responses.input_tensor(request, name).shape
    outputs = response_outputs(request, answers[name], (output, TEXT_OUTPUT), options)
    if name == MESSAGES:
        if not options.get("exclude_input_in_output", True):
            raise BadRequest(
                f"option 'exclude_input_in_output' must be true: the answer to '{MESSAGES}' has no prompt",
                "exclude_input_in_output",
                MESSAGES,
            )
        return PromptRequest(name, [], shape, outputs, options, sent, read_messages(request), read_images(request))
    prompts = read_rows(request, name, "text")
    if not prompts:
        raise BadRequest(f"input '{name}' holds no prompt: send at least one", name)
    return PromptRequest(name, prompts, shape, outputs, options, sent)


def response_outputs(
    request: pb_utils.InferenceRequest, fitting: str, texts: tuple[str, str], options: Mapping[str, Any]
) -> list[str]:
    """Return the outputs of the response: if the request asks for both outputs for texts, only the fitting one."""
    requested = responses.requested_outputs(request, (*texts, *DETAILS))
    if not requested and responses.requested_outputs(request, [TOKENIZED]):
        return [TOKENIZED]
    if set(texts) <= set(requested):  # for Triton, a request that names no outputs asks for all that the model has
        requested = [fitting]
    outputs = [name for name in texts if name in requested]
    return outputs + [name for name in DETAILS if name in requested or options.get(f"return_{name}")]


def check_available(request: PromptRequest, engine: TextEngine) -> None:
    """Raise BadRequest for an option that the engine lacks. Name the engines that have it."""
    for name in sorted(engine.lacks):
        if request.options.get(name) not in (None, {}):
            able = titles([other for other in TEXT_ENGINES if name not in other.lacks])
            raise BadRequest(f"option '{name}': {engine.title} does not have it; {able} do", name)


def read_images(request: pb_utils.InferenceRequest) -> list[bytes]:
    tensor = pb_utils.get_input_tensor_by_name(request, IMAGES)
    return [] if tensor is None else tensor.as_numpy().ravel().tolist()


def read_messages(request: pb_utils.InferenceRequest) -> list[Message]:
    try:
        (text,) = responses.texts(request, MESSAGES)
        messages = json.loads(text)
        if messages and all(isinstance(message["role"], str) and "content" in message for message in messages):
            return list(messages)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise BadRequest(
        f"input '{MESSAGES}' must be one JSON list of messages, such as "
        '[{"role": "user", "content": "Which battery fits?"}]',
        MESSAGES,
    )


def read_options(request: pb_utils.InferenceRequest, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request. Raise BadRequest for one that is unknown, wrong, or given twice."""
    options: dict[str, Any] = {}
    for place, sent_name, value in option_values(request, sent):
        name = SYNONYMS.get(sent_name, sent_name)
        if name not in RULES:
            raise BadRequest(f"unknown {place} '{name}': the options are {', '.join(RULES)}", name)
        value = read_option(RULES[name], place, sent_name, value)
        if options.setdefault(name, value) != value:
            raise BadRequest(f"option '{name}' is set twice, with different values: send one", name)
    return options


def read_option(rule: Rule, place: str, name: str, value: Any) -> Any:
    try:
        result = rule.read(value)
        if rule.accepts(result):
            return result
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    raise BadRequest(f"{place} '{name}' must be {rule.description}", name)


def option_values(request: pb_utils.InferenceRequest, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each option that the request sets: where, its name, its value."""
    for name in RULES:
        if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None:
            yield "input", name, responses.texts(request, name) if name == "stop" else only_value(name, tensor)
    # vLLM's client sends the same options as an input and as parameters of the request.
    if pb_utils.get_input_tensor_by_name(request, SAMPLING_PARAMETERS) is not None:
        for name, value in sampling_parameters(request).items():
            yield "sampling parameter", name, value
    for name, value in sent.items():
        if name not in (ONE_ANSWER, ERROR_STATUS, HEARTBEATS):
            yield "parameter", name, value


def parameters(request: pb_utils.InferenceRequest) -> dict[str, Any]:
    """Return the parameters of the request itself. Raise BadRequest if they are no text."""
    try:
        return dict(json.loads(request.parameters() or "{}"))
    except UnicodeDecodeError:
        raise BadRequest("parameters of the request must be valid UTF-8") from None


def only_value(name: str, tensor: pb_utils.Tensor) -> Any:
    values = set(tensor.as_numpy().ravel().tolist())
    if len(values) != 1:
        raise BadRequest(f"input '{name}' must have the same value for all prompts of the request", name)
    return values.pop()


def sampling_parameters(request: pb_utils.InferenceRequest) -> dict[str, Any]:
    try:
        (text,) = responses.texts(request, SAMPLING_PARAMETERS)
        if isinstance(parameters := json.loads(text), dict):
            return parameters
    except (ValueError, RecursionError):
        pass
    raise BadRequest(f"input '{SAMPLING_PARAMETERS}' must be one JSON object", SAMPLING_PARAMETERS)
