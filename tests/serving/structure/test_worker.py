"""Structured output: which documents a structure allows, what is refused, and the engines that obey it."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import threading

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serving.structure.checks import vocabulary
from serving.structure.json_grammar import json_grammar
from serving.structure.worker import COMPILE_SECONDS, Structure, canonical, compile_structure, xgrammar
from serving.triton.types import BadRequest
from serving.triton.worker_process import WorkerEnded
from tests.support import python_backend
from tests.support.checkpoints import language
from tests.support.documents import END, compiler, document
from tests.support.python_backend import InferenceRequest, ResponseSender
from tests.support.schemas import closed, schemas
from tests.support.served import assemble

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
ENGINES = {"openvino-fp32": ("openvino.engine", "GenAIGeneration"), "python": ("batched", "BatchedGeneration")}


@pytest.fixture(scope="module", params=ENGINES)
def served(request, stored, pb_utils, tmp_path_factory):
    """Serve a Llama with random weights on each engine."""
    folder = tmp_path_factory.mktemp("structured")
    weights = language.save_llama(folder / "weights")
    assemble(weights, folder / "repository", request.param)
    module, name = ENGINES[request.param]
    backend = getattr(importlib.import_module(f"serving.generation.{module}"), name)()
    config = {"model_transaction_policy": {"decoupled": False}} | python_backend.parameters(
        cache_gigabytes=1, client_grammars=1
    )
    backend.initialize(python_backend.instance_args(folder / "repository/m", config))
    yield backend
    backend.finalize()


def send(model, structure: object = None, **options: object) -> ResponseSender:
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 5, "exclude_input_in_output": True} | options
    if structure is not None:
        options["structured_outputs"] = structure
    request = InferenceRequest(["text", "finish_reason"], options, prompt=[b"I am going"])
    model.execute([request])
    return request.sender


def answer(sender: ResponseSender) -> tuple[str, str]:
    """Return the text and the reason why it ended, or the error and nothing."""
    assert sender.finished.wait(120)
    (response,) = sender.responses
    if response.error:
        return str(response.error), ""
    return response.outputs["text"][0].decode(), response.outputs["finish_reason"][0].decode()


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


def test_engine_obeys_each_form_beside_other_texts(served):
    plain = answer(send(served))
    structures = [structure for structure, _ in FORMS]
    senders = [send(served, structure) for structure in structures] + [send(served)]
    *texts, other = map(answer, senders)
    assert other == plain
    for (structure, pattern), (text, reason) in zip(FORMS, texts, strict=True):
        assert re.fullmatch(pattern, text), structure
        assert reason == "stop"
    assert json.loads(answer(send(served, {"json": schemas()[0]}, max_new_tokens=200))[0])


@pytest.mark.parametrize(
    ("structure", "options", "reason"),
    [
        ({"json": REFUSED[0][0]}, {}, "option 'structured_outputs': keyword 'uniqueItems' cannot be enforced"),
        (
            {"json": {"properties": 5}},
            {},
            "option 'structured_outputs': a keyword of a schema has a value of the wrong type",
        ),
        ({"grammar": "root ::= other"}, {}, 'Rule "other" is not defined'),
        ({"regex": "a(b"}, {}, "missing ), unterminated subpattern"),
        ({"choice": []}, {}, "it must be a list of strings"),
        ({"json": {"enum": ["x" * 300_000]}}, {}, "at most 262144 are allowed"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "magic"}}}, {}, "the format 'magic'"),
        ({"choice": ["a"]}, {"ignore_eos": True}, "options 'ignore_eos' and 'structured_outputs' exclude each other"),
    ],
)
def test_wrong_structure_is_refused_before_anything_is_generated(served, structure, options, reason):
    text, ended = answer(send(served, structure, **options))
    assert reason in text
    assert not ended


def test_texts_go_on_while_a_structure_compiles_that_takes_too_much(served, monkeypatch):
    """The worker holds one structure until another text has ended, and then ends as if it had taken too much."""
    asked, go = threading.Event(), threading.Event()

    def ask(worker, line):
        asked.set()
        assert go.wait(60)
        raise WorkerEnded("too much memory")

    with monkeypatch.context() as patched:
        patched.setattr("serving.triton.worker_process.WorkerProcess.ask", ask)
        held = send(served, {"choice": ["held"]})
        assert asked.wait(60)
        assert answer(send(served))[1]
        assert not held.finished.is_set()
        go.set()
        assert "too much memory to compile: make it smaller" in answer(held)[0]
    assert answer(send(served, {"choice": ["then"]})) == ("then", "stop")


@pytest.mark.parametrize("served", ["openvino-fp32"], indirect=True)
def test_texts_go_on_while_the_engine_prepares_for_its_first_structure(served, monkeypatch):
    asked, go = threading.Event(), threading.Event()
    load = served.engine.load_structured
    monkeypatch.setattr(served.engine, "structured", None)
    monkeypatch.setattr(served.engine, "load_structured", lambda: (asked.set(), go.wait(60), load())[-1])
    held = send(served, {"choice": ["new"]})
    assert asked.wait(60)
    assert answer(send(served))[1]
    assert not held.finished.is_set()
    go.set()
    assert answer(held) == ("new", "stop")


def test_text_ends_with_an_error_where_its_grammar_allows_no_token(served):
    dead_end = {"grammar": 'root ::= "x" never\nnever ::= never "y"'}
    senders = [send(served, dead_end), send(served, {"choice": ["other"]})]
    assert "no token of this model can continue the text" in answer(senders[0])[0]
    assert answer(senders[1]) == ("other", "stop")


def test_explosive_grammar_ends_only_its_worker(served):
    bomb = {"grammar": 'root ::= ((("a"{1,200}){1,200}){1,200}){1,200}'}
    assert re.search(f"too much memory|more than {COMPILE_SECONDS} s", answer(send(served, bomb))[0])
    assert answer(send(served, {"choice": ["then"]})) == ("then", "stop")


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


def test_grammars_beyond_the_bytes_of_the_cache_are_compiled_again(served, monkeypatch):
    monkeypatch.setattr("serving.structure.checks.MAX_CACHED_BYTES", 1)
    monkeypatch.setattr("serving.generation.openvino.structure.MAX_CACHED_BYTES", 1)
    for _ in range(2):
        for word in ("one", "two"):
            assert answer(send(served, {"choice": [word]})) == (word, "stop")
    assert len(served.structures.cached) == 1


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
