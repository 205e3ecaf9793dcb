"""Structured output: which documents a structure allows, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serving.structure.checks import vocabulary
from serving.structure.json_grammar import json_grammar
from serving.structure.worker import Structure, canonical, compile_structure, xgrammar
from serving.triton.types import BadRequest
from tests.support.checkpoints import language
from tests.support.documents import END, compiler, document
from tests.support.schemas import closed, schemas

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
INTEGER = {"type": "integer"}
TAG = {
    "type": "tag",
    "begin": "<t>",
    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    "end": "</t>",
}
TAGS = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [TAG], "at_least_one": True, "stop_after_first": True}
EMPTY_OR_TAG = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "x"},
        {"type": "or", "elements": [{"type": "const_string", "value": ""}, TAG]},
    ],
}
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
# A value of `structured_outputs`, and the pattern of the texts that it allows.
FORMS = [
    ({"choice": ["yes", "no", "not yet"]}, "yes|no|not yet"),
    ({"regex": r"[a-f]{3}-\d{1,3}"}, r"[a-f]{3}-\d{1,3}"),
    ({"regex": "[ab]{0,3}"}, "[ab]{0,3}"),
    ({"choice": ["", "a"]}, "a?"),
    ({"grammar": 'root ::= "x" [0-9] end\nend ::= "." | "!"'}, r"x\d[.!]"),
    ({"json": closed({"a": {"enum": [1, 2]}})}, r'\{"a":[12]\}'),
    ({"json": '{"const": null}'}, "null"),
    ({"json": {"type": "string", "pattern": PYDANTIC_DECIMAL}}, r'"[+-]?(\d+\.?\d*|\.\d+)"'),
    ({"structural_tag": {"type": "structural_tag", "format": TAGS}}, "<t>[12]</t>"),
    ({"structural_tag": {"type": "structural_tag", "format": EMPTY_OR_TAG}}, "x(<t>[12]</t>)?"),
]
REFUSED = [
    ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' cannot be enforced"),
    ({"type": "number", "multipleOf": 0.5}, "keyword 'multipleOf' cannot be enforced"),
    (closed({"a": {"not": INTEGER}}), "keyword 'not' cannot be enforced"),
    (closed({"a": INTEGER}, ["a", "b"]), "'required' names 'b'"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "must exclude each other"),
    ({"type": "string", "format": "iri"}, "format 'iri' cannot be enforced"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "cannot be enforced together"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "lookarounds, backreferences, conditions, word boundaries"),
    ({"type": "string", "pattern": "(((a{1,99}){1,99}){1,99})"}, "more than 3000 states"),
    ({"$ref": "https://example.com/schema"}, "leads to no part of the schema"),
    ({"$ref": "#"}, "refers to itself"),
    ({"minimum": 1, "maxLength": 2}, "set its 'type'"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no number is within the bounds"),
    ({"enum": ["a"], "maxLength": 2}, "'maxLength' cannot be enforced"),
    ({"type": "object", "patternProperties": {"^a": {}}}, "'patternProperties' needs"),
    (closed({"a": False}), "no value can match 'false'"),
    ({"type": "object", "minProperties": 2}, "'minProperties' is 2, which cannot be enforced"),
    ({"const": 1, "enum": [2]}, "'enum' does not have the value of 'const'"),
    ({"type": "string", "enum": ["a", None]}, "the value null, which 'type' excludes"),
    ({"allOf": [closed({"a": INTEGER}), {"properties": {"b": INTEGER}}]}, "'allOf' with several parts"),
    (closed({f"p{number}": INTEGER for number in range(301)}, []), "301 optional properties; at most 300"),
    ({"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, "'properties' cannot be enforced beside 'anyOf'"),
]


def test_every_document_is_complete_and_valid():
    for number, schema in enumerate(schemas()):
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        text = document(Structure("grammar", json_grammar(schema)), seed=number)
        validator.validate(json.loads(text))


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_schema_that_cannot_be_enforced_is_refused_by_name(schema, reason):
    with pytest.raises(BadRequest, match=re.escape(reason)):
        json_grammar(schema)


@pytest.mark.parametrize(("structure", "pattern"), FORMS)
def test_grammar_allows_only_the_form(structure, pattern):
    texts = {document(canonical(structure, takes_grammars=True), seed) for seed in range(20)}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1 or "const" in str(structure)


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": 'root ::= "a"'},
        {
            "structural_tag": {
                "format": {"type": "sequence", "elements": [{"type": "grammar", "grammar": "root ::= a"}]}
            }
        },
        {"structural_tag": '{"format": {"type": "grammar", "grammar": "root ::= a"}}'},
    ],
)
def test_grammars_of_clients_need_the_parameter(structure):
    with pytest.raises(BadRequest, match="this model takes no grammars of clients"):
        canonical(structure, takes_grammars=False)


def test_object_of_thousands_of_properties_is_compiled():
    names = [f"p{number}" for number in range(3000)]
    schema = closed(dict.fromkeys(names, INTEGER), [name for name in names if not name.endswith("7")])
    text = document(Structure("grammar", json_grammar(schema)), seed=1)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("required", [[], ["a"], ["c"], ["a", "c"], ["b", "d", "e"], [*"abcde"]])
def test_objects_have_any_of_their_optional_properties(required):
    schema = closed({name: {"const": 1} for name in "abcde"}, required)
    grammar = Structure("grammar", json_grammar(schema))
    compiled = compile_structure(compiler(), grammar)
    for names in itertools.chain.from_iterable(itertools.combinations("abcde", count) for count in range(6)):
        matcher = xgrammar().GrammarMatcher(compiled)
        text = json.dumps(dict.fromkeys(names, 1), separators=(",", ":"))
        allowed = matcher.accept_string(text) and matcher.accept_token(END)
        assert allowed == ({*required} <= {*names}), text


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_vocabulary_has_the_bytes_of_the_tokens(tmp_path, kind):
    text = "Grüße 🥖, 비 그친\n뒤 <tool> x"
    if kind == "byte_level":
        language.save_gpt2(tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "G"]
        tokenizer = Tokenizer(
            models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens(["<end>"])
    tokens = vocabulary(tokenizer, tokenizer.get_vocab_size())
    assert b"".join(tokens[id] for id in tokenizer.encode(text, add_special_tokens=False).ids).decode() == text
    assert tokens[tokenizer.token_to_id("<end>")] == b""
