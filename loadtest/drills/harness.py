"""Run drills, one after the other, each from a healthy stack and under the steady load, and judge what they cost."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from gateway.edge.outages import LIMIT_S
from loadtest.drills.clients import GATEWAY, RATE, steady_load
from loadtest.drills.drill_stack import BrokenError, DrillStack, NotRunError
from triton_transformers.load import FAILED, LOST, RIGHT, WRONG, Outcome
from triton_transformers.triton import TritonError

RECOVERY_S = 10.0
# On a slow machine a recovery may take this long besides the loads of the models: the watchdog notices a crash, or
# processes end and start. Other programs may make the loads slower than the measured one.
BESIDE_LOADS_S, SLOWER = 5.0, 2.0
# How long the load runs before the fault, and after the recovery.
BEFORE_S, AFTER_S = 1.5, 2.0
# A stack that is not whole after this long does not recover by itself.
PATIENCE_S = 120.0


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
    problem: str = ""  # what a command of the drill did that it should not do, or why the load stopped
    other_cores: float | None = None  # that other programs used before the fault
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


@dataclass(frozen=True)
class Drill:
    """One fault, what it may cost, and what its commands print or Triton logs."""

    name: str
    done: str
    bound: Bound
    run: Callable[[DrillStack], None]
    says: tuple[str, ...] = ()


DRILLS: dict[str, Drill] = {}


NOTHING_FAILS = Bound()


def add(
    name: str, done: str, run: Callable[[DrillStack], None], bound: Bound = NOTHING_FAILS, says: tuple[str, ...] = ()
) -> None:
    """Add a drill. `done` is what it does to the stack."""
    DRILLS[name] = Drill(name, done, bound, run, says)


def drill(
    done: str, bound: Bound = NOTHING_FAILS, says: tuple[str, ...] = ()
) -> Callable[[Callable[[DrillStack], None]], None]:
    """Add the decorated function to the drills."""
    return lambda run: add(run.__name__.replace("_", "-"), done, run, bound, says)


def recovery_s(outcomes: Sequence[Outcome], fault_at: float, whole_at: float) -> float:
    """Return the seconds from the fault until the stack was whole and no later request failed."""
    failed = [outcome.sent_at for outcome in outcomes if outcome.kind != RIGHT]
    return max(0.0, max([whole_at, *failed]) - fault_at)


def counted(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the fields of Result that count requests."""
    kinds = [(outcome.kind, outcome.route == GATEWAY) for outcome in outcomes]
    return {
        "requests": len(outcomes),
        "failed_gateway": kinds.count((FAILED, True)),
        "failed_direct": kinds.count((FAILED, False)),
        "wrong": sum(kind == WRONG for kind, _ in kinds),
        "lost": sum(kind == LOST for kind, _ in kinds),
        "slowest_s": max((outcome.seconds for outcome in outcomes if outcome.kind == RIGHT), default=0.0),
        "errors": dict(Counter(f"{outcome.route}: {outcome.error}" for outcome in outcomes if outcome.error)),
    }


def result(chosen: Drill, stack: DrillStack) -> Result:
    """Run one drill, and return its figures."""
    figures = Result(chosen.name, chosen.done, chosen.bound)
    try:
        stack.settle()
    except BrokenError as error:
        return replace(figures, problem=f"the stack was not whole before: {error}")
    problem = not_run = ""
    with steady_load(stack.clients, stack.known) as load:
        others = stack.other_programs()
        time.sleep(BEFORE_S)
        figures = replace(figures, other_cores=others.cores())
        stack.fault_at = None
        stack.listen()
        try:
            chosen.run(stack)
        except BrokenError as error:
            problem = str(error)
        except NotRunError as error:
            not_run = str(error)
        except (psutil.Error, OSError, TritonError) as error:
            problem = f"the drill could not be done: {error}"
        fault_at = time.monotonic() if stack.fault_at is None else stack.fault_at
        whole_at = math.inf
        with contextlib.suppress(BrokenError):
            stack.until(stack.is_whole, "a whole stack", PATIENCE_S)
            whole_at = time.monotonic()
            time.sleep(AFTER_S)
        said = stack.said()
    if not_run:
        return replace(figures, not_run=not_run)
    if unsaid := [words for words in chosen.says if words not in said]:
        problem = problem or f"no command or log said '{unsaid[0]}': {said[-300:]}"
    problem = problem or "; ".join(load.problems)
    recovery = recovery_s(load.outcomes, fault_at, whole_at)
    figures = replace(figures, **counted(load.outcomes), recovery_s=recovery, problem=problem)
    if figures.held or not chosen.bound.reloads or math.isinf(whole_at):
        return figures
    # Judge by the bound for a machine as slow as this one is now.
    try:
        reload_s = stack.reload_s()
    except TritonError as error:
        return replace(figures, problem=figures.problem or f"the models could not be reloaded: {error}")
    return replace(figures, bound=figures.bound.on_machine(reload_s), reload_s=reload_s)
