"""Judge whether a series that was sampled at equal intervals has a slope that is not zero within its error.

Samples that follow one another are alike, so that the usual error of a regression would be many times too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

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
