"""Find the highest rate of requests that meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable

# The first step away from the start, and the largest: each further step is the square of the one before. A start that
# is only guessed begins with a larger one, because the tries of low rates take long.
FIRST_STEP, GUESSED_STEP, LARGEST_STEP = 1.12, 2.0, 4.0
# The rates on both sides of the result differ by at most this factor.
RESOLUTION = 1.06
# No server is tuned for fewer requests per second.
LOWEST = 0.2


def highest_rate(
    meets: Callable[[float], bool], start: float, give_up_below: float = LOWEST, step: float = FIRST_STEP
) -> float:
    """Return the highest rate that meets the target, by growing steps from the start and then by bisection.

    Below `give_up_below` the caller does not need to know how low it is: return that.
    """
    met, missed = 0.0, math.inf
    rate = max(start, LOWEST)
    while missed / met > RESOLUTION if met else missed > give_up_below:
        if meets(rate):
            met = rate
        else:
            missed = rate
        if met and missed < math.inf:
            rate = math.sqrt(met * missed)
        else:
            rate = rate * step if met else max(rate / step, give_up_below)
            step = min(step * step, LARGEST_STEP)
    return math.sqrt(met * missed) if met else give_up_below
