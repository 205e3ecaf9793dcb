"""JSON schemas as EBNF for xgrammar: every document that the grammar allows is valid, and compact.

xgrammar's own conversion fails for a third of the documents of tests/support/schemas.py: its release 0.1.31, which is
in OpenVINO GenAI 2026.4, writes control characters and broken UTF-8 into strings, confuses constants that begin alike,
and ignores keywords silently. Here a keyword that the grammar does not enforce is refused by name.
"""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from math import ceil, floor
from typing import Any, TypeAlias

from serving.structure.regex_grammar import EVERY, UNSAFE, characters, literal, one_of, regex, without
from serving.triton.types import BadRequest

Schema: TypeAlias = dict[str, Any]

MAX_RULES = 20_000
# An object may have this many optional properties. At the end of a value, xgrammar compares all tokens with each
# property that may come next, and other texts wait: with 150,000 tokens, 13 ms for 300 properties, 350 ms for 3,000.
MAX_OPTIONAL = 300
# Digits of a number without bounds; Python and JavaScript read them all.
MAX_DIGITS = 15
# Digits after the point of a number with bounds, if the bounds themselves have no more.
MAX_PLACES = 4
HEXADECIMAL = "[0-9a-fA-F]"
UNESCAPED = characters(without(EVERY, UNSAFE))
CHARACTER = (
    f'character ::= {UNESCAPED} | "\\\\" (["\\\\/bfnrt] | "u" '
    f"([0-9abcefABCEF] {HEXADECIMAL}{{3}} | [dD] [0-7] {HEXADECIMAL}{{2}}))"
)
VALUES = f"""
{CHARACTER}
string ::= "\\"" string_rest
string_rest ::= "\\"" | character string_rest
integer ::= "-"? ("0" | [1-9] [0-9]{{0,{MAX_DIGITS - 1}}})
number ::= integer ("." [0-9]{{1,{MAX_DIGITS}}})? ([eE] [+-]? [0-9]{{1,2}})?
object ::= "{{" (member ("," member)*)? "}}"
member ::= string ":" value
array ::= "[" (value ("," value)*)? "]"
value ::= object | array | string | number | "true" | "false" | "null"
"""
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
DATE = r"(19|20)\d\d-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
LABEL = "[a-z0-9]+(-[a-z0-9]+)*"
HOST = rf"{LABEL}(\.{LABEL})*"
FORMATS = {
    "date-time": f"{DATE}T{TIME}",
    "date": DATE,
    "time": TIME,
    "duration": r"P(\d{1,4}W|\d{1,4}D(T\d{1,4}H)?|T\d{1,4}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{HOST}\.[a-z]{{2,8}}",
    "hostname": HOST,
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uri": rf"https?://{HOST}(:[1-9]\d{{0,3}})?(/[a-zA-Z0-9._~-]*)*(\?[a-zA-Z0-9=&_-]+)?",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
# Patterns that need a lookahead, and the same without one: pydantic's for a Decimal.
SAME_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"[+-]?(\d+(\.\d*)?|\.\d+)"}
# The keywords that the grammar enforces, by type.
ENFORCED: dict[str, set[str]] = {
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
ENFORCED["integer"] = ENFORCED["number"]
# The keywords that stand alone: no other constraint may be beside them, or only those of CONSTANT together.
CONSTANT = {"const", "enum", "type"}
ALONE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
CONSTRAINTS = {"type", *ALONE}.union(*ENFORCED.values())
REFUSED = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "multipleOf"),
    *("uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
JSON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
JSON_TYPES |= {dict: "object", list: "array"}


def json_grammar(schema: Schema | bool) -> str:
    return Converter(schema).grammar()


class Converter:
    def __init__(self, schema: Schema | bool) -> None:
        self.schema = schema
        self.rules: dict[str, str] = {}  # by name
        self.names: dict[str, str] = {}  # of the rule for a schema, by its JSON
        self.numbers = itertools.count()

    def grammar(self) -> str:
        root = self.rule(self.schema)
        lines = [f"{name} ::= {body}" for name, body in self.rules.items()]
        return "\n".join([f"root ::= {root}", *lines]) + VALUES

    def rule(self, schema: Any) -> str:
        """Return the name of the rule for a schema. The name exists before the rule, so that schemas may recur."""
        if schema is True:
            return "value"
        key = json.dumps(schema)
        if key not in self.names:
            if len(self.rules) >= MAX_RULES:
                raise BadRequest(f"it has more than {MAX_RULES} parts")
            name = self.names[key] = f"r{next(self.numbers)}"
            self.rules[name] = self.body(schema)
        return self.names[key]

    def body(self, schema: Schema) -> str:
        schema = self.resolved(schema)
        if "anyOf" in schema:
            return " | ".join(map(self.rule, listed(schema, "anyOf")))
        if "oneOf" in schema:
            return " | ".join(map(self.rule, self.exclusive(listed(schema, "oneOf"))))
        if values := constants(schema):
            return one_of(values)
        types = schema_types(schema)
        return " | ".join(self.typed(kind, schema) for kind in types) if types else "value"

    def resolved(self, schema: Any) -> Schema:
        """Return the schema without annotations, or the one that it refers to. Refuse what no grammar enforces."""
        seen: set[str] = set()
        while True:
            if not isinstance(schema, dict):
                raise BadRequest("no value can match 'false'" if schema is False else f"{schema!r} is no schema")
            for name in REFUSED & schema.keys():
                if name != "uniqueItems" or schema[name]:
                    raise BadRequest(f"keyword '{name}' cannot be enforced: remove it")
            schema = {name: value for name, value in schema.items() if name in CONSTRAINTS}
            alone = next((name for name in ALONE if name in schema), None)
            others = schema.keys() - (CONSTANT if alone in CONSTANT else {alone})
            if alone and others:
                raise BadRequest(f"'{min(others)}' cannot be enforced beside '{alone}': remove one of them")
            if alone == "allOf":
                if len(parts := listed(schema, "allOf")) > 1:
                    raise BadRequest("'allOf' with several parts cannot be enforced: write them as one schema")
                (schema,) = parts
            elif alone == "$ref":
                reference = schema["$ref"]
                if reference in seen:
                    raise BadRequest(f"$ref '{reference}' refers to itself")
                seen.add(reference)
                schema = self.target(reference)
            else:
                return dict(schema)

    def target(self, reference: Any) -> Any:
        found: Any = self.schema
        try:
            if reference != "#" and not reference.startswith("#/"):
                raise KeyError
            for part in reference.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            raise BadRequest(f"$ref {reference!r} leads to no part of the schema") from None
        return {} if found is True else found

    def exclusive(self, options: list[Any]) -> list[Schema]:
        """Return the options of a `oneOf`, if each two differ in their types, or in the constants of one property."""
        options = list(map(self.resolved, options))
        kinds = [kind.replace("integer", "number") for option in options for kind in schema_types(option) or ["any"]]
        if (len(set(kinds)) == len(kinds) and "any" not in kinds) or self.name_different_constants(options):
            return options
        for name in options[0].get("properties", {}):
            if self.name_different_constants([option.get("properties", {}).get(name, {}) for option in options]):
                # Without the property, several options would match.
                return [option | {"required": [*option.get("required", []), name]} for option in options]
        raise BadRequest(
            "the options of 'oneOf' must exclude each other by their types or by a 'const' or 'enum' of a property: "
            "use 'anyOf'"
        )

    def name_different_constants(self, schemas: list[Any]) -> bool:
        values = [constants(self.resolved(schema)) for schema in schemas]
        return all(values) and len(set().union(*values)) == sum(map(len, values))

    def typed(self, kind: str, schema: Schema) -> str:
        match kind:
            case "object":
                return self.object(schema)
            case "array":
                return self.array(schema)
            case "string":
                return self.string(schema)
            case "number" | "integer":
                pattern = numbers(schema, kind == "integer")
                return self.regex(pattern) if pattern else kind
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
        raise BadRequest(f"type {kind!r} is unknown")

    def object(self, schema: Schema) -> str:
        properties: Schema = schema.get("properties") or {}
        required = schema.get("required", [])
        if unknown := [name for name in required if name not in properties]:
            raise BadRequest(f"'required' names '{unknown[0]}', which is not in 'properties'")
        if not properties:
            return self.map(schema)
        if refused := ENFORCED["object"] & schema.keys() - {"properties", "required", "additionalProperties"}:
            raise BadRequest(f"'{min(refused)}' cannot be enforced beside 'properties': remove it")
        if (optional := len(properties.keys() - {*required})) > MAX_OPTIONAL:
            raise BadRequest(f"an object has {optional} optional properties; at most {MAX_OPTIONAL} are supported")
        pairs = [
            (f"{literal(compact(name) + ':')} {self.rule(value)}", name not in required)
            for name, value in properties.items()
        ]
        members, may_be_empty = self.members(pairs)
        return f'"{{" ({members}){"?" * may_be_empty} "}}"'

    def members(self, pairs: list[tuple[str, bool]]) -> tuple[str, bool]:
        """Return EBNF for properties, each with whether it is optional, and whether all of them are.

        The EBNF needs at least one of them. It is a tree, which xgrammar compiles faster than a list.
        """
        if len(pairs) == 1:
            return pairs[0]
        middle = len(pairs) // 2
        (left, left_is_optional), (right, right_is_optional) = map(self.members, (pairs[:middle], pairs[middle:]))
        if not left_is_optional:
            return f'{left} ("," {right}){"?" * right_is_optional}', False
        right = self.part(right)
        more = "?" * right_is_optional
        return self.part(f'{left} ("," {right}){more} | {right}'), right_is_optional

    def part(self, body: str) -> str:
        name = f"p{next(self.numbers)}"
        self.rules[name] = body
        return name

    def map(self, schema: Schema) -> str:
        """Return EBNF for an object whose properties have no names in the schema."""
        low, high = limits(schema, "minProperties", "maxProperties")
        names, value = schema.get("propertyNames", {}), schema.get("additionalProperties", True)
        if patterns := schema.get("patternProperties"):
            if len(patterns) > 1 or value is not False or names:
                raise BadRequest("'patternProperties' needs 'additionalProperties' false, and only one pattern")
            ((pattern, value),) = patterns.items()
            names = {"pattern": pattern}
        if low > (value is not False):  # a property may come twice
            raise BadRequest(f"'minProperties' is {low}, which cannot be enforced: remove it")
        if value is False:
            return '"{}"'
        key = self.rule({"type": "string"} | self.resolved(names))
        pairs = repeated(f'{key} ":" {self.rule(value)}', low, high)
        return f'"{{" {pairs} "}}"'

    def array(self, schema: Schema) -> str:
        prefix = list(map(self.rule, schema.get("prefixItems", [])))
        items = schema.get("items", not prefix)
        low, high = limits(schema, "minItems", "maxItems")
        if isinstance(items, list):
            raise BadRequest("'items' must be one schema: name those of the first items 'prefixItems'")
        if high is not None and high < len(prefix):
            raise BadRequest(f"'maxItems' is {high}, and 'prefixItems' has {len(prefix)} items")
        count = len(prefix)
        if items is False or high == count:
            if low > count:
                raise BadRequest(f"'minItems' is {low}, and at most {count} items are allowed")
            return f'"[" {""" "," """.join(prefix)} "]"'
        if not prefix:
            return f'"[" {repeated(self.rule(items), low, high)} "]"'
        more = times(max(0, low - count), None if high is None else high - count)
        return f'"[" {""" "," """.join(prefix)} ("," {self.rule(items)}){more} "]"'

    def string(self, schema: Schema) -> str:
        low, high = limits(schema, "minLength", "maxLength")
        has_limits = bool(low) or high is not None
        if sum(("pattern" in schema, "format" in schema, has_limits)) > 1:
            raise BadRequest(
                "'pattern', 'format' and limits of the length cannot be enforced together: keep one of them"
            )
        if "format" in schema and schema["format"] not in FORMATS:
            raise BadRequest(f"format '{schema['format']}' cannot be enforced; these can: {', '.join(FORMATS)}")
        if pattern := schema.get("pattern") or FORMATS.get(schema.get("format", "")):
            return f'"\\"" {self.regex(SAME_PATTERNS.get(pattern, pattern), in_json=True)} "\\""'
        return f'"\\"" character{times(low, high)} "\\""' if has_limits else "string"

    def regex(self, pattern: str, in_json: bool = False) -> str:
        rules = regex(pattern, f"x{next(self.numbers)}", in_json)
        self.rules |= rules
        return next(iter(rules))


def listed(schema: Schema, name: str) -> list[Any]:
    if not isinstance(schema[name], list) or not schema[name]:
        raise BadRequest(f"'{name}' must be a list, and not empty")
    return list(schema[name])


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def schema_types(schema: Schema) -> list[str]:
    """Return the types that a value may have; empty: any. Without `type`, a constraint tells it."""
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else listed(schema, "type")
        return [t for t in types if t != "integer" or "number" not in types]
    implied = [kind for kind, names in ENFORCED.items() if names & schema.keys() and kind != "integer"]
    if len(implied) > 1:
        raise BadRequest(f"a part has constraints for {' and '.join(implied)}: set its 'type'")
    return implied


def constants(schema: Schema) -> set[str]:
    """Return the values that `const` or `enum` name, as JSON."""
    if "const" not in schema and "enum" not in schema:
        return set()
    values = listed(schema, "enum") if "enum" in schema else [schema["const"]]
    if "const" in schema:  # pydantic 2.8 writes both
        values = [value for value in values if compact(value) == compact(schema["const"])]
    if not values:
        raise BadRequest("'enum' does not have the value of 'const' beside it")
    types = schema_types(schema) or JSON_TYPES.values()
    for value in values:
        if not {JSON_TYPES[type(value)], *(["number"] if type(value) is int else [])} & {*types}:
            raise BadRequest(f"'enum' or 'const' has the value {compact(value)}, which 'type' excludes")
    return set(map(compact, values))


def limits(schema: Schema, minimum: str, maximum: str) -> tuple[int, int | None]:
    low, high = schema.get(minimum, 0), schema.get(maximum)
    for value in (low, high or 0):
        if not isinstance(value, int | float) or value != int(value) or value < 0:
            raise BadRequest(f"'{minimum}' and '{maximum}' must be whole numbers")
    if high is not None and low > high:
        raise BadRequest(f"'{minimum}' is more than '{maximum}'")
    return int(low), None if high is None else int(high)


def times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def repeated(item: str, low: int, high: int | None) -> str:
    """Return EBNF for so many items with commas between them."""
    if high == 0:
        return '""'
    items = f'{item} ("," {item}){times(max(0, low - 1), None if high is None else high - 1)}'
    return items if low else f"({items})?"


def numbers(schema: Schema, whole: bool) -> str:
    """Return a pattern for the numbers within the bounds: whole ones, or with digits after the point; "": no bounds."""
    names = ENFORCED["number"] & schema.keys()
    if not names:
        return ""
    if refused := [name for name in names if not is_number(schema[name])]:
        raise BadRequest(f"'{min(refused)}' must be a number")
    bounds = {name: Decimal(str(schema[name])) for name in names}
    places = 0 if whole else max(MAX_PLACES, *(-int(bound.as_tuple().exponent) for bound in bounds.values()))
    scale = 10**places
    lows = [ceil(bounds["minimum"] * scale)] if "minimum" in bounds else []
    lows += [floor(bounds["exclusiveMinimum"] * scale) + 1] if "exclusiveMinimum" in bounds else []
    highs = [floor(bounds["maximum"] * scale)] if "maximum" in bounds else []
    highs += [ceil(bounds["exclusiveMaximum"] * scale) - 1] if "exclusiveMaximum" in bounds else []
    wide = 10**MAX_DIGITS * scale
    low, high = max(lows, default=min([0, *highs]) - wide), min(highs, default=max([0, *lows]) + wide)
    spans = [("-", max(1, -high), -low), ("", max(0, low), high)]
    options = [
        sign + between(str(first).zfill(places + 1), str(last).zfill(places + 1), places)
        for sign, first, last in spans
        if first <= last
    ]
    if not options:
        raise BadRequest("no number is within the bounds")
    return "|".join(options)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def between(low: str, high: str, places: int) -> str:
    """Return a pattern for the numbers between two, of whose digits so many are after the point; -1: all are.

    The last digits of a fraction may be missing, but not its first. If both are of one length, zeros may come first.
    """
    if len(low) < len(high):
        return f"({between(low, '9' * len(low), places)}|{between('1' + '0' * len(low), high, places)})"
    if not low:
        return ""
    size = len(low) - 1
    zeros, nines = "0" * size, "9" * size
    if size < places:  # only the fraction is left
        fraction = rf"\.{between(low, high, -1)}"
        return f"({fraction})?" if low == "0" + zeros else fraction
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + between(low[1:], high[1:], places)
    options = []
    if low[1:] != zeros:
        options.append(low[0] + between(low[1:], nines, places))
        first += 1
    if high[1:] != nines:
        options.append(high[0] + between(zeros, high[1:], places))
        last -= 1
    if first <= last:
        fraction = rf"(\.\d{{1,{places}}})?" if places > 0 else ""
        free = rf"\d{{0,{size}}}" if places < 0 else rf"\d{{{size - places}}}{fraction}"
        options.append(f"[{first}-{last}]{free}")
    return f"({'|'.join(options)})"
