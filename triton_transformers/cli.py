"""Terminal output, and the end of every command: an error that the user can correct is a sentence, not a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from triton_transformers.prometheus import PrometheusError
from triton_transformers.settings import UserError
from triton_transformers.triton import TritonError

LINE_S = 10.0  # between two lines of a log about the same work
STDERR = 2
Shown = str | Callable[[], str]  # a text, or a function that returns it whenever it is shown


class Work:
    """A text about long work, and the seconds since its beginning."""

    def __init__(self, text: Shown) -> None:
        self.text, self.began = text, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self}, {time.monotonic() - self.began:.0f} s", no_wrap=True, overflow="ellipsis")

    def __str__(self) -> str:
        return str(Text.from_markup(self.text if isinstance(self.text, str) else self.text()))


class Terminal(Console):
    """A console that shows long work and its seconds: as a line that moves, or in a log by a line every ten seconds."""

    _work: Work | None = None

    @contextlib.contextmanager
    def status(self, text: Shown) -> Iterator[None]:  # type: ignore[override]
        """Show the text until the block ends. Within the block of another text, show it instead of that one."""
        if work := self._work:
            before, work.text = work.text, text
            try:
                yield
            finally:
                work.text = before
            return
        self._work = Work(text)
        try:
            with shown(self._work):
                yield
        finally:
            self._work = None

    def step(self, step: Shown) -> None:
        """Show another step of the work of the block, such as "chat: exporting" after "chat: reading"."""
        if work := self._work:
            subject = str(work).partition(": ")[0]
            work.text = lambda: escape(f"{subject}: {step if isinstance(step, str) else step()}")


@contextlib.contextmanager
def shown(work: Work) -> Iterator[None]:
    """Show the work until the block ends, on a copy of stderr: exporters hide both streams meanwhile."""
    with open(os.dup(STDERR), "w") as stream:
        console = Console(file=stream, highlight=False, emoji=False)
        if console.is_terminal and not console.is_dumb_terminal:
            # Rich moves other output above the line. A file must get that output unchanged.
            out_moves, err_moves = sys.stdout.isatty(), sys.stderr.isatty()
            with Live(
                Spinner("dots", work),
                console=console,
                transient=True,
                redirect_stdout=out_moves,
                redirect_stderr=err_moves,
            ):
                yield
            return
        ended = threading.Event()

        def write() -> None:
            while not ended.wait(LINE_S):
                with contextlib.suppress(OSError):  # nobody reads the log any more
                    print(work.__rich__(), file=stream, flush=True)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        try:
            yield
        finally:
            ended.set()
            writer.join()


# No emoji: a text between colons must stay as the user wrote it.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Terminal(stderr=True, highlight=False, soft_wrap=True, emoji=False)
OUT_OF_MEMORY = "Memory may have run out"
# Escape sequences of terminals: ECMA-48's control sequences (cursor, colours, erasing) and control strings (window
# titles), and the others of ECMA-35 (character sets).
TERMINAL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])|\r(?=\n)")
# A command passes these signals on to a command that it waits for.
PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def without_codes(text: str) -> str:
    """Return a text without what only a terminal understands."""
    return TERMINAL_CODES.sub("", text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[str] = ()) -> None:
    """Print a table. Align the columns that `text_columns` names at the left, the others, of numbers, at the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in text_columns else "right")
    for row in rows:
        table.add_row(*row)
    # rich would cut cells until the table fits the terminal, which has 80 columns where the output is none.
    table.width = Measurement.get(out, out.options.update(width=10_000), table).maximum
    out.print(table)


def call(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit code. Ctrl-C reaches the command too: still wait until it has ended.

    Other signals reach this process alone, so pass them on.
    """
    interrupted = False
    with subprocess.Popen(command, env=environment) as process, forwarded(process):
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                interrupted = True
            else:
                break
    if interrupted:
        return 130
    if code >= 0:
        return code
    if -code not in PASSED_ON:
        program = escape(" ".join(command[1:]).removeprefix("-m "))
        hint = f". {OUT_OF_MEMORY}: end other programs, or use a smaller model" if -code == signal.SIGKILL else ""
        err.print(f"[red]error:[/] {program} was ended by signal {-code} ({signal.strsignal(-code)}){hint}")
    return 128 - code


@contextlib.contextmanager
def forwarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass PASSED_ON on to the process, which then ends in its own way."""
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal, and ignore later ones, which would interrupt the cleanup."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: object) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sentence(error: Exception) -> str:
    """Return the error's message; for a file that cannot be written or read, with the remedy."""
    if not isinstance(error, OSError) or not error.filename:
        return str(error)
    remedy = ""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = ". Change that, or set LOCAL_STATE, MODEL_REPOSITORY and REPORTS to folders that you may write"
    return f"{error.filename}: {error.strerror}{remedy}"


def run(main: Callable[[], int | None]) -> None:
    """Run a command and exit with its code: 1 after an error, 130 after Ctrl-C."""
    # A core dump of this process, or of a program that it starts, would contain keys and requests.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        sys.exit(main() or 0)
    except (UserError, TritonError, PrometheusError, OSError) as error:
        err.print(f"[red]error:[/] {escape(sentence(error))}")
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
