"""Shares an engine between batches and the requests that take it longer than others should wait.

A batch runs whole, as Triton sent it. Of the long requests, a few rows run between two batches, in rotation.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from serving.triton import responses
from serving.triton.types import Array, Tensors

Request = TypeVar("Request")
RowResult = dict[str, Array]


class Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self.waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self.waiting.append(turn)
        turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            if self.waiting:
                self.waiting.popleft().set()
            else:
                self._is_taken = False


@dataclass
class LongRequest(Generic[Request]):
    """A request whose rows run in this order, with the seconds that each is expected to take."""

    request: Request
    response: responses.Response
    rows: Array
    seconds: Array
    results: list[RowResult] = field(default_factory=list)  # of the first rows

    def next_rows(self, seconds: float) -> Array:
        """Return the rows that fit into this time; none if the first does not."""
        first = len(self.results)
        return self.rows[first : first + int(np.searchsorted(self.seconds[first:].cumsum(), seconds, side="right"))]


Share = tuple[LongRequest[Any], Array]  # the rows of a long request that run in one turn


class LongRequests(Generic[Request]):
    """The long requests of a model, and the thread that takes turns for them."""

    def __init__(
        self,
        seconds: float,
        workers: int,
        run: Callable[[list[tuple[Request, int]]], list[RowResult]],
        answer: Callable[[Request, list[RowResult]], Tensors],
    ) -> None:
        """Spend about these seconds on a turn between two batches, and as much for each worker if no batch came.

        `run` runs rows, `answer` joins the results of a request's rows.
        """
        self.seconds, self.workers, self.run, self.answer = seconds, workers, run, answer
        self.turns = Turns()
        self.batch_came = False
        self.waiting: deque[LongRequest[Request]] = deque()
        self.work = threading.Event()
        self.is_closed = False
        self.thread = threading.Thread(target=self._take_turns, daemon=True)
        self.thread.start()

    def add(self, long: LongRequest[Request]) -> None:
        self.waiting.append(long)
        self.work.set()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Take the engine for a batch."""
        with self.turns:
            self.batch_came = True
            yield

    def close(self) -> None:
        """End the thread. Triton unloads a model only after all its requests got responses, so none waits."""
        self.is_closed = True
        self.work.set()
        self.thread.join()

    def take_turn(self) -> None:
        """Run the next rows, and respond to the requests that are done."""
        with self.turns:
            shares = self._next_shares(self.seconds if self.batch_came else self.seconds * self.workers)
            self.batch_came = False
            results = responses.run_apart(dict(enumerate(shares)), self._run)
            ended: list[tuple[LongRequest[Request], Exception | None]] = []
            for (long, _), result in zip(shares, results.values(), strict=True):
                if isinstance(result, Exception):
                    ended.append((long, result))
                    continue
                long.results += result
                if len(long.results) == len(long.rows):
                    ended.append((long, None))
                else:
                    self.add(long)  # another thread may take its next turn now
        for long, error in ended:
            self._respond(long, error)

    def _take_turns(self) -> None:
        while not self.is_closed:
            self.work.wait()
            self.work.clear()
            while self.waiting:
                self.take_turn()

    def _next_shares(self, seconds: float) -> list[Share]:
        """Return at least one row, if any waits, and as many of the requests at the front as fit into these seconds."""
        shares: list[Share] = []
        while self.waiting:
            long = self.waiting[0]
            rows = long.next_rows(seconds)
            if not len(rows):
                if shares:
                    break
                rows = long.rows[len(long.results) :][:1]
            self.waiting.popleft()
            first = len(long.results)
            seconds -= float(long.seconds[first : first + len(rows)].sum())
            shares.append((long, rows))
        return shares

    def _run(self, shares: list[Share]) -> Sequence[list[RowResult]]:
        results = iter(self.run([(long.request, int(row)) for long, rows in shares for row in rows]))
        return [[next(results) for _ in rows] for _, rows in shares]

    def _respond(self, long: LongRequest[Request], error: Exception | None) -> None:
        if error:
            long.response.send(error)
            return
        results = [long.results[i] for i in np.argsort(long.rows)]
        try:
            long.response.send(self.answer(long.request, results))
        except Exception as error:
            long.response.send(error)
