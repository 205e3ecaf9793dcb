"""Ctrl-C during a comparison: stop at the next wait, but never while the server's configuration is restored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import gevent
import greenlet

from triton_transformers.cli import err

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Raises KeyboardInterrupt in the greenlet that created it, at its next wait, until ignore() is called."""

    def __init__(self) -> None:
        self.greenlet = greenlet.getcurrent()
        self.ignored = False
        self.received = False

    def ignore(self) -> None:
        self.ignored = True

    def __call__(self) -> None:
        self.received = True
        err.print("stopping: restoring the server's configuration")
        if not self.ignored:
            self.ignored = True
            gevent.kill(self.greenlet, KeyboardInterrupt)


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    handlers = [gevent.signal_handler(number, interrupt) for number in SIGNALS]
    try:
        yield interrupt
    finally:
        for handler in handlers:
            handler.cancel()
        # gevent restores SIG_DFL, which would kill the process while it writes the report. After a first signal the
        # user only waits for that report, so later signals are ignored.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if interrupt.received else signal.default_int_handler)
