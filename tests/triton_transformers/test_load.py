"""The asyncio client of benchmarks, drills and tests: outcomes, loops, connections and known answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable

import grpc
import numpy as np
import pytest

from gateway.triton.inference import rpc_error
from tests.support.awaitables import answered, never
from triton_transformers import load
from triton_transformers.load import FAILED, LOST, RIGHT, WRONG, KnownVectors, Load, WrongError, outcome

KNOWN = KnownVectors(np.array([[0.6, 0.8], [0.8, -0.6]]))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answered(None), RIGHT),
        (answered(WrongError("another vector")), WRONG),
        (answered(KeyError("data")), WRONG),
        (answered(load.RefusedError("503 restarting", 503)), FAILED),
        (answered(ConnectionResetError("reset")), FAILED),
        (answered(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone")), FAILED),
        (never(), LOST),
    ],
)
def test_kind_of_an_answer(answer: Awaitable, kind: str) -> None:
    end = asyncio.run(outcome("a route", answer, timeout=0.05 if kind == LOST else 60))
    assert (end.route, end.kind, bool(end.error)) == ("a route", kind, kind != RIGHT)
    assert end.status == (503 if end.error.startswith("503") else None)


def test_vector_of_another_text_is_wrong() -> None:
    for vector in ([0.8, -0.6], [0.8001, -0.6001]):
        KNOWN.check([1], np.array([vector]))
    for vector in ([0.6, 0.8], [0.8, math.nan], [1.0, 1.0, 1.0]):
        with pytest.raises(WrongError):
            KNOWN.check([1], np.array([vector]))
    with pytest.raises(ValueError, match="nearly the same vector"):
        KnownVectors(np.array([[0.6, 0.8], [0.6, 0.8]]))


# --- loops ------------------------------------------------------------------------------------------------------------


def test_open_loop_sends_while_earlier_requests_wait_and_ends_with_all_outcomes() -> None:
    sent = []

    async def run(load: Load) -> None:
        async def request(number: int) -> None:
            sent.append(number)
            await load.send("", asyncio.wait_for(load.ended.wait(), 60))

        await load.open_loop(1000, request)

    with Load(run) as load:
        while len(sent) < 5:
            time.sleep(0.01)
        assert load.outcomes == []
    assert sent == list(range(len(sent)))
    assert [end.kind for end in load.outcomes] == [RIGHT] * len(sent)


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    waiting = [0, 0]

    async def run(load: Load) -> None:
        async def user(number: int) -> None:
            while not load.is_ending:
                waiting[number] += 1
                assert waiting[number] == 1
                await load.send("", asyncio.sleep(0.001))
                waiting[number] -= 1

        await load.closed_loop(2, user)

    with Load(run) as load:
        while len(load.outcomes) < 10:
            time.sleep(0.01)
    assert load.problems == []
    assert waiting == [0, 0]


def test_unexpected_error_of_a_user_ends_the_load_and_is_reported() -> None:
    async def run(load: Load) -> None:
        async def user(number: int) -> None:
            await load.send("", answered(RuntimeError("unexpected")))

        await load.closed_loop(2, user)

    with Load(run) as load:
        while not load.problems:
            time.sleep(0.01)
    (problem,) = load.problems
    assert problem.startswith("the clients stopped: RuntimeError('unexpected') at ")
