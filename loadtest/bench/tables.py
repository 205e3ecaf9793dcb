"""The figures that several benchmarks measure in turns and print."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from triton_transformers.cli import err, print_table


def in_turns(ways: Iterable[str], rounds: int, load: str) -> Iterator[str]:
    """Yield each of the ways in each round, in the reverse order in every second one, and show the progress."""
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            with err.status(f"round {number + 1} of {rounds}: {load}, {way}"):
                yield way


def compare(
    ways: Mapping[str, Callable[[], dict[str, float]]], rounds: int, load: str, digits: dict[str, int], ratio: str
) -> None:
    """Measure two ways in turns, and print each figure with its digits, and the ratio of the second to the first."""
    figures: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in digits}
    for way in in_turns(ways, rounds, load):
        for name, value in ways[way]().items():
            figures[name][way].append(value)
    rows = []
    for name, by_way in figures.items():
        theirs, ours = by_way.values()
        rows.append([name, *(spread(own, digits[name]) for own in (theirs, ours)), spread(ratios(ours, theirs), 2)])
    print_table(("", *ways, ratio), rows, text_columns=("",))


def spread(measured: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(measured):.{digits}f} ({min(measured):.{digits}f} to {max(measured):.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(ours, theirs, strict=True)]


def total(page: str, series: str) -> float:
    """Return the sum of the series whose line on a metrics page begins with this text."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))
