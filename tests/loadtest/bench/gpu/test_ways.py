"""The ways that `make bench BENCH=gpu` compares give the vectors of the same texts in the same order."""

from __future__ import annotations

import contextlib
import random

import pytest

from export.check import served
from loadtest.bench.architectures.small_models import POSITIONS, SmallModel
from loadtest.bench.gpu import rates, ways

COMPARED = ("padded, sorted", *ways.OWN, "token budget")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> ways.Checkpoint:
    folder = SmallModel("BertModel", "").save(tmp_path_factory.mktemp("bert") / "1")
    return ways.Checkpoint(folder, "mean", 32, "cpu", "float32")


@pytest.fixture
def load() -> ways.Load:
    draw = random.Random(0)
    ids = [[draw.randrange(5, 500) for _ in range(draw.randint(1, POSITIONS))] for _ in range(70)]
    return ways.Load("ragged", [""] * len(ids), ids)


@contextlib.contextmanager
def wrong(checkpoint: ways.Checkpoint):
    with ways.padded_sorted(checkpoint) as way:
        yield lambda load: -way(load)


@contextlib.contextmanager
def not_installed(checkpoint: ways.Checkpoint):
    raise ways.Missing("it is not installed")
    yield


def test_every_way_that_starts_answers_alike_and_the_others_have_a_reason(checkpoint, load, monkeypatch):
    monkeypatch.setattr(ways, "TOKEN_BUDGET", 3 * POSITIONS)  # several runs
    chosen = {name: ways.WAYS[name] for name in COMPARED} | {"wrong": wrong, "absent": not_installed}
    monkeypatch.setattr(rates, "WAYS", chosen)
    with served.python_backend(), contextlib.ExitStack() as stack:
        started, cosines, missing = rates.start(stack, checkpoint, [load])
    assert set(started) == set(COMPARED)
    assert min(cosines.values()) > 0.99999  # texts in another order have less in common
    assert missing.pop("absent") == "it is not installed"
    assert missing.pop("wrong").startswith("its vectors differ: cosine")
    assert missing == {}
