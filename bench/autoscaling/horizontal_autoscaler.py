"""Decide on replicas as Kubernetes' HorizontalPodAutoscaler does (autoscaling/v2, kube-controller-manager 1.36)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SYNC_S = 15


@dataclass(frozen=True)
class Policy:
    """The most replicas to add or remove within `period_s`: a number, or percent of the replicas at its start."""

    value: int
    period_s: int
    is_percent: bool = False

    def above(self, replicas: int) -> int:
        return math.ceil(replicas * (1 + self.value / 100)) if self.is_percent else replicas + self.value

    def below(self, replicas: int) -> int:
        return int(replicas * (1 - self.value / 100)) if self.is_percent else replicas - self.value


@dataclass(frozen=True)
class Behavior:
    """The field `behavior` of an autoscaler. Its defaults are those of Kubernetes."""

    tolerance: float = 0.1
    up_window_s: int = 0
    down_window_s: int = 300
    up: tuple[Policy, ...] = (Policy(100, 15, is_percent=True), Policy(4, 15))
    down: tuple[Policy, ...] = (Policy(100, 15, is_percent=True),)


# --- the proposal of a metric -----------------------------------------------------------------------------------------


def for_average_value(total: float, target: float, tolerance: float, replicas: int) -> int:
    """Return the replicas for a target of type AverageValue: the metric is a total, and each replica gets a share."""
    return replicas if abs(1 - total / (target * replicas)) <= tolerance else math.ceil(total / target)


def for_value(value: float, target: float, tolerance: float, replicas: int, ready: int) -> int:
    """Return the replicas for a target of type Value: the metric is a level that more replicas lower."""
    return replicas if abs(1 - value / target) <= tolerance else math.ceil(value / target * ready)


def for_utilization(utilization: float, target: float, tolerance: float, replicas: int, measured: int) -> int:
    """Return the replicas for a target of type Utilization.

    `utilization` is the mean of the `measured` replicas. The others are not ready: to scale out, they count as idle.
    """
    ratio = utilization / target
    if ratio <= 1 or measured == replicas:
        return replicas if abs(1 - ratio) <= tolerance else math.ceil(ratio * measured)
    with_idle = ratio * measured / replicas
    if with_idle <= 1 + tolerance:
        return replicas
    return max(replicas, math.ceil(with_idle * replicas))


# --- the decision -----------------------------------------------------------------------------------------------------


class HorizontalAutoscaler:
    """One autoscaler: it stabilises what its metric proposes, and limits how fast the replicas change."""

    def __init__(self, behavior: Behavior, minimum: int, maximum: int, replicas: int) -> None:
        self.behavior = behavior
        self.minimum = minimum
        self.maximum = maximum
        self.proposals: list[tuple[float, int]] = [(0.0, replicas)]
        self.changes: list[tuple[float, int]] = []  # when, and how many replicas were added
        self.longest_s = max(policy.period_s for policy in behavior.up + behavior.down)

    def decide(self, now: float, replicas: int, proposed: int) -> int:
        """Return the number of replicas from now on."""
        decided = self.limit(now, replicas, self.stabilize(now, replicas, proposed))
        if decided != replicas:
            self.changes.append((now, decided - replicas))
        return decided

    def stabilize(self, now: float, replicas: int, proposed: int) -> int:
        """Return the proposal of its window that changes the least, in each direction."""
        up, down = self.behavior.up_window_s, self.behavior.down_window_s
        self.proposals = [(at, value) for at, value in self.proposals if now - at < max(up, down)]
        low = min([proposed, *(value for at, value in self.proposals if now - at < up)])
        high = max([proposed, *(value for at, value in self.proposals if now - at < down)])
        self.proposals.append((now, proposed))
        return min(max(replicas, low), high)

    def limit(self, now: float, replicas: int, required: int) -> int:
        self.changes = [(at, change) for at, change in self.changes if now - at < self.longest_s]

        def allowed(policies: Sequence[Policy], choose: Callable[[list[int]], int], name: str) -> int:
            limits = []
            for policy in policies:
                before = replicas - sum(change for at, change in self.changes if now - at < policy.period_s)
                limits.append(getattr(policy, name)(before))
            return choose(limits)

        if required > replicas:
            required = min(required, max(replicas, allowed(self.behavior.up, max, "above")))
        elif required < replicas:
            required = max(required, min(replicas, allowed(self.behavior.down, min, "below")))
        return min(max(required, self.minimum), self.maximum)
