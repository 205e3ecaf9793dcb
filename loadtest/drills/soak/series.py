"""The series of a soak: what was sampled over time, and the verdict on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

SAMPLE_S = 5.0
# The first part of a soak is not judged: pools fill, engines and allocators grow to the size that the load needs.
WARM_UP_SHARE = 1 / 3
# A shorter part proves nothing: allocators take memory in large pieces, minutes apart.
JUDGED_S = 400.0
# The share of soaks in which chance alone may fail one of the series. Each gets its part of it (Bonferroni).
ERROR_RATE = 0.05

FLAT, RISES, FALLS, ENDED = "flat", "RISES", "FALLS", "ENDED"
SHORT, BY_DESIGN = "too short to judge", "by design"
FAILURES = (RISES, FALLS, ENDED)
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A quantity, its unit, and the growth from which a series counts as rising: absolute, or a share of the mean."""

    name: str
    unit: str
    size: float = 1.0  # of the unit
    minimum_growth: float = 0.0
    minimum_share: float = 0.0


# Python takes memory from the system in arenas of 1 MiB, so less than one is no growth.
MEMORY = Kind("memory", "MiB", MIB, minimum_growth=1.0)
DESCRIPTORS = Kind("descriptors", "", minimum_growth=1.0)
THREADS = Kind("threads", "", minimum_growth=1.0)
SHARED = Kind("/dev/shm", "MiB", MIB, minimum_growth=1.0)
PROCESSES = Kind("processes", "", minimum_growth=1.0)
METRICS = Kind("series in Prometheus", "", minimum_growth=1.0)
# Other programs on shared cores move the latency as much.
LATENCY = Kind("p95", "ms", minimum_share=0.1)
BY_PROCESS = (MEMORY, DESCRIPTORS, THREADS)
OF_THE_STACK = (SHARED, PROCESSES, METRICS, LATENCY)
# Prometheus keeps the samples of the last two to three hours in memory, so that its memory grows for so long. Samples
# come at a fixed rate; a label with ever new values would make more of them, which METRICS shows.
GROWS_BY_DESIGN = {(MEMORY.name, "prometheus")}


@dataclass
class Series:
    """The samples of one quantity, in its unit, of one process or of the whole stack."""

    kind: Kind
    process: str = ""
    values: list[float] = field(default_factory=list)  # NaN: not known at that time

    @property
    def name(self) -> str:
        return f"{self.kind.name} of {self.process}" if self.process else self.kind.name

    def add(self, value: float) -> None:
        self.values.append(value / self.kind.size)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one series, its level at the start and the end of the judged part, and its slope per hour."""

    series: Series
    start: float | None
    end: float | None
    slope: Trend | None
    outcome: str

    @property
    def fails(self) -> bool:
        return self.outcome in FAILURES

    def as_json(self) -> dict[str, Any]:
        slope = self.slope
        return {
            "name": self.series.name,
            "kind": self.series.kind.name,
            "process": self.series.process,
            "unit": self.series.kind.unit,
            "start": self.start,
            "end": self.end,
            "slope_per_hour": slope and slope.slope,
            "interval_per_hour": slope and [slope.low, slope.high],
            "outcome": self.outcome,
            "fails": self.fails,
            "values": [value if math.isfinite(value) else None for value in self.series.values],
        }


def first_judged(count: int) -> int:
    """Return the index of the first sample after the warm-up."""
    return math.ceil(count * WARM_UP_SHARE)


def verdicts(all_series: Sequence[Series], sample_s: float = SAMPLE_S) -> list[Verdict]:
    """Judge each series. Together, chance fails one of them in ERROR_RATE of all soaks."""
    return [verdict(series, ERROR_RATE / len(all_series), sample_s) for series in all_series]


def verdict(series: Series, error_rate: float, sample_s: float = SAMPLE_S) -> Verdict:
    """Judge a series: it fails if its slope is not zero within its error, and its growth is not too small to count."""
    values = np.array(series.values[first_judged(len(series.values)) :])
    ended = bool(series.process) and bool(len(values)) and math.isnan(values[-1])
    known = values[np.isfinite(values)]
    if ended or len(known) < max(2 * BLOCKS, JUDGED_S / sample_s):
        start, end = (float(known[0]), float(known[-1])) if len(known) else (None, None)
        return Verdict(series, start, end, None, ENDED if ended else SHORT)
    blocks = np.array_split(known, BLOCKS)
    per_sample = trend(known, error_rate)
    growth = abs(per_sample.slope) * len(known)
    counts = growth >= max(series.kind.minimum_growth, series.kind.minimum_share * float(known.mean()))
    if (series.kind.name, series.process) in GROWS_BY_DESIGN:
        outcome = BY_DESIGN
    elif not counts or per_sample.low <= 0 <= per_sample.high:
        outcome = FLAT
    else:
        outcome = RISES if per_sample.slope > 0 else FALLS
    start, end = float(blocks[0].mean()), float(blocks[-1].mean())
    return Verdict(series, start, end, per_sample.times(3600 / sample_s), outcome)


# --- the slope, and whether it is zero within its error --------------------------------------------------------------

# Samples that follow one another are alike, so that the usual error of a regression would be many times too small.

# The number of blocks whose means are judged. Noise that is short beside a block averages out.
BLOCKS = 24
# The errors of blocks that follow one another are independent if they correlate less than this. The correlation of 24
# independent errors scatters by 0.2.
INDEPENDENT = 0.2


@dataclass(frozen=True)
class Trend:
    """A slope, per sample or per hour, and its interval."""

    slope: float
    low: float
    high: float

    def times(self, factor: float) -> Trend:
        return Trend(self.slope * factor, self.low * factor, self.high * factor)


def trend(values: Sequence[float], error_rate: float) -> Trend:
    """Return the slope, and the interval that misses it in at most about `error_rate` of all cases.

    If the errors around the line are independent from block to block, ordinary least squares give both. If they are
    not, the series may wander, as the memory of an allocator does. The slope is then the mean step from block to block,
    and its error is that of a random walk: a few large steps are no trend, many equal ones are.
    """
    blocks = np.array([block.mean() for block in np.array_split(np.asarray(values, float), BLOCKS)])
    slope, error = _regression(blocks) if _correlation(blocks) < INDEPENDENT else _random_walk(blocks)
    half = student_t(1 - error_rate / 2, BLOCKS - 3) * error
    return Trend(slope, slope - half, slope + half).times(BLOCKS / len(values))


def _residuals(blocks: Values) -> Values:
    places = np.arange(len(blocks), dtype=float)
    return blocks - np.polyval(np.polyfit(places, blocks, 1), places)


def _correlation(blocks: Values) -> float:
    """Return how much the error of a block resembles that of the block before: 0 to 1."""
    errors = _residuals(blocks)
    if not (power := float(errors[:-1] @ errors[:-1])):
        return 0.0
    # Beside a fitted line, the estimate a is too small by (2 + 4 a) / count (Marriott and Pope, 1954).
    return (float(errors[:-1] @ errors[1:]) / power + 2 / BLOCKS) / (1 - 4 / BLOCKS)


def _regression(blocks: Values) -> tuple[float, float]:
    """Return the slope of ordinary least squares, and its standard error."""
    places = np.arange(BLOCKS) - (BLOCKS - 1) / 2
    errors = _residuals(blocks)
    return float(places @ blocks / (places @ places)), math.sqrt(errors @ errors / (BLOCKS - 2) / (places @ places))


def _random_walk(blocks: Values) -> tuple[float, float]:
    """Return the mean step, and its standard error.

    Steps between means over time correlate with the step before, by 0.25 for a random walk.
    """
    steps = np.diff(blocks)
    errors = steps - steps.mean()
    variance, covariance = errors @ errors, errors[:-1] @ errors[1:]
    return float(steps.mean()), math.sqrt(max(variance, variance + 2 * covariance) / (len(steps) - 2) / len(steps))


def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's distribution for 20 degrees or more: Cornish and Fisher's expansion."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
