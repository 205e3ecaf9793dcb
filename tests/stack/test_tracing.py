"""Traces of a real Triton and of the backends, in the receiver's file and in the report."""

from __future__ import annotations

import time

import pytest

from loadtest.compare import waterfalls
from monitoring.traces import Span, TraceFiles
from tests.support.batches import all_at_once, one_batch
from tests.support.embedding import embed
from tests.support.measured_windows import window
from tests.support.stacks import SHORT, TestStack, bring_up

# Long enough for a run of its own, and not so long that it leaves the batch.
LONG, SHORT_TEXT = "canary " * 60, "canary"
STEPS = {"encoder": ["tokenize", "wait", "pack", "run", "scatter"]}


@pytest.fixture(scope="module")
def traced(new_stack) -> TestStack:
    """Start a server that sends traces, and runs one part of a batch after the other."""
    stack = new_stack()
    stack.environment |= {"TRACE": "1", "TRITON_CPUS": "0"}
    return bring_up(stack)


def spans(stack: TestStack, requests: int) -> list[Span]:
    """Wait until all spans of this many requests have arrived, of earlier tests too, and return them."""
    files = TraceFiles(stack.folder / "state/traces")

    def arrived() -> list[Span]:
        received = list(files.spans())
        names = [span.name for span in received]
        last = ("InferRequest", *(name for steps in STEPS.values() for name in steps))
        return received if all(names.count(name) >= requests for name in last) else []

    return stack.wait(arrived, f"the spans of {requests} requests")


def test_waterfall_of_a_short_request_names_its_long_neighbour(traced):
    began = time.time()
    with one_batch(traced, "encoder", rows=2):
        all_at_once(traced, 2, lambda number: embed(traced, (LONG, SHORT_TEXT)[number]))
    received = spans(traced, 2)
    by_id = {span.id: span for span in received}
    for model, names in STEPS.items():
        for name in names:
            parents = [by_id[span.parent] for span in received if span.name == name]
            assert [parent.attributes["triton.model_name"] for parent in parents] == [model] * 2
    long, short = sorted((s for s in received if s.name == "wait"), key=lambda span: -int(span.attributes["tokens"]))
    assert (short.links, long.links) == ([long.trace], [])
    assert short.attributes["longest_ahead"] == long.attributes["tokens"]

    measured = window("dynamic", 1, 10.0, seconds=time.time() - began)
    measured.began_at = began
    drawn = waterfalls.slowest(traced.folder / "state/traces", "embedding", [measured])["requests"]
    (waterfall,) = (request for request in drawn if request["trace"] == short.trace)
    (wait,) = (step for step in waterfall["steps"] if step["name"] == "wait")
    assert wait["links"] == [long.trace]
    step = waterfalls.Step("encoder", "wait", short.start, short.end, short.attributes)
    assert waterfalls.cause(step, set()).endswith(
        f" ms for a run of up to {long.attributes['tokens']} tokens in its own batch"
    )


def test_traces_have_no_text_of_users(traced):
    files = TraceFiles(traced.folder / "state/traces")
    before = sum(span.name == "scatter" for span in files.spans())
    embed(traced, SHORT_TEXT)
    spans(traced, before + 1)
    assert "canary" not in (traced.folder / "state/traces/spans.jsonl").read_text()


def test_report_of_a_comparison_draws_the_slowest_requests(traced):
    done = traced.make("loadtest", **SHORT | {"WINDOW": 4})
    slowest = traced.results()["slowest"]
    assert slowest["traced"] >= len(slowest["requests"]) == 10, done.stdout + done.stderr
    # On a busy machine spans may be lost, but not those of all requests.
    steps = {"queue", "transfer", "tokenize", "wait", "pack", "run", "scatter", "rest"}
    assert any({step["name"] for step in request["steps"]} == steps for request in slowest["requests"])
    assert "<h2>The slowest requests</h2>" in (traced.folder / "reports/latest/report.html").read_text()
    assert traced.results()["command"].count("TRACE=1") == 1


def test_requests_are_answered_while_the_receiver_hangs(traced):
    (receiver,) = traced.processes("python3")
    receiver.suspend()
    try:
        assert embed(traced, SHORT_TEXT).shape == (1, 384)
    finally:
        receiver.resume()
