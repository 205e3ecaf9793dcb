"""Regular expressions as EBNF for xgrammar, in which every engine's release of it agrees.

xgrammar's own conversion lets a pattern write quotes and line ends into a JSON string, and ignores lookaheads. Its
release 0.1.31, which is in OpenVINO GenAI 2026.4, also accepts other texts if several options begin with the same
characters, and characters that are no UTF-8. So these rules are those of a deterministic automaton: each character
leads to one rule. Nor can an ambiguous pattern slow its text down, for which all others would wait.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from serving.triton.types import BadRequest

# Ranges of code points, first and last.
Ranges: TypeAlias = tuple[tuple[int, int], ...]
# The parts of a pattern that are still to be matched, as Python's parser returns them.
Parts: TypeAlias = tuple[Any, ...]

SURROGATES: Ranges = ((0xD800, 0xDFFF),)  # UTF-8 has none
# Ranges whose UTF-8 differs in its last bytes only: xgrammar 0.1.31 (in OpenVINO GenAI 2026.4) gets others wrong.
UNIFORM: Ranges = (
    *((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFF), (0x1000, 0xCFFF), (0xD000, 0xD7FF), (0xE000, 0xFFFF)),
    *((0x10000, 0x3FFFF), (0x40000, 0xFFFFF), (0x100000, 0x10FFFF)),
)
EVERY: Ranges = ((0, 0x10FFFF),)
ASCII: Ranges = ((0, 0x7F),)
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
# The characters that JSON must escape, and the code points that it writes as a backslash and a letter.
UNSAFE: Ranges = ((0, 31), (34, 34), (92, 92))
ESCAPED = dict(zip(map(ord, '"\\\b\f\n\r\t'), '"\\bfnrt', strict=True))
MAX_STATES = 3000


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    for first, last in removed:
        parts = [part for low, high in ranges for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
        ranges = tuple(sorted({(low, high) for low, high in parts if low <= high}))
    return ranges


# Python's digits and letters are Unicode's, and ECMA's are ASCII's: only what both mean is generated.
DIGITS: Ranges = ((48, 57),)
LETTERS: Ranges = (*DIGITS, (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
CATEGORIES: dict[Any, Ranges] = {
    sre.CATEGORY_DIGIT: DIGITS,
    sre.CATEGORY_WORD: LETTERS,
    sre.CATEGORY_SPACE: SPACES,
    sre.CATEGORY_NOT_DIGIT: without(ASCII, DIGITS),
    sre.CATEGORY_NOT_WORD: without(ASCII, LETTERS),
    sre.CATEGORY_NOT_SPACE: without(ASCII, (*SPACES, (28, 31))),  # Python's \s has these four, too
}


def regex(pattern: str, name: str, in_json: bool = False) -> dict[str, str]:
    """Return EBNF's rules for the texts that match the whole pattern, of which the first is the whole.

    With `in_json`, the texts are inside the quotes of a JSON string. A pattern without anchors is treated as if it had
    them.
    """
    try:
        return automaton(parse(pattern), name, in_json)
    except BadRequest as error:
        raise BadRequest(f"pattern '{pattern}': {error}") from None
    finally:
        next_parts.cache_clear()


def regex_grammar(pattern: str) -> str:
    rules = regex(pattern, "x")
    return "\n".join([f"root ::= {next(iter(rules))}", *(f"{name} ::= {body}" for name, body in rules.items())])


def parse(pattern: str) -> Parts:
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise BadRequest(str(error)) from None
    if parsed.state.flags & ~re.UNICODE:
        raise BadRequest("flags inside a pattern are not supported")
    parts: Parts = hashable(parsed)
    return parts


def hashable(parsed: Any) -> Any:
    return tuple(map(hashable, parsed)) if isinstance(parsed, list | tuple | _parser.SubPattern) else parsed


def automaton(pattern: Parts, name: str, in_json: bool) -> dict[str, str]:
    """Return a rule for each state, which is the set of what may be left of the pattern."""
    names = {frozenset([pattern]): f"{name}_0"}
    rules: dict[str, str] = {}
    left = list(names)
    for state in left:
        options, escapes = [], []
        steps = {step for parts in state for step in next_parts(parts, begins=not rules)}
        for after, ranges in next_states(steps - {None}).items():
            if after not in names:
                names[after] = f"{name}_{len(names)}"
                left.append(after)
            if in_json:
                letters = [letter for code, letter in ESCAPED.items() if any(a <= code <= b for a, b in ranges)]
                escapes += [f"{literal(letter)} {names[after]}" for letter in letters]
                ranges = without(ranges, UNSAFE)
            if ranges:
                options.append(f"{characters(ranges)} {names[after]}")
        if escapes:
            options.append(f"{literal(chr(92))} ({' | '.join(escapes)})")
        if None in steps:
            options.append('""')
        if not options:
            raise BadRequest("no character can match a part of it")
        if max(len(names), next_parts.cache_info().currsize) > MAX_STATES:
            raise BadRequest(f"it has more than {MAX_STATES} states: make its quantifiers smaller")
        rules[names[state]] = " | ".join(options)
    return rules


def next_states(steps: Iterable[Any]) -> dict[frozenset[Parts], Ranges]:
    """Return the states that the characters lead to, with these characters."""
    spans = [(low, high, rest) for ranges, rest in steps for low, high in without(ranges, SURROGATES)]
    edges = sorted({edge for low, high, _ in spans for edge in (low, high + 1)})
    found: dict[frozenset[Parts], Ranges] = {}
    for low, after in itertools.pairwise(edges):
        if state := frozenset(rest for first, last, rest in spans if first <= low and after - 1 <= last):
            found[state] = (*found.get(state, ()), (low, after - 1))
    return found


@functools.cache
def next_parts(parts: Parts, begins: bool = False) -> frozenset[tuple[Ranges, Parts] | None]:
    """Return the next characters, each with what is left after them; None among them: the text may end here."""
    if not parts:
        return frozenset([None])
    (operator, value), *others = parts
    rest = tuple(others)
    match operator:
        case sre.LITERAL:
            return frozenset([(((value, value),), rest)])
        case sre.NOT_LITERAL:
            return frozenset([(without(EVERY, ((value, value),)), rest)])
        case sre.ANY:
            return frozenset([(without(EVERY, LINE_ENDS), rest)])
        case sre.IN:
            return frozenset([(members(value), rest)])
        case sre.BRANCH:
            return frozenset().union(*(next_parts((*option, *rest), begins) for option in value[1]))
        case sre.SUBPATTERN if not value[1] and not value[2]:
            return next_parts((*value[3], *rest), begins)
        case sre.AT if value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return next_parts(rest, begins) if begins else frozenset()
        case sre.AT if value in (sre.AT_END, sre.AT_END_STRING):
            return next_parts(rest) & {None}
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            low, high, repeated = value
            steps = next_parts(repeated) if high else frozenset()
            more = (operator, (max(low - 1, 0), high if high is sre.MAXREPEAT else high - 1, repeated))
            again = frozenset((step[0], (*step[1], more, *rest)) for step in steps if step)
            return again | (next_parts(rest) if not low or None in steps else frozenset())
    raise BadRequest("lookarounds, backreferences, conditions, word boundaries and possessive parts are not supported")


def members(parts: Parts) -> Ranges:
    """Return the code points of a class in brackets."""
    negated = parts[0][0] is sre.NEGATE
    found: Ranges = ()
    for operator, value in parts[negated:]:
        if operator is sre.CATEGORY:
            found += CATEGORIES[value]
        else:
            found += ((value, value) if operator is sre.LITERAL else value,)
    if not negated:
        return found
    return without(ASCII if any(operator is sre.CATEGORY for operator, _ in parts) else EVERY, found)


def characters(ranges: Ranges) -> str:
    """Return EBNF for one of the characters."""
    parts = [(max(low, first), min(high, last)) for low, high in ranges for first, last in UNIFORM]
    spans = [f"\\U{first:08x}-\\U{last:08x}" for first, last in parts if first <= last]
    if not spans:
        raise BadRequest("a text has half a character (a surrogate)")
    return f"[{''.join(spans)}]"


def literal(text: str) -> str:
    """Return EBNF for exactly this text."""
    # OpenVINO GenAI prints grammars before it compiles them, with \x and hexadecimal digits for some characters, and
    # then reads letters that follow as more digits. A class in brackets ends at the bracket.
    parts = re.findall(r"([ !#-\[\]-~]+)|(.)", text, re.DOTALL)
    return " ".join(f'"{plain}"' if plain else characters(((ord(other),) * 2,)) for plain, other in parts) or '""'


def one_of(texts: Iterable[str]) -> str:
    """Return EBNF for one of the texts, as a tree in which no two options begin alike."""
    texts = sorted(set(texts))
    first, last = texts[0], texts[-1]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    start = "".join(letter for letter, _ in same)
    if first == last:
        return literal(start)
    groups = itertools.groupby((text[len(start) :] for text in texts), lambda text: text[:1])
    return f"{literal(start)} ({' | '.join(one_of(group) for _, group in groups)})"
