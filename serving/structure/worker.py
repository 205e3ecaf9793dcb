"""Compile grammars in a process of its own, because xgrammar can neither be stopped nor limited.

The first line of the standard input has the vocabulary; the first answer tells whether xgrammar is there. Each
further line is one `structured_outputs`, and its answer the form in which every engine takes it, or the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from serving.structure.json_grammar import json_grammar
from serving.structure.regex_grammar import one_of, regex_grammar
from serving.triton.types import BadRequest
from serving.triton.worker_process import serve_lines

# More than the process has with the vocabulary.
MEMORY_BYTES = 1 << 30
# Structures of real clients compile in less than a second. OpenVINO GenAI then compiles them a second time.
COMPILE_SECONDS = 5  # of CPU time
# The formats of a structural tag whose content xgrammar takes as it is. Those of JSON and regex become grammars.
FORMATS = {
    *("const_string", "any_text", "grammar", "sequence", "or", "tag", "triggered_tags", "tags_with_separator"),
    "structural_tag",
}
# The values of the forms that are no string.
FORMS = {"json": "a JSON schema", "json_object": "true", "choice": "a list of strings", "structural_tag": "an object"}
# xgrammar's own place in its messages, and the condition that failed there.
PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+:\d+: )?(Check failed: \(.*?\) is false: )?")
NO_GRAMMARS = (
    "this model takes no grammars of clients, because an ambiguous one can hold up all its texts: send 'json', 'regex' "
    "or 'choice', or set the parameter 'client_grammars' of the model to 1"
)


class Structure(NamedTuple):
    """A structure as every engine takes it."""

    form: str  # grammar or structural_tag
    text: str  # EBNF or JSON
    size: int = 0  # bytes of memory when it is compiled, as xgrammar counts them


def xgrammar(stand_in: bool = False) -> SimpleNamespace:
    """Return the parts of xgrammar that compile. Its package itself imports torch and transformers, for more.

    With `stand_in`, take none of these two, even where they are installed: that takes seconds and 200 MB.
    """
    if stand_in:
        sys.modules["torch"] = None  # type: ignore[assignment]
        transformers = ModuleType("transformers")
        transformers.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast = object  # type: ignore[attr-defined]
        sys.modules["transformers"] = transformers
    use_parts()
    names = ["compiler", "tokenizer_info", *["matcher"] * (not stand_in)]
    modules = [importlib.import_module(f"xgrammar.{name}") for name in names]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def use_parts() -> None:
    """Let the parts of xgrammar be imported, without the package itself."""
    if "xgrammar" in sys.modules:
        return
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'xgrammar'")
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["xgrammar"] = package
    if (Path(package.__path__[0]) / "load_binding.py").is_file():
        importlib.import_module("xgrammar.load_binding")


def new_compiler(library: SimpleNamespace, tokens: list[bytes], end_tokens: list[int]) -> Any:
    """Return xgrammar's compiler for a vocabulary, on one thread."""
    vocabulary = library.TokenizerInfo(
        tokens, vocab_type=library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=end_tokens
    )
    return library.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def compile_structure(compiler: Any, structure: Structure) -> Any:
    if structure.form == "structural_tag":
        return compiler.compile_structural_tag(structure.text)
    return compiler.compile_grammar(structure.text)


def canonical(structure: dict[str, Any], takes_grammars: bool) -> Structure:
    """Return the same structure as every engine takes it."""
    ((kind, value),) = structure.items()
    if kind in ("json", "structural_tag") and isinstance(value, str):
        value = parsed(value)
    match kind, value:
        case "json", dict() | bool():
            return Structure("grammar", json_grammar(value))
        case "json_object", True:
            return Structure("grammar", json_grammar({"type": "object"}))
        case "regex", str():
            return Structure("grammar", regex_grammar(value))
        case "choice", [_, *_] if all(isinstance(choice, str) for choice in value):
            return Structure("grammar", f"root ::= {one_of(value)}")
        case "grammar", str() if takes_grammars:
            return Structure("grammar", value)
        case "grammar", str():
            raise BadRequest(NO_GRAMMARS)
        case "structural_tag", dict():
            return Structure("structural_tag", json.dumps(with_grammars(value, takes_grammars)))
    raise BadRequest(f"it must be {FORMS.get(kind, 'a string')}")


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequest(f"it is not valid JSON: {error}") from None


def with_grammars(part: Any, takes_grammars: bool) -> Any:
    """Return a part of a structural tag, with grammars in place of JSON schemas and regular expressions."""
    if isinstance(part, list):
        return [with_grammars(own, takes_grammars) for own in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "json_schema":
        return {"type": "grammar", "grammar": json_grammar(part.get("json_schema", True))}
    if kind == "regex":
        return {"type": "grammar", "grammar": regex_grammar(str(part.get("pattern")))}
    if kind == "const_string" and part.get("value") == "":  # which xgrammar refuses
        return {"type": "grammar", "grammar": 'root ::= ""'}
    if kind == "grammar" and not takes_grammars:
        raise BadRequest(NO_GRAMMARS)
    if isinstance(kind, str) and kind not in FORMATS:
        raise BadRequest(
            f"the format '{kind}' is not supported; these are: {', '.join(sorted(FORMATS))}, json_schema, regex"
        )
    return {name: with_grammars(value, takes_grammars) for name, value in part.items()}


def answer(compiler: Any, structure: dict[str, Any], takes_grammars: bool) -> dict[str, Any]:
    try:
        result = canonical(structure, takes_grammars)
        return result._replace(size=compile_structure(compiler, result).memory_size_bytes)._asdict()
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": "it needs too much memory to compile: make it smaller"}
    except (AttributeError, KeyError, TypeError):
        return {"error": "a keyword of a schema has a value of the wrong type"}
    except Exception as error:
        return {"error": PLACE.sub("", " ".join(str(error).split()))[:300] or type(error).__name__}


def main() -> None:
    os.nice(10)  # texts go on
    setup = json.loads(sys.stdin.readline())
    try:
        library = xgrammar(stand_in=True)
    except ImportError as error:
        print(json.dumps({"error": f"this server has no xgrammar ({error})"}), flush=True)
        return
    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    compiler = new_compiler(library, tokens, setup["end_tokens"])
    serve_lines(lambda structure: answer(compiler, structure, setup["takes_grammars"]), COMPILE_SECONDS, MEMORY_BYTES)


if __name__ == "__main__":
    main()
