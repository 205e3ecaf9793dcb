"""What every command prints, and commands that wait for another one."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from export.checkpoint.silence import silent
from triton_transformers import cli
from triton_transformers.cli import call, err, print_table, run, without_codes
from triton_transformers.settings import ROOT

# Ends with the number of the signal that it receives.
CHILD = """
import os, signal, sys, time
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda n, _: sys.exit(n))
status, passed_on = Path(f"/proc/{os.getppid()}/status"), (signal.SIGTERM, signal.SIGHUP)
while not all(int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> number - 1 & 1 for number in passed_on):
    time.sleep(0.01)  # until the parent passes them on
print("ready", flush=True)
signal.pause()
"""
PARENT = f"""
import os, sys
from triton_transformers.cli import call
sys.exit(call([sys.executable, "-c", {CHILD!r}], dict(os.environ)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_command_that_is_waited_for(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(number)
        assert parent.wait(60) == number


def test_command_that_a_signal_killed_is_named(capsys):
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert call([sys.executable, "-c", script], dict(os.environ)) == 137
    assert capsys.readouterr().err == (
        f"error: -c {script} was ended by signal 9 (Killed). "
        "Memory may have run out: end other programs, or use a smaller model\n"
    )


def test_table_aligns_its_columns_and_is_never_cut(capsys):
    """The output of a test is no terminal, so rich takes it for one of 80 columns."""
    name = "a name of more than 80 characters, " * 3
    print_table(("system", "requests/s"), [("embedding", "99.4"), (name, "[red]100.0[/]")], text_columns=("system",))
    assert capsys.readouterr().out.splitlines() == [
        f"{'system':<{len(name)}}  requests/s",
        f"{'embedding':<{len(name)}}        99.4",
        f"{name}       100.0",
    ]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EROFS, "/srv/.env: Read-only file system. Change that, or set LOCAL_STATE, MODEL_REPOSITORY and REP"),
        (errno.ENOTDIR, "/srv/.env: Not a directory\n"),
    ],
)
def test_error_of_a_file_is_a_sentence(capsys, monkeypatch, number, message):
    def fail() -> None:
        raise OSError(number, os.strerror(number), "/srv/.env")

    with pytest.raises(SystemExit):
        run(fail)
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert "Errno" not in printed


@pytest.mark.parametrize(
    "code",
    [
        *("\x1b[2K", "\x1b[38;5;9m", "\x1b[?25l", "\x1b(B", "\x1b7", "\x1b=", "\x1bM"),
        *("\x1b]0;a title\x07", "\x1b]8;;http://a\x1b\\", "\x1bP1$r0m\x1b\\"),
    ],
)
def test_text_without_codes_is_what_a_terminal_shows(code):
    assert without_codes(f"a {code}[b]{code} c\r\n") == "a [b] c\n"


# --- long work --------------------------------------------------------------------------------------------------------


def wait_for_line(capfd, expected: str) -> None:
    printed = ""
    deadline = time.monotonic() + 60
    while not re.search(rf"^{re.escape(expected)}, \d+ s$", printed, re.MULTILINE):
        assert time.monotonic() < deadline, printed
        time.sleep(0.01)
        printed += capfd.readouterr().err


def test_log_gets_lines_about_long_work_also_while_exporters_are_silent(capfd, monkeypatch):
    monkeypatch.setattr(cli, "LINE_S", 0.01)
    with err.status(r"chat: reading a \[1] file"):
        wait_for_line(capfd, "chat: reading a [1] file")
        err.step("exporting")
        with silent():
            print("a graph", file=sys.stderr)
            wait_for_line(capfd, "chat: exporting")
        with err.status("verifying"):
            wait_for_line(capfd, "verifying")
        wait_for_line(capfd, "chat: exporting")
        err.step(lambda: "downloading 2 MB of 3 MB")
        wait_for_line(capfd, "chat: downloading 2 MB of 3 MB")
    capfd.readouterr()
    err.step("nothing is at work")
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_short_work_leaves_no_line_in_a_log(capfd):
    with err.status("chat: reading"):
        pass
    assert capfd.readouterr() == ("", "")


SHOWN = """
import time
from triton_transformers.cli import err, out
with err.status("chat: reading"):
    time.sleep(1)
    out.print("a line of the output")
    err.step("exporting")
    time.sleep(1)
"""


def test_terminal_shows_the_step_and_its_seconds(tmp_path):
    master, terminal = pty.openpty()
    with (tmp_path / "out").open("w") as output:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-c", SHOWN]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=terminal):
            os.close(terminal)
            shown = b""
            with contextlib.suppress(OSError):  # once the program has ended
                while part := os.read(master, 1000):
                    shown += part
    os.close(master)
    lines = re.split(r"[\r\n]+", without_codes(shown.decode()))
    assert {"chat: reading, 0 s", "chat: exporting, 1 s"} <= {line[2:] for line in lines}
    assert (tmp_path / "out").read_text() == "a line of the output\n"
