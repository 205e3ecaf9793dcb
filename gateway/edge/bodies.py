"""Read a request's JSON into a msgspec Struct, with an error that names the field that is wrong; write responses.

OpenAI's clients send fields that a system here cannot obey. Those that ask for nothing (null, or the value that stands
for "as usual") and those that change nothing in the answer are ignored; any other is refused by name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge.errors import ApiError, shown

Body = TypeVar("Body", bound=msgspec.Struct)
JSON = "application/json"
PositiveInt = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]

# Fields that change nothing in the answer.
IGNORED = {"cache_control", "client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"}
IGNORED |= {"prompt_cache_retention", "safety_identifier", "user", "user_profile_id"}
# Cohere's: how to cite documents, which are refused, and what its own models avoid.
IGNORED |= {"citation_options", "citation_quality", "safety_mode", "strict_tools"}
# Claude Code sends this with Anthropic's API.
KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# The values that ask for nothing, and the fields that have them: fields that some endpoints do not support.
NEUTRAL_FIELDS: Sequence[tuple[Sequence[Any], str]] = (
    ((), "audio background_options container conversation dimensions inference_geo max_chunks_per_doc"),
    ((), "moderation prediction previous_response_id prompt prompt_logprobs stream_options web_search_options"),
    ((), "chunking_strategy include[] instructions known_speaker_names[] known_speaker_references[]"),
    (
        (False,),
        "background continue_final_message echo force_single_step include_stop_str_in_output logprobs raw_scores",
    ),
    ((False,), "raw_prompting return_token_ids return_token_strs search_queries_only store stream use_beam_search"),
    ((True,), "add_generation_prompt include_reasoning spaces_between_special_tokens"),
    ((KEEP_THINKING,), "context_management"),
    ((True, False), "parallel_tool_calls"),
    ((0,), "frequency_penalty presence_penalty priority top_logprobs"),
    ((1,), "best_of length_penalty n typical_p"),
    (([],), "bad_words connectors documents functions mcp_servers tools"),
    (({},), "logit_bias parameters"),
    (("",), "suffix"),
    (("float",), "encoding_format"),
    (("text",), "modality"),
    ((["text"],), "modalities"),
    (([], ["text"]), "rank_fields"),
    (({"type": "text"},), "response_format"),
    (("none",), "reasoning_effort"),
    (("none", "auto"), "function_call tool_choice"),
    (("auto", "default", "standard_only"), "service_tier"),
    (("disabled", True), "truncation"),
    (("OFF",), "prompt_truncation"),
    (("standard",), "speed"),
    (("low", "medium", "high"), "verbosity"),
    # Texts that are too long are always cut at their end.
    ((True, "END"), "truncate"),
    (("Right", "right"), "truncation_direction"),
)
NEUTRAL = {name: values for values, names in NEUTRAL_FIELDS for name in names.split()}


@dataclass(frozen=True)
class MediaTypes:
    """The media types that a route reads, and how an error names them."""

    types: re.Pattern[str]
    description: str


# Some clients send no type. Pages of other sites cannot use that: gateway/edge/admission.py checks their origin.
JSON_BODY = MediaTypes(re.compile(f"{JSON}|"), f"JSON, with the header 'content-type: {JSON}'")
# Clients that do not know the type of a file send none.
FILE_BODY = MediaTypes(
    re.compile(rf"{JSON}||application/octet-stream|(image|audio|video)/.+"),
    f"{JSON_BODY.description}, or a file as image/*, audio/*, video/* or application/octet-stream",
)
FORM = "multipart/form-data"
FORM_BODY = MediaTypes(re.compile(FORM), f"a form, with the header 'content-type: {FORM}'")
# Half of a surrogate pair.
HALF = re.compile("[\ud800-\udfff]")


def media_type(header: str) -> str:
    """Return what the header content-type names, without its parameters."""
    return header.partition(";")[0].strip().lower()


def json_response(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text of JSON has, None if it has none or half a surrogate pair."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None


@functools.cache
def _decoder(struct: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(struct)


async def read(request: Request, struct: type[Body]) -> Body:
    """Return the body as this Struct. Raise ApiError 400 with the name of the field that is wrong."""
    body = await request.body()
    try:
        # The Struct forbids unknown fields, so that this quick way is right if it succeeds.
        decoded: Body = _decoder(struct).decode(body)
        return decoded
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return convert(parse(body), struct)


def parse(body: bytes) -> dict[str, Any]:
    """Return the object that a body of JSON has. Raise ApiError 400 if it has none."""
    try:
        fields = msgspec.json.decode(body)
    except UnicodeError:
        raise ApiError(400, "The body is not valid UTF-8.") from None
    except msgspec.MsgspecError as error:
        raise _half_character(body) or ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return fields


def _half_character(body: bytes) -> ApiError | None:
    """Return the error for a text with half a surrogate pair, such as an emoji that was cut; None if there is none.

    msgspec takes the end of that text for the end of the body. JavaScript's JSON.stringify writes such texts.
    """
    try:
        halves = ((path, match[0]) for path, text in _texts(json.loads(body)) if (match := HALF.search(text)))
        path, half = next(halves, ("", ""))
    except (ValueError, RecursionError):
        return None
    if not half:
        return None
    param = shown(path.removeprefix("."))
    place = f"'{param}'" if param else "The body"
    message = (
        f"{place} has \\u{ord(half):04x} without its other half, such as of an emoji that was cut in two: send whole "
        "characters."
    )
    return ApiError(400, message, param or None, "invalid_value")


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON value with their places. The name of a field comes before its value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, field in value.items():
            yield path, name
            yield from _texts(field, f"{path}.{name}")
    elif isinstance(value, list):
        for index, element in enumerate(value):
            yield from _texts(element, f"{path}[{index}]")


def convert(fields: dict[str, Any], struct: type[Body], strict: bool = True) -> Body:
    """Return the fields as this Struct. Raise ApiError for a wrong one. Unless strict, numbers may be texts."""
    known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    supported = {}
    for name, value in fields.items():
        if name not in known:
            _refuse(name, value)
        elif value is not None or known[name].required:
            supported[name] = value
    try:
        return msgspec.convert(supported, struct, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), struct) from None


def _refuse(name: str, value: Any) -> None:
    """Raise ApiError unless the unsupported field has its default value."""
    if value is None or name in IGNORED or _is_neutral(name, value):
        return
    if name in NEUTRAL:
        message = f"The parameter '{name}' is not supported here with this value: leave it out."
        raise ApiError(400, message, name, "unsupported_parameter")
    hint = " Use 'structured_outputs'." if name.startswith("guided_") else ""  # vLLM's former names
    raise ApiError(400, f"Unknown parameter: '{shown(name)}'.{hint}", shown(name), "unknown_parameter")


def _is_neutral(name: str, value: Any) -> bool:
    # 1 == True in Python.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )


def _invalid(message: str, struct: type[msgspec.Struct]) -> ApiError:
    """Return the error for a message of msgspec, such as "Expected `str`, got `int` - at `$.input[3]`"."""
    text, _, path = message.replace("`key` in `$", "`$").replace("NoneType", "null").partition(" - at `$")
    # An element of an object has three dots.
    param = path.rstrip("`").removeprefix(".").replace("[...]", "") or None
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if text.startswith("Invalid enum value") and param:
        values = _listed_values(struct, re.sub(r"\[\d+\]", "", param).split("."))
        text += f", use {' or '.join(map(repr, values))}" if values else ""
    return ApiError(400, f"Invalid value for '{param}': {text[:1].lower()}{text[1:]}." if param else f"{text}.", param)


def _listed_values(kind: Any, path: Sequence[str]) -> list[Any]:
    """Return the values of the Literal that a type has at a path of names; none if it has none there."""
    if get_origin(kind) is Literal:
        return [] if path else [*get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inner = [field.type for field in msgspec.structs.fields(kind) if [field.encode_name] == path[:1]]
        path = path[1:]
    else:
        inner = [*get_args(kind)]  # such as those of list[X] and X | None
    return list(dict.fromkeys(value for one in inner for value in _listed_values(one, path)))
