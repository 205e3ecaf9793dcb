"""`make loadtest OVERLOAD=10` on a real stack: the gateway refuses what is too much, and the server recovers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.embedding import embed
from tests.support.stacks import bring_up

pytestmark = pytest.mark.slow


def test_overload_is_refused_and_the_server_recovers(new_stack):
    stack = new_stack()  # of its own, for the low limit
    stack.environment |= {"GATEWAY_IN_FLIGHT": "2", "USERS": "2", "WINDOW": "3", "WARMUP": "1"}
    bring_up(stack)
    before = embed(stack, "a text")
    done = stack.make("loadtest", OVERLOAD=10)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused with 429" in done.stdout
    folder = stack.folder / "reports/latest-overload"
    results = json.loads((folder / "results.json").read_text())
    assert results["refused"] > 0
    assert results["accepted"] > 0
    assert results["failed"] == 0
    assert results["arrived"] == results["accepted"] + results["refused"] + results["given_up"]
    assert "at 10 times its capacity" in (folder / "report.html").read_text()
    np.testing.assert_allclose(embed(stack, "a text"), before, atol=1e-5)
