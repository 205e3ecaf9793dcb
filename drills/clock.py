"""A drill: the machine's clock is set back. It runs only if it is named, because it concerns every program."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from drills.clock_holder import NS, offset_ns, set_offset_ns
from drills.commands import batcher_of, check_compared, check_restored, started_comparison
from drills.drill_stack import COMMAND_S, BrokenError, DrillStack, NotRunError
from drills.harness import drill
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import ROOT

BACK_S, HELD_S, LIMIT_S = 90.0, 5.0, 30.0
# A clock that is farther off than this at the end was not restored: the process that holds it was killed.
TOLERANCE_NS = NS // 10


@contextlib.contextmanager
def clock_set_back_by(seconds: float) -> Iterator[None]:
    """Set the machine's clock back within the `with` block. It is restored also if this process is killed."""
    before = offset_ns()
    command = [sys.executable, "-m", "drills.clock_holder", str(seconds), str(LIMIT_S)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        try:
            if not holder.stdout.readline():
                raise NotRunError("only root may set the clock, and not in every container")
            yield
        finally:
            holder.stdin.close()
            holder.wait()
            if abs(offset_ns() - before) > TOLERANCE_NS:
                set_offset_ns(before)


@drill(f"the machine's clock is set back by {BACK_S:g} s for {HELD_S:g} s, while a comparison runs", named_only=True)
def clock_set_back(stack: DrillStack) -> None:
    before = batcher_of(stack)
    command = started_comparison(stack)
    try:
        with clock_set_back_by(BACK_S):
            time.sleep(HELD_S)
            stack.make("status")
        check_scraped(stack, time.time())
    except (NotRunError, BrokenError):
        command.end(signal.SIGINT, COMMAND_S)  # or it would disturb the next drill
        raise
    check_compared(command.communicate()[0], command.returncode)
    check_restored(stack, before)


def check_scraped(stack: DrillStack, since: float) -> None:
    """Raise if there is a Prometheus, and it does not store samples any longer."""
    if "prometheus" not in [info["name"] for info in stack.supervisor.rpc.getAllProcessInfo() if info["pid"]]:
        return
    prometheus = Prometheus(stack.url("PROMETHEUS_PORT"))

    def is_scraped() -> bool:
        newest = prometheus.at('timestamp(up{job="triton"} == 1)', time.time())
        return bool(newest) and newest[0].values[0] >= since

    stack.until(is_scraped, "a new sample in Prometheus", 10)
