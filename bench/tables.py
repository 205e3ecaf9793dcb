"""The figures that several benchmarks print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(measured: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(measured):.{digits}f} ({min(measured):.{digits}f} to {max(measured):.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(ours, theirs, strict=True)]


def total(page: str, series: str) -> float:
    """Return the sum of the series whose line on a metrics page begins with this text."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))
