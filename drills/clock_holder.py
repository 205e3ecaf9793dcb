"""Set the machine's clock back for a while: python -m drills.clock_holder SECONDS LIMIT_S.

It prints a line once the clock is back. It restores the clock after LIMIT_S, and sooner if its input ends, which also
happens if the process that started it is killed. No signal of a terminal ends it before.
"""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import time
from collections.abc import Iterator

NS = 1_000_000_000


def offset_ns() -> int:
    """Return how far the clock is ahead of the time since boot, which nobody can set."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def set_offset_ns(offset: int) -> None:
    time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_BOOTTIME) + offset)


@contextlib.contextmanager
def set_back(seconds: float) -> Iterator[None]:
    """Set the clock back; restore it at the end of the `with` block, with the time that has passed since."""
    before = offset_ns()
    set_offset_ns(before - int(seconds * NS))
    try:
        yield
    finally:
        set_offset_ns(before)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with set_back(float(sys.argv[1])), contextlib.suppress(OSError):  # a closed pipe: nobody waits for the line
        print("set back", flush=True)
        select.select([sys.stdin], [], [], float(sys.argv[2]))


if __name__ == "__main__":
    main()
