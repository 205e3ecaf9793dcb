"""Typed errors cross Triton's error string whole, and their words decide nothing."""

from __future__ import annotations

import grpc
import pytest

from gateway.edge.errors import about_request, from_triton
from gateway.triton.inference import rpc_error
from triton_transformers.errors import CONTEXT_LENGTH, INVALID_VALUE, TypedError, decode

FIELDS = {"text_input": "prompt", "max_new_tokens": "max_tokens"}
PLACES = {"images": ["messages[0].content[1]"]}


@pytest.mark.parametrize("prefix", ["", "in ensemble 'a', ", "in ensemble 'a', in ensemble 'b', [request id: 7] "])
@pytest.mark.parametrize("sentence", ["input 'prompt' is {empty}", "two\nlines\n\nAt:\n  a file", "é '\\ud83e'"])
def test_error_crosses_tritons_string_whole(prefix: str, sentence: str) -> None:
    error = TypedError.from_sentence(400, sentence, CONTEXT_LENGTH, ["prompt"])
    received = decode(prefix + error.encode())
    assert received is not None
    assert (received.sentence, received.status, received.code) == (sentence, 400, CONTEXT_LENGTH)
    assert list(received.fields) == ["prompt"]


@pytest.mark.parametrize("text", ["", "input 'prompt' is empty", "{}", "[400] a", '{"status": 400, "other": 1}', "7"])
def test_other_string_is_no_typed_error(text: str) -> None:
    assert decode(text) is None


@pytest.mark.parametrize(
    ("code", "field", "index", "param"),
    [
        (CONTEXT_LENGTH, "text_input", None, "prompt"),
        ("", "max_new_tokens", None, "max_tokens"),
        (INVALID_VALUE, "images", 0, "messages[0].content[1]"),
    ],
)
def test_reworded_sentence_changes_neither_code_nor_param(code: str, field: str, index: int | None, param: str) -> None:
    for sentence in ("the words are others now", f"input '{field}': row 0 is wrong", f"see '{field}'"):
        typed = TypedError.from_sentence(400, sentence, code, [field], index)
        error = from_triton(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, typed.encode()))
        named = about_request(error, FIELDS, PLACES)
        assert (named.status, named.param, named.code) == (400, param, code or None)
