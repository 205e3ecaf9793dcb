"""Requests that are certain to run together, however slowly they arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.support.stacks import TestStack

LONGER_THAN_ANY_TEST_US = 600_000_000


@contextlib.contextmanager
def batches_of(stack: TestStack, model: str, rows: int) -> Iterator[None]:
    """Have the model wait until exactly this many rows have arrived; restore its configuration at the end."""
    config = stack.triton.config(model)
    batching = {"preferred_batch_size": [rows], "max_queue_delay_microseconds": LONGER_THAN_ANY_TEST_US}
    override = {"max_batch_size": max(rows, config["max_batch_size"]), "dynamic_batching": batching}
    stack.triton.load(model, config | override)
    try:
        yield
    finally:
        stack.triton.load(model, config)


@contextlib.contextmanager
def one_batch(stack: TestStack, model: str, rows: int, refused: int = 0) -> Iterator[None]:
    """Expect that these rows, some of which the model refuses, are computed in one execution."""
    with batches_of(stack, model, rows):
        before = stack.triton.statistics()[model]
        yield
        assert stack.executions(model, rows - refused, before) == 1


def all_at_once(stack: TestStack, count: int, ask: Callable[[int], Any]) -> list[Any]:
    """Return ask(0) to ask(count - 1), whose requests over HTTP all arrive before the server reads the first one."""
    port = int(stack.environment["TRITON_HTTP_PORT"])
    with stopped(stack) as resume, ThreadPoolExecutor(count) as clients:
        answers = [clients.submit(ask, number) for number in range(count)]
        stack.wait(lambda: unread_requests(port) >= count or any(a.done() for a in answers), f"{count} requests")
        resume()
        return [answer.result() for answer in answers]


@contextlib.contextmanager
def stopped(stack: TestStack) -> Iterator[Callable[[], None]]:
    """Stop the server's main process until the end of the block, or until the yielded function is called."""
    server = stack.server()
    try:
        server.suspend()
        stack.wait(lambda: stands_still(server), "the server to stop")
        yield server.resume
    finally:
        server.resume()


def stands_still(process: psutil.Process) -> bool:
    """Return whether all threads have stopped: on a busy machine, they read requests for 70 ms after the signal."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def unread_requests(port: int) -> int:
    """Return how many of this process' connections to the port hold bytes that the server has not read."""
    own_ports = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port}
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        local_port, remote_port, unread = (int(text.partition(":")[2], 16) for text in (local, remote, queues))
        count += local_port == port and remote_port in own_ports and unread > 0
    return count
