"""Regular expressions as EBNF for xgrammar, in which every engine's release of it agrees.

xgrammar's own conversion lets a pattern write quotes and line ends into a JSON string, and ignores lookaheads. Its
release 0.1.31, which is in OpenVINO GenAI 2026.4, also accepts other texts if two options begin with the same
characters. So these rules are those of a deterministic automaton: each character leads to one rule.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from shared.types import BadRequest

# Ranges of code points, first and last. UTF-8 has no surrogates.
Ranges = list[tuple[int, int]]
EVERY: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
# Ranges whose UTF-8 differs in its last bytes only: xgrammar 0.1.31 (in OpenVINO GenAI 2026.4) gets others wrong.
UNIFORM: Ranges = [
    *((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFF), (0x1000, 0xCFFF), (0xD000, 0xD7FF), (0xE000, 0xFFFF)),
    *((0x10000, 0x3FFFF), (0x40000, 0xFFFFF), (0x100000, 0x10FFFF)),
]
ASCII: Ranges = [(0, 0x7F)]
# The code points that JSON writes as a backslash and a letter.
ESCAPED = dict(zip(map(ord, '"\\\b\f\n\r\t'), '"\\bfnrt', strict=True))
MAX_STATES = 3000
LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
# Python's digits and letters are Unicode's, and ECMA's are ASCII's: only what both mean is generated.
CATEGORIES: dict[Any, Ranges] = {
    sre.CATEGORY_DIGIT: [(48, 57)],
    sre.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    sre.CATEGORY_SPACE: [(9, 13), (32, 32)],
}
NEGATED = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}
UNSUPPORTED = {
    sre.ASSERT: "a lookaround",
    sre.ASSERT_NOT: "a lookaround",
    sre.GROUPREF: "a backreference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.AT: "an anchor inside the pattern",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
}


class Automaton:
    """The states of a pattern, from 0, with the steps to others: by characters, or by none."""

    def __init__(self, pattern: str) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.jumps: list[list[int]] = []
        self.end = self.sequence(without_anchors(list(parse(pattern))), self.state())

    def state(self) -> int:
        if len(self.steps) >= MAX_STATES:
            raise BadRequest(f"it has more than {MAX_STATES} states: make its quantifiers smaller")
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def sequence(self, items: Any, start: int) -> int:
        """Add a part of the pattern that begins in a state. Return the state in which it ends."""
        for operator, value in items:
            start = self.item(operator, value, start)
        return start

    def item(self, operator: Any, value: Any, start: int) -> int:
        match operator:
            case sre.LITERAL:
                return self.character([(value, value)], start)
            case sre.NOT_LITERAL:
                return self.character(without(EVERY, [(value, value)]), start)
            case sre.ANY:
                return self.character(without(EVERY, LINE_ENDS), start)
            case sre.IN:
                return self.character(members(value), start)
            case sre.BRANCH:
                ends = [self.sequence(branch, self.jump(start)) for branch in value[1]]
                return self.joined(ends)
            case sre.SUBPATTERN if not value[1] and not value[2]:
                return self.sequence(value[3], start)
            case sre.MAX_REPEAT | sre.MIN_REPEAT:
                low, high, repeated = value
                return self.repeat(low, high, repeated, start)
        raise BadRequest(f"{UNSUPPORTED.get(operator, 'a part of it')} is not supported")

    def repeat(self, low: int, high: Any, repeated: Any, start: int) -> int:
        for _ in range(low):
            start = self.sequence(repeated, start)
        if high is sre.MAXREPEAT:
            start = self.jump(start)
            self.jumps[self.sequence(repeated, self.jump(start))].append(start)
            return self.jump(start)
        ends = [start]
        for _ in range(high - low):
            ends.append(self.sequence(repeated, self.jump(ends[-1])))
        return self.joined(ends)

    def character(self, ranges: Ranges, start: int) -> int:
        end = self.state()
        self.steps[start].append((without(ranges, [(0xD800, 0xDFFF)]), end))
        return end

    def jump(self, start: int) -> int:
        end = self.state()
        self.jumps[start].append(end)
        return end

    def joined(self, ends: list[int]) -> int:
        end = self.state()
        for own in ends:
            self.jumps[own].append(end)
        return end

    def closure(self, states: set[int]) -> frozenset[int]:
        """Return the states, and those that jumps lead to."""
        found, left = set(states), list(states)
        while left:
            new = set(self.jumps[left.pop()]) - found
            found |= new
            left += new
        return frozenset(found)

    def next_states(self, states: frozenset[int]) -> dict[frozenset[int], Ranges]:
        """Return the sets of states that the characters lead to, with these characters."""
        steps = [(low, high, end) for state in states for ranges, end in self.steps[state] for low, high in ranges]
        edges = sorted({edge for low, high, _ in steps for edge in (low, high + 1)})
        found: dict[frozenset[int], Ranges] = {}
        for low, after in itertools.pairwise(edges):
            if ends := {end for first, last, end in steps if first <= low and after - 1 <= last}:
                found.setdefault(self.closure(ends), []).append((low, after - 1))
        return found

    def rules(self, name: str, in_json: bool) -> dict[str, str]:
        """Return EBNF's rules, of which the first is the whole pattern; `in_json`: inside the quotes of a string."""
        names = {self.closure({0}): f"{name}_0"}
        rules: dict[str, str] = {}
        left = list(names)
        while left:
            states = left.pop(0)
            options, escapes = [], []
            for after, ranges in self.next_states(states).items():
                if after not in names:
                    names[after] = f"{name}_{len(names)}"
                    left.append(after)
                if in_json:
                    letters = [letter for code, letter in ESCAPED.items() if any(a <= code <= b for a, b in ranges)]
                    escapes += [f"{literal(letter)} {names[after]}" for letter in letters]
                    ranges = without(ranges, [(0, 31), (34, 34), (92, 92)])
                options += [f"{characters(ranges)} {names[after]}"] * bool(ranges)
            options += [f"{literal(chr(92))} ({' | '.join(escapes)})"] * bool(escapes)
            options += ['""'] * (self.end in states)
            if not options:
                raise BadRequest("no character can match a part of it")
            if len(names) > MAX_STATES:
                raise BadRequest(f"it has more than {MAX_STATES} states: make its quantifiers smaller")
            rules[names[states]] = " | ".join(options)
        return rules


def regex(pattern: str, name: str, in_json: bool = False) -> dict[str, str]:
    """Return EBNF's rules for the texts that match the whole pattern, of which the first is the whole.

    A pattern without anchors is treated as if it had them.
    """
    try:
        return Automaton(pattern).rules(name, in_json)
    except BadRequest as error:
        raise BadRequest(f"pattern '{pattern}': {error}") from None


def parse(pattern: str) -> Any:
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise BadRequest(str(error)) from None
    if parsed.state.flags & ~re.UNICODE:
        raise BadRequest("flags inside a pattern are not supported")
    return parsed


def without_anchors(items: list[Any]) -> list[Any]:
    if items[:1] in ([(sre.AT, sre.AT_BEGINNING)], [(sre.AT, sre.AT_BEGINNING_STRING)]):
        items = items[1:]
    if items[-1:] in ([(sre.AT, sre.AT_END)], [(sre.AT, sre.AT_END_STRING)]):
        items = items[:-1]
    if len(items) == 1 and items[0][0] is sre.BRANCH:
        return [(sre.BRANCH, (None, [without_anchors(list(branch)) for branch in items[0][1][1]]))]
    return items


def times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def members(parts: list[Any]) -> Ranges:
    """Return the code points of a class in brackets."""
    negated = parts[0][0] is sre.NEGATE
    found: Ranges = []
    ascii_only = False
    for operator, value in parts[negated:]:
        if operator is sre.CATEGORY:
            ascii_only = ascii_only or negated or value in NEGATED
            found += without(ASCII, CATEGORIES[NEGATED[value]]) if value in NEGATED else CATEGORIES[value]
        else:
            found.append((value, value) if operator is sre.LITERAL else value)
    return without(ASCII if ascii_only else EVERY, found) if negated else found


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    for first, last in removed:
        kept = [(low, min(high, first - 1)) for low, high in ranges] + [
            (max(low, last + 1), high) for low, high in ranges
        ]
        ranges = sorted({(low, high) for low, high in kept if low <= high})
    return ranges


def characters(ranges: Ranges) -> str:
    """Return EBNF for one of the characters."""
    parts = [(max(low, first), min(high, last)) for low, high in ranges for first, last in UNIFORM]
    return f"[{''.join(span(part) for part in parts if part[0] <= part[1])}]"


def span(codes: tuple[int, int]) -> str:
    first, last = (f"\\U{code:08x}" for code in codes)
    return first if first == last else f"{first}-{last}"


def literal(text: str) -> str:
    """Return EBNF for exactly this text."""
    if re.search("[\ud800-\udfff]", text):
        raise BadRequest("a text has half a character (a surrogate)")
    # OpenVINO GenAI prints grammars before it compiles them, with \x and hexadecimal digits for these, and then reads
    # letters that follow as more digits. A class in brackets ends at the bracket.
    parts = re.split(r"([\x00-\x1f\x7f-\xff])", text)
    written = [
        characters([(ord(part), ord(part))]) if number % 2 else quoted(part) for number, part in enumerate(parts)
    ]
    return " ".join(part for part in written if part != '""') or '""'


def quoted(text: str) -> str:
    return '"' + re.sub(r'["\\]', lambda found: f"\\u{ord(found[0]):04x}", text) + '"'


def one_of(texts: Iterable[str]) -> str:
    """Return EBNF for one of the texts, as a tree in which no two options begin alike."""
    texts = set(texts)
    first, last = min(texts), max(texts)
    start = first[
        : next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    ]
    if first == last:
        return literal(start)
    heads: dict[str, list[str]] = {}
    for text in sorted(text[len(start) :] for text in texts):
        heads.setdefault(text[:1], []).append(text)
    options = " | ".join(map(one_of, heads.values()))
    return f"{literal(start)} ({options})" if start else f"({options})"
