"""Count what became of the requests of a drill, and judge it by the drill's bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.outages import LIMIT_S

RIGHT, FAILED, WRONG, LOST = "right", "failed", "wrong", "lost"
GATEWAY = "gateway"
RATE = 8  # requests per second on each route
RECOVERY_S = 10.0
# On a slow machine a recovery may take this long besides the loads of the models: the watchdog notices a crash, or
# processes end and start. Other programs may make the loads slower than the measured one.
BESIDE_LOADS_S, SLOWER = 5.0, 2.0


@dataclass(frozen=True)
class Outcome:
    """The end of one request."""

    route: str  # GATEWAY, or one of Triton's own
    sent_at: float
    seconds: float
    kind: str  # RIGHT; FAILED: an error; WRONG: another text's answer; LOST: neither answer nor error
    error: str = ""


@dataclass(frozen=True)
class Bound:
    """How many requests a drill may cost, and how long. Lost requests and wrong answers are never allowed."""

    gateway: int = 0  # failed requests through the gateway
    direct: int = 0  # failed requests to Triton itself
    recovery_s: float = RECOVERY_S
    reloads: bool = False  # models are loaded before the stack is whole

    def on_machine(self, reload_s: float) -> Bound:
        """Return the bound on a machine that takes this long to reload the models, if that is longer than this one."""
        recovery = max(self.recovery_s, BESIDE_LOADS_S + SLOWER * reload_s)
        return replace(
            self,
            # The gateway holds requests for LIMIT_S.
            gateway=self.gateway + int(RATE * max(0.0, recovery - LIMIT_S)),
            direct=self.direct + int(2 * RATE * (recovery - self.recovery_s)),
            recovery_s=recovery,
        )

    def __str__(self) -> str:
        return f"{self.gateway} / {self.direct}, {self.recovery_s:.3g} s"


@dataclass(frozen=True)
class Result:
    """The figures of one drill."""

    name: str
    done: str
    bound: Bound
    requests: int = 0
    failed_gateway: int = 0
    failed_direct: int = 0
    wrong: int = 0
    lost: int = 0
    recovery_s: float = 0.0  # infinite: the stack did not recover by itself
    slowest_s: float = 0.0  # the longest wait for a right answer
    reload_s: float | None = None  # how long a reload of the models took, if it was measured for the bound
    problem: str = ""  # what a command of the drill did that it should not do
    not_run: str = ""  # the reason why the drill cannot run here
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Return whether the drill ran and stayed within its bound."""
        return not (
            self.not_run
            or self.problem
            or not self.requests
            or self.wrong
            or self.lost
            or self.failed_gateway > self.bound.gateway
            or self.failed_direct > self.bound.direct
            or self.recovery_s > self.bound.recovery_s
        )

    @property
    def broken(self) -> bool:
        return not (self.held or self.not_run)

    def as_json(self) -> dict[str, Any]:
        recovery = self.recovery_s if math.isfinite(self.recovery_s) else None
        return {**vars(self), "bound": vars(self.bound), "recovery_s": recovery, "held": self.held}


def recovery_s(outcomes: Sequence[Outcome], fault_at: float, whole_at: float) -> float:
    """Return the seconds from the fault until the stack was whole and no later request failed."""
    failed = [outcome.sent_at for outcome in outcomes if outcome.kind != RIGHT]
    return max(0.0, max([whole_at, *failed]) - fault_at)


def counted(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the fields of Result that count requests."""
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            text = f"{outcome.route}: {outcome.error}"
            errors[text] = errors.get(text, 0) + 1
    kinds = [(outcome.kind, outcome.route == GATEWAY) for outcome in outcomes]
    return {
        "requests": len(outcomes),
        "failed_gateway": kinds.count((FAILED, True)),
        "failed_direct": kinds.count((FAILED, False)),
        "wrong": sum(kind == WRONG for kind, _ in kinds),
        "lost": sum(kind == LOST for kind, _ in kinds),
        "slowest_s": max((outcome.seconds for outcome in outcomes if outcome.kind == RIGHT), default=0.0),
        "errors": errors,
    }
