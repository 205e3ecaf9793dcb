"""Locks that print for whom a command waits, and reports on a full disk: only complete files stay."""

from __future__ import annotations

import fcntl
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from triton_transformers.files import Measurement, complete_folder, exclusive, write_atomically, write_json
from triton_transformers.settings import UserError

LIMIT = 1000


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let no file grow beyond LIMIT bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("measurement", "sentence"),
    [
        (
            Measurement("comparison", "spam", "round 1 of 6, dynamic", ends_at=1290.0),
            "A comparison of spam is running (round 1 of 6, dynamic), for about 5 more minutes. It loads",
        ),
        (
            Measurement("comparison", "spam", ends_at=1010.0),
            "A comparison of spam is running, for about 1 more minute. ",
        ),
        (
            Measurement("search", "spam"),
            "A search for the best configuration of spam is running. It loads spam in",
        ),
        (Measurement("overload", "spam"), "A measurement of an overload of spam is running."),
    ],
)
def test_holder_of_the_lock_says_what_it_does(tmp_path, monkeypatch, measurement, sentence):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    lock = tmp_path / "lock"
    assert Measurement.read(lock) is None
    with exclusive(lock, "the test"):
        assert Measurement.read(lock) is None
        for longer in ("and more of it " * 9, ""):
            replace(measurement, doing=longer).write(lock)
        measurement.write(lock)
        assert Measurement.read(lock) == measurement
        assert str(measurement).startswith(sentence)
    assert Measurement.read(lock) is None  # it was killed: it would have emptied the file


def test_full_disk_does_not_end_a_measurement(tmp_path, full_disk):
    (tmp_path / "lock").touch()
    Measurement("comparison", "spam", "x" * LIMIT).write(tmp_path / "lock")


def test_command_that_waits_for_another_prints_so_without_a_terminal(tmp_path, capsys, monkeypatch):
    flock = fcntl.flock

    def waits(lock: int, mode: int) -> None:
        if mode == fcntl.LOCK_EX:  # which would wait
            other.__exit__(None, None, None)
        flock(lock, mode)

    other = exclusive(tmp_path, "another")
    other.__enter__()
    monkeypatch.setattr(fcntl, "flock", waits)
    with exclusive(tmp_path, "another `make models` is at work here"):
        assert capsys.readouterr().err == "another `make models` is at work here: waiting until it ends\n"


def test_file_that_does_not_fit_is_named_and_not_left_behind(tmp_path, full_disk):
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(OSError, match=re.escape(f"File too large: '{path}'")):
        write_atomically(path, "x" * (LIMIT + 1))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"page.html": "before"}


def test_report_on_a_full_disk_keeps_its_complete_files(tmp_path, full_disk):
    target = tmp_path / "a-report"
    with (
        pytest.raises(UserError, match=rf"^{target} cannot be written: File too large\. .* there: results.json\. Free"),
        complete_folder(target, "latest") as work,
    ):
        write_json({"windows": [1, 2]}, work / "results.json")
        write_atomically(work / "report.html", "x" * (LIMIT + 1))
    assert [path.name for path in target.iterdir()] == ["results.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a-report"]  # the link stays as it was


def test_report_of_which_nothing_fits_leaves_nothing(tmp_path, full_disk):
    with (
        pytest.raises(UserError, match=r"cannot be written: File too large\. Free space there, or set REPORTS"),
        complete_folder(tmp_path / "a-report", "latest") as work,
    ):
        write_json(["x" * LIMIT], work / "results.json")
    assert list(tmp_path.iterdir()) == []


def test_report_that_is_interrupted_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), complete_folder(tmp_path / "a-report", "latest") as work:
        write_json({}, work / "results.json")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
