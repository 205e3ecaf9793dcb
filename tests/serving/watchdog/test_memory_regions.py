"""The memory that Triton shares with its Python processes and the watchdog: how both read it and write into it."""

from __future__ import annotations

import importlib
import os
import struct
from pathlib import Path
from types import ModuleType

import pytest

from serving.triton import stub_memory
from serving.triton.stub_memory import StubMemory, UnknownLayoutError, stub_arguments

HANDLE, FLAG = 336, 336 + 16
QUEUES = (496, 8688, 16880, 25072, 33264)
HEAD = QUEUES[0] + 16 + 120


@pytest.fixture
def region(tmp_path, monkeypatch) -> Path:
    """Write the memory of a new process, with offsets that Triton chooses."""
    content = bytearray(1 << 16)
    content[FLAG + 88 : FLAG + 128] = struct.pack("=5q", *QUEUES)
    for handle in QUEUES:
        content[handle + 16 + 104 : handle + 16 + 128] = struct.pack("=Qqii", 1000, handle + 144, 0, 0)
    monkeypatch.setattr(stub_memory, "SHARED_MEMORY", tmp_path)
    path = tmp_path / "region"
    path.write_bytes(content)
    return path


@pytest.fixture
def arguments(region) -> list[str]:
    stub = "/backends/python/triton_python_backend_stub"
    return [stub, "/models/m/1/model.py", "region", "65536", "65536", "1", "/backends/python", str(HANDLE), "m_0_0"]


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def send(region: Path) -> None:
    """Put a message into the queue to the process, as Triton does."""
    change(region, HEAD, struct.pack("=i", 1))


def test_flag_is_set_and_nothing_else(region, arguments):
    expected = bytearray(region.read_bytes())
    StubMemory(arguments).report_alive()
    expected[FLAG] = 1
    assert region.read_bytes() == expected


def test_message_during_a_batch_means_that_triton_gave_up(region, arguments):
    memory = StubMemory(arguments)
    assert not memory.is_given_up()
    send(region)
    assert memory.is_given_up()
    change(region, HEAD, struct.pack("=ii", 999, 999))
    assert not memory.is_given_up()


def test_second_message_means_that_the_model_is_loaded(region, arguments):
    memory = StubMemory(arguments)
    send(region)
    assert not memory.is_loaded()
    change(region, HEAD, struct.pack("=i", 2))
    assert memory.is_loaded()


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (FLAG, b"\x02"),
        (FLAG + 1, b"\xff"),
        (FLAG + 88, struct.pack("=q", 1 << 40)),
        (FLAG + 88, struct.pack("=q", -1)),
        (FLAG + 120, struct.pack("=q", 0)),
        (QUEUES[0] + 120, struct.pack("=Q", 0)),
        (QUEUES[0] + 120, struct.pack("=Q", 999)),
        (QUEUES[4] + 128, struct.pack("=q", 1 << 40)),
        (QUEUES[2] + 136, struct.pack("=i", 1000)),
        (QUEUES[2] + 140, struct.pack("=i", -1)),
    ],
)
def test_unknown_layout_is_not_used(region, arguments, offset, content):
    change(region, offset, content)
    with pytest.raises(UnknownLayoutError, match="region is not laid out as by Triton"):
        StubMemory(arguments)


def test_layout_of_other_processors_is_not_used(arguments, monkeypatch):
    monkeypatch.setattr(stub_memory.platform, "machine", lambda: "aarch64")
    with pytest.raises(UnknownLayoutError):
        StubMemory(arguments)


@pytest.mark.parametrize("handle", ["-1", "65500", "1000000", "none"])
def test_wrong_handle_is_not_used(arguments, handle):
    arguments[7] = handle
    with pytest.raises(UnknownLayoutError):
        StubMemory(arguments)


def test_other_processes_are_no_python_processes_of_triton():
    assert stub_arguments("self") == []
    assert stub_arguments(-1) == []
    with pytest.raises(UnknownLayoutError, match="no process of Triton's"):
        StubMemory([])


# --- a process that answers batches -----------------------------------------------------------------------------------


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def stall_guard(pb_utils, arguments, monkeypatch) -> ModuleType:
    def end(code: int) -> None:
        raise Ended

    module = importlib.import_module("serving.triton.backend")
    monkeypatch.setattr(module, "stub_arguments", lambda pid: arguments)
    monkeypatch.setattr(os, "_exit", end)
    return module


def test_process_answers_and_reports_that_it_lives(stall_guard, region):
    execute = stall_guard.guarded(lambda requests: requests * 2, "m")
    assert execute([1]) == [1, 1]
    assert region.read_bytes()[FLAG] == 1


def test_process_ends_before_a_batch_that_triton_gave_up(stall_guard, region):
    batches: list[list[int]] = []
    execute = stall_guard.guarded(batches.append, "m")
    send(region)
    with pytest.raises(Ended):
        execute([1])
    assert not batches


@pytest.mark.parametrize("fails", [False, True])
def test_process_ends_after_a_batch_that_triton_gave_up(stall_guard, region, fails):
    def stand_still(requests: list[int]) -> list[int]:
        send(region)
        return [1 // (not fails)]

    with pytest.raises(Ended):
        stall_guard.guarded(stand_still, "m")([1])


def test_batches_are_answered_where_the_layout_is_unknown(stall_guard, region):
    change(region, FLAG, b"\x02")
    send(region)
    assert stall_guard.guarded(list, "m")((1,)) == [1]
