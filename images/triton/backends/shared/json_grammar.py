"""JSON schemas as EBNF for xgrammar: every document that the grammar allows is valid, and compact.

xgrammar's own conversion ignores keywords silently, and what it ignores differs between the releases in the engines.
Here a keyword that the grammar does not enforce is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from decimal import Decimal
from math import ceil, floor
from typing import Any, TypeAlias

from shared.regex_grammar import EVERY, characters, literal, one_of, regex, times, without
from shared.types import BadRequest

Schema: TypeAlias = dict[str, Any]

MAX_RULES = 20_000
# Digits of a number without bounds; Python and JavaScript read them all.
MAX_DIGITS = 15
# Digits after the point of a number with bounds, if the bounds themselves have no more.
MAX_PLACES = 4
HEXADECIMAL = "[0-9a-fA-F]"
UNESCAPED = characters(without(EVERY, [(0, 31), (34, 34), (92, 92)]))
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
# The keywords that the grammar enforces, by type.
ENFORCED: dict[str, set[str]] = {
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
ENFORCED["integer"] = ENFORCED["number"]
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
CONSTRAINTS = {"type", "enum", "const", *COMBINING}.union(*ENFORCED.values())
REFUSED = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "multipleOf"),
    *("uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef"),
}
TIGHTEN = {"min": max, "exc": max, "max": min}


def json_grammar(schema: Schema | bool) -> str:
    return Converter(schema).grammar()


class Impossible(BadRequest):
    """Raised for a part of a schema that no value can match, though another part may."""

    def __init__(self, reason: str = "no value can match") -> None:
        super().__init__(reason)


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
        if not isinstance(schema, dict):
            raise (
                Impossible("no value can match 'false'") if schema is False else BadRequest(f"{schema!r} is no schema")
            )
        key = json.dumps(schema)
        if key not in self.names:
            if len(self.rules) >= MAX_RULES:
                raise BadRequest(f"it has more than {MAX_RULES} parts")
            name = self.names[key] = f"r{next(self.numbers)}"
            try:
                self.rules[name] = self.body(schema)
            except Impossible:
                del self.names[key]
                raise
        return self.names[key]

    def body(self, schema: Schema) -> str:
        schema = self.resolved(schema)
        for combining in ("anyOf", "oneOf"):
            if options := schema.get(combining):
                base = {name: value for name, value in schema.items() if name != combining}
                merged = [self.merge(base, option) for option in listed(schema, combining)]
                return self.any_of(merged if combining == "anyOf" else self.exclusive(merged))
            if options is not None:
                raise BadRequest(f"'{combining}' must not be empty")
        types = schema_types(schema)
        if "const" in schema or "enum" in schema:
            return self.constants(schema, types)
        return " | ".join(self.typed(kind, schema) for kind in types) if types else "value"

    def any_of(self, options: list[Any]) -> str:
        rules = []
        for option in options:
            with contextlib.suppress(Impossible):
                rules.append(self.rule(option))
        if not rules:
            raise Impossible
        return " | ".join(rules)

    def resolved(self, schema: Schema) -> Schema:
        """Return the schema without annotations, $ref and allOf. Raise BadRequest for what no grammar enforces."""
        seen: set[str] = set()
        while True:
            for name in REFUSED & schema.keys():
                if schema[name] not in (False, None) or name == "not":
                    raise BadRequest(f"keyword '{name}' cannot be enforced: remove it")
            schema = {name: value for name, value in schema.items() if name in CONSTRAINTS}
            if "$ref" in schema:
                reference = schema.pop("$ref")
                if reference in seen:
                    raise BadRequest(f"$ref '{reference}' refers to itself")
                seen.add(reference)
                schema = self.merge(schema, self.target(reference))
            elif "allOf" in schema:
                parts = listed(schema, "allOf")
                schema = functools.reduce(self.merge, parts, {n: v for n, v in schema.items() if n != "allOf"})
            else:
                return schema

    def target(self, reference: Any) -> Schema:
        found: Any = self.schema
        try:
            if reference != "#" and not reference.startswith("#/"):
                raise KeyError
            for part in reference.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            raise BadRequest(f"$ref {reference!r} leads to no part of the schema") from None
        target: Schema = {} if found is True else found
        return target

    def merge(self, one: Schema, other: Any) -> Schema:
        """Return a schema for the values that match both."""
        if other is True:
            return one
        if not isinstance(other, dict):
            raise Impossible("no value can match 'false'") if other is False else BadRequest(f"{other!r} is no schema")
        if not one.keys() & CONSTRAINTS or not other.keys() & CONSTRAINTS:
            return other if other.keys() & (CONSTRAINTS | REFUSED) else one
        one, other = self.resolved(one), self.resolved(other)
        for closed, open in ((one, other), (other, one)):
            extra = open.get("properties", {}).keys() - closed.get("properties", {}).keys()
            if extra and closed.get("additionalProperties") is False:
                raise BadRequest(f"property '{min(extra)}' is excluded by 'additionalProperties' beside it")
        shared = {name: self.both(name, one[name], other[name]) for name in one.keys() & other.keys()}
        merged: Schema = one | other | shared
        return merged

    def both(self, name: str, one: Any, other: Any) -> Any:
        if one == other:
            return one
        if name == "properties":
            shared = {key: self.merge({"allOf": [one[key]]}, other[key]) for key in one.keys() & other.keys()}
            return one | other | shared
        if name == "required":
            return [*one, *(key for key in other if key not in one)]
        if name == "enum":
            return [value for value in one if compact(value) in map(compact, other)]
        if name == "type":
            one, other = ([own] if isinstance(own, str) else own for own in (one, other))
            kept = [t for t in one if t in other or (t == "integer" and "number" in other)]
            return kept + [t for t in other if t == "integer" and "number" in one and "integer" not in one]
        if name[:3] in TIGHTEN and name != "minContains":
            return TIGHTEN[name[:3]](one, other)
        if name == "additionalProperties" and False in (one, other):
            return False
        raise BadRequest(f"two values of '{name}' for the same part cannot be combined")

    def exclusive(self, options: list[Schema]) -> list[Schema]:
        """Return the options of a `oneOf`, if each excludes the others by a type or by the value of a property."""
        options = list(map(self.resolved, options))
        for number, one in enumerate(options):
            for other in options[:number]:
                if not self.exclude_each_other(one, other):
                    raise BadRequest(
                        "the options of 'oneOf' must exclude each other by their types or by a 'const' or 'enum' of a "
                        "property: use 'anyOf'"
                    )
        return options

    def exclude_each_other(self, one: Schema, other: Schema) -> bool:
        values, others = constants(one), constants(other)
        if values and others:
            return not values & others
        kinds, other_kinds = kinds_of(one), kinds_of(other)
        if not kinds or not other_kinds:
            return False
        if kinds == other_kinds == {"object"} and not values and not others:
            for name in one.get("properties", {}).keys() & other.get("properties", {}).keys():
                parts = [self.merge({}, own["properties"][name]) for own in (one, other)]
                values, others = (constants(self.resolved(part)) for part in parts)
                if values and others and not values & others:
                    for own in (one, other):  # without the property, both would match
                        own["required"] = [*dict.fromkeys([*own.get("required", []), name])]
                    return True
        return not kinds & other_kinds

    def constants(self, schema: Schema, types: list[str]) -> str:
        names = schema.keys() - {"const", "enum", "type"}
        values = listed(schema, "enum") if "enum" in schema else [schema["const"]]
        if "const" in schema and "enum" in schema:
            values = [value for value in values if compact(value) == compact(schema["const"])]
        if names & CONSTRAINTS:
            raise BadRequest(f"'{min(names & CONSTRAINTS)}' cannot be enforced beside 'enum' or 'const': remove it")
        values = [value for value in values if not types or any(has_type(value, kind) for kind in types)]
        if not values:
            raise Impossible("no value of 'enum' or 'const' can match")
        return one_of(map(compact, values))

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
        low, high = limits(schema, "minProperties", "maxProperties")
        if not properties:
            return self.map(schema, required, low, high)
        if unknown := [name for name in required if name not in properties]:
            raise BadRequest(f"'required' names '{unknown[0]}', which is not in 'properties'")
        if low > len(required) or (high is not None and high < len(properties)):
            raise BadRequest("'minProperties' and 'maxProperties' cannot be enforced beside 'properties': remove them")
        if {"patternProperties", "propertyNames"} & schema.keys():
            raise BadRequest("'patternProperties' and 'propertyNames' cannot be enforced beside 'properties'")
        # Rules from the last property to the first: the rest after another one, and from the beginning.
        rest = first = '""'
        for name, value in reversed(properties.items()):
            if value is False and name not in required:
                continue
            pair = f"{literal(compact(name) + ':')} {self.rule(value)}"
            after, begin = f'"," {pair} {rest}', f"{pair} {rest}"
            if name not in required:
                after, begin = f"{after} | {rest}", f"{begin} | {first}"
            rest, first = self.part(after), self.part(begin)
        return f'"{{" {first} "}}"'

    def part(self, body: str) -> str:
        name = f"p{next(self.numbers)}"
        self.rules[name] = body
        return name

    def map(self, schema: Schema, required: list[str], low: int, high: int | None) -> str:
        """Return EBNF for an object whose properties have no names in the schema."""
        patterns = schema.get("patternProperties", {})
        value: Any = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        names = schema.get("propertyNames", True)
        if required or low > 1:
            raise BadRequest("'required' and 'minProperties' need 'properties'")  # a property may come twice
        if patterns:
            if len(patterns) > 1 or value is not False or names is not True:
                raise BadRequest("'patternProperties' needs 'additionalProperties' false, and only one pattern")
            ((pattern, value),) = patterns.items()
            names = {"pattern": pattern}
        if value is False or high == 0:
            if low:
                raise Impossible("no object can match")
            return '"{}"'
        key = "string" if names is True else self.rule(self.merge({"type": "string"}, names))
        pair = f'{key} ":" {self.rule(value)}'
        more = times(0, None if high is None else high - 1)
        pairs = f'{pair} ("," {pair}){more}'
        return f'"{{" {pairs} "}}"' if low else f'"{{" ({pairs})? "}}"'

    def array(self, schema: Schema) -> str:
        prefix = [self.rule(item) for item in schema.get("prefixItems", [])]
        items = schema.get("items", schema.get("unevaluatedItems", not prefix))
        low, high = limits(schema, "minItems", "maxItems")
        if isinstance(items, list):
            raise BadRequest("'items' must be one schema: name those of the first items 'prefixItems'")
        if high is not None and high < len(prefix):
            prefix, items = prefix[:high], False
        if items is False:
            if low > len(prefix):
                raise BadRequest(f"'minItems' is {low}, and at most {len(prefix)} items are allowed")
            return f'"[" {""" "," """.join(prefix)} "]"' if prefix else '"[]"'
        if high == 0:
            return '"[]"'
        item = self.rule(items)
        if prefix:
            more = times(max(0, low - len(prefix)), None if high is None else high - len(prefix))
            return f'"[" {""" "," """.join(prefix)} ("," {item}){more} "]"'
        more = times(max(0, low - 1), None if high is None else high - 1)
        filled = f'{item} ("," {item}){more}'
        return f'"[" {filled} "]"' if low else f'"[" ({filled})? "]"'

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
            return f'"\\"" {self.regex(pattern, in_json=True)} "\\""'
        return f'"\\"" character{times(low, high)} "\\""' if has_limits else "string"

    def regex(self, pattern: str, in_json: bool = False) -> str:
        rules = regex(pattern, f"x{next(self.numbers)}", in_json)
        self.rules |= rules
        return next(iter(rules))


def listed(schema: Schema, name: str) -> list[Any]:
    if not isinstance(schema[name], list):
        raise BadRequest(f"'{name}' must be a list")
    return list(schema[name])


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def schema_types(schema: Schema) -> list[str]:
    """Return the types that a value may have; empty: any. Without `type`, a constraint tells it."""
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        if not types:
            raise Impossible
        return [t for t in types if t != "integer" or "number" not in types]
    implied = [kind for kind, names in ENFORCED.items() if names & schema.keys() and kind != "integer"]
    if len(implied) > 1:
        raise BadRequest(f"a part has constraints for {' and '.join(implied)}: set its 'type'")
    return implied


def constants(schema: Schema) -> set[str]:
    """Return the values that `const` or `enum` name, as JSON."""
    values = listed(schema, "enum") if "enum" in schema else [schema[name] for name in schema if name == "const"]
    return set(map(compact, values))


def kinds_of(schema: Schema) -> set[str]:
    """Return the types that a value may have, with integers as numbers; empty: not known."""
    if {"anyOf", "oneOf"} & schema.keys():
        return set()
    if values := constants(schema):
        return {kind for kind in ENFORCED for value in map(json.loads, values) if has_type(value, kind)} - {"integer"}
    return {"number" if kind == "integer" else kind for kind in schema_types(schema)}


def has_type(value: Any, kind: str) -> bool:
    match value:
        case bool():
            return kind == "boolean"
        case int() | float():
            return kind == "number" or (kind == "integer" and value == int(value))
    return {"object": dict, "array": list, "string": str, "null": type(None)}.get(kind) is type(value)


def limits(schema: Schema, minimum: str, maximum: str) -> tuple[int, int | None]:
    low, high = schema.get(minimum, 0), schema.get(maximum)
    for value in (low, high or 0):
        if not isinstance(value, int | float) or value != int(value) or value < 0:
            raise BadRequest(f"'{minimum}' and '{maximum}' must be whole numbers")
    if high is not None and low > high:
        raise BadRequest(f"'{minimum}' is more than '{maximum}'")
    return int(low), None if high is None else int(high)


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
    options = [f"-({option})" for option in decimals(max(1, -high), -low, places)] + decimals(max(0, low), high, places)
    if not options:
        raise Impossible("no number is within the bounds")
    return "|".join(options)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def decimals(low: int, high: int, places: int) -> list[str]:
    """Return patterns for the numbers from low to high, divided by 10^places, which are not negative."""
    if low > high:
        return []
    scale = 10**places
    first, last = low // scale, high // scale
    fractions = (low % scale, high % scale)
    if not places:
        return [between(str(low), str(high))]
    if first == last:
        return [str(first)] * (not fractions[0]) + [rf"{first}\.{fraction(*fractions, places)}"]
    options = []
    if fractions[0]:
        options.append(rf"{first}\.{fraction(fractions[0], scale - 1, places)}")
        first += 1
    if fractions[1] < scale - 1:
        options.append(str(last) + (rf"(\.{fraction(0, fractions[1], places)})?" if fractions[1] else ""))
        last -= 1
    return options + [rf"{between(str(first), str(last))}(\.\d{{1,{places}}})?"] * (first <= last)


def fraction(low: int, high: int, places: int) -> str:
    return between(str(low).zfill(places), str(high).zfill(places))


def between(low: str, high: str) -> str:
    """Return a pattern for the whole numbers between two. They may have leading zeros if they are of one length."""
    if low == high:
        return low
    if len(low) < len(high):
        return f"({between(low, '9' * len(low))}|{between('1' + '0' * len(low), high)})"
    size = len(low) - 1
    if low[0] == high[0]:
        return low[0] + between(low[1:], high[1:])
    first, last, zeros, nines = int(low[0]), int(high[0]), "0" * size, "9" * size
    options = []
    if low[1:] != zeros:
        options.append(low[0] + between(low[1:], nines))
        first += 1
    if high[1:] != nines:
        options.append(high[0] + between(zeros, high[1:]))
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}]" + rf"\d{{{size}}}" * bool(size))
    return f"({'|'.join(options)})"
