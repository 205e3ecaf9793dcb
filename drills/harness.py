"""Run drills, one after the other, each from a healthy stack and under the steady load."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil

from drills.drill_stack import BrokenError, DrillStack, NotRunError
from drills.outcomes import Bound, Result, counted, recovery_s
from drills.steady_load import SteadyLoad
from triton_transformers.triton import TritonError

# How long the load runs before the fault, and after the recovery.
BEFORE_S, AFTER_S = 1.5, 2.0
# A stack that is not whole after this long does not recover by itself.
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Drill:
    """One fault, and what it may cost."""

    name: str
    done: str
    bound: Bound
    run: Callable[[DrillStack], None]
    named_only: bool = False  # it concerns more than the drills' own stack


DRILLS: dict[str, Drill] = {}


NOTHING_FAILS = Bound()


def add(
    name: str,
    done: str,
    run: Callable[[DrillStack], None],
    bound: Bound = NOTHING_FAILS,
    named_only: bool = False,
) -> None:
    """Add a drill. `done` is what it does to the stack."""
    DRILLS[name] = Drill(name, done, bound, run, named_only)


def drill(
    done: str, bound: Bound = NOTHING_FAILS, named_only: bool = False
) -> Callable[[Callable[[DrillStack], None]], None]:
    """Add the decorated function to the drills."""
    return lambda run: add(run.__name__.replace("_", "-"), done, run, bound, named_only)


def result(chosen: Drill, stack: DrillStack) -> Result:
    """Run one drill, and return its figures."""
    try:
        stack.settle()
    except BrokenError as error:
        return Result(chosen.name, chosen.done, chosen.bound, problem=f"the stack was not whole before: {error}")
    problem = not_run = ""
    with SteadyLoad(stack.clients, stack.answers) as load:
        time.sleep(BEFORE_S)
        stack.fault_at = None
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
    if not_run:
        return Result(chosen.name, chosen.done, chosen.bound, not_run=not_run)
    figures = Result(
        chosen.name,
        chosen.done,
        chosen.bound,
        **counted(load.outcomes),
        recovery_s=recovery_s(load.outcomes, fault_at, whole_at),
        problem=problem,
    )
    if figures.held or not chosen.bound.reloads or math.isinf(whole_at):
        return figures
    return on_this_machine(figures, stack)


def on_this_machine(result: Result, stack: DrillStack) -> Result:
    """Return the result by the bound for a machine as slow as this one is now."""
    try:
        reload_s = stack.reload_s()
    except TritonError as error:
        return replace(result, problem=result.problem or f"the models could not be reloaded: {error}")
    return replace(result, bound=result.bound.on_machine(reload_s), reload_s=reload_s)
