"""Spans of the backends' steps, from an execution to the receiver's file."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from monitoring import traces
from monitoring.traces import TraceFiles
from serving.encoders.plan import Encoder
from serving.engines.packing import RunCost
from serving.triton import tracing
from tests.support.python_backend import InferenceRequest, instance_args, parameters


@pytest.fixture
def files(tmp_path: Path) -> TraceFiles:
    return TraceFiles(tmp_path / "traces")


@pytest.fixture
def port(files: TraceFiles) -> Iterator[int]:
    """Return the port of a receiver that writes to the files."""
    server = traces.server(0, files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine send the last spans."""
    monkeypatch.setattr(tracing, "TIMEOUT_S", 120)


@pytest.fixture
def encoder(pb_utils, monkeypatch, port):
    """Return a traced model that runs rows of unlike lengths apart, the longest first, and fails on the token 13."""
    packed_encoder = importlib.import_module("serving.encoders.packed")

    def run(outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        if (feed["mask"] == 13).any():
            raise ValueError("13")
        return [feed["mask"].sum(axis=1)]

    class Lengths(packed_encoder.PackedEncoder):
        def load_encoder(self, config, args):
            return Encoder({"mask": np.int64}, ["length"], set(), run, cost=RunCost(1e-4, 1e-4))

    monkeypatch.setenv("TRACE", "1")
    monkeypatch.setenv("TRACE_URL", f"http://127.0.0.1:{port}{traces.PATH}")
    monkeypatch.setattr(tracing, "sender", None)
    config = {
        "input": [{"name": "mask", "data_type": "TYPE_INT64"}],
        **parameters(mask="mask"),
        "max_batch_size": 8,
    }
    model = Lengths()
    model.initialize(instance_args("", config))
    return model


def request(number: int | None, *lengths: int, token: int = 1) -> InferenceRequest:
    """Return a request of rows of these lengths. Its number is its trace; None: it is not traced."""
    mask = np.zeros((len(lengths), max(lengths)), int)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = token
    inference = InferenceRequest(["length"], mask=mask)
    if number is not None:
        inference.context = json.dumps({"traceparent": f"00-{trace(number)}-{number:016x}-01"})
    return inference


def trace(number: int) -> str:
    return f"{number:032x}"


def test_request_has_the_steps_of_its_run_with_links_to_its_neighbours(encoder, files):
    encoder.execute([request(1, 3), request(2, 40), request(None, 3), request(4, 2)])
    encoder.finalize()
    spans = list(files.spans())
    assert {span.trace for span in spans} == {trace(n) for n in (1, 2, 4)}
    assert {(span.trace, int(span.parent, 16)) for span in spans} == {(trace(n), n) for n in (1, 2, 4)}
    assert {span.scope for span in spans} == {"m"}
    wait, pack, run, scatter = sorted((span for span in spans if span.trace == trace(1)), key=lambda span: span.start)
    assert [wait.name, pack.name, run.name, scatter.name] == ["wait", "pack", "run", "scatter"]
    assert (wait.end, pack.end, run.end) == (pack.start, run.start, scatter.start)
    assert wait.attributes == {"tokens": "3", "runs_ahead": "1", "longest_ahead": "40"}
    assert wait.links == [trace(2)]
    assert run.attributes == {"tokens": "3", "rows": "3", "longest": "3"}
    assert run.links == [trace(4)]
    (long_wait,) = (span for span in spans if span.trace == trace(2) and span.name == "wait")
    assert long_wait.attributes == {"tokens": "40", "runs_ahead": "0", "longest_ahead": "0"}
    assert long_wait.links == []
    assert wait.start < long_wait.start < long_wait.end < wait.end


def test_failing_request_is_answered_as_without_traces(encoder, files):
    responses = encoder.execute([request(1, 2, 40), request(2, 3, token=13)])
    encoder.finalize()
    assert responses[0].outputs == {"length": [2, 40]}
    assert "13" in responses[1].error[1]
    # The rows of one request run apart, and link to no neighbour.
    runs = [span for span in files.spans() if span.name == "run"]
    assert [(run.trace, run.attributes["tokens"], run.links) for run in runs] == [
        (trace(1), "40", []),
        (trace(1), "2", []),
    ]


def test_span_links_to_the_longest_neighbours_only(port, files):
    requests = {tracing.Traced(trace(n), f"{n:016x}", 0): n for n in range(1, 2 * tracing.MAX_LINKS)}
    sender = tracing.Sender(f"http://127.0.0.1:{port}{traces.PATH}", "m")
    sender.add(tracing.Step("run", 1, 2, requests, requests))
    sender.close()
    links = {span.trace: span.links for span in files.spans()}
    most = [trace(n) for n in range(2 * tracing.MAX_LINKS - 1, 0, -1)]
    assert links[most[-1]] == most[: tracing.MAX_LINKS]
    assert links[most[0]] == most[1 : tracing.MAX_LINKS + 1]


def test_spans_are_dropped_when_too_many_wait_and_nobody_listens(monkeypatch):
    monkeypatch.setattr(tracing, "SEND_INTERVAL_S", 3600)
    sender = tracing.Sender("http://127.0.0.1:1/v1/traces", "m")
    # Several messages: a failed one does not end the sending.
    step = tracing.Step("run", 1, 2, {tracing.Traced(trace(n), "0" * 16, 0): 1 for n in range(3)})
    for _ in range(tracing.MAX_WAITING + 5):
        sender.add(step)
    assert sender.waiting.qsize() == tracing.MAX_WAITING
    sender.close()
    assert sender.waiting.empty()
    assert not sender.thread.is_alive()


@pytest.mark.parametrize("value", ["0", ""])
def test_nothing_is_traced_by_default(monkeypatch, value):
    monkeypatch.setattr(tracing, "sender", None)
    monkeypatch.setenv("TRACE", value)
    tracing.start("m")
    assert (tracing.sender, tracing.traced(request(1, 3), 0)) == (None, None)


# --- the receiver -----------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


def post(port: int, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read()).get("message", "")
    connection.close()
    return response.status, answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        (traces.PATH, b'{"resourceSpans": []}', JSON, 200, ""),
        ("/v1/metrics", b"{}", JSON, 404, traces.PATH),
        (traces.PATH, b"\x0a", {"Content-Type": "application/x-protobuf"}, 415, "only OTLP in JSON"),
        (traces.PATH, None, JSON | {"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
        (traces.PATH, None, JSON | {"Content-Length": str(traces.MAX_BODY + 1)}, 413, str(traces.MAX_BODY)),
        *((traces.PATH, body, JSON, 400, "OTLP") for body in (b"[]", b"{", b"{}", b"\xff", b"[" * 10**5)),
    ],
)
def test_receiver_takes_messages_of_traces_only(port, files, path, body, headers, status, message):
    code, answer = post(port, path, body, headers)
    assert code == status
    assert message in answer
    assert files.newer.exists() == (status == 200)


def test_receiver_listens_on_loopback_alone(files):
    with traces.server(0, files) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_receiver_passes_messages_on(files, tmp_path):
    """Pass on a message also after the other receiver refused one."""
    arrived = threading.Event()

    class Other(TraceFiles):
        def append(self, message: object) -> None:
            super().append(message)
            arrived.set()

    other = Other(tmp_path / "other")
    with traces.server(0, other) as shown:
        threading.Thread(target=shown.serve_forever).start()
        forwarder = traces.Forwarder(f"http://127.0.0.1:{shown.server_port}{traces.PATH}")
        with traces.server(0, files, forwarder=forwarder) as server:
            threading.Thread(target=server.serve_forever).start()
            forwarder.add(b"{}")
            sent = json.dumps(message(1)).encode()
            assert post(server.server_port, traces.PATH, sent, JSON)[0] == 200
            assert post(server.server_port, traces.PATH, b"{}", JSON)[0] == 400
            arrived.wait()
            server.shutdown()
        shown.shutdown()
    assert other.newer.read_text() == files.newer.read_text()


def test_messages_are_dropped_while_the_other_receiver_hangs():
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        forwarder = traces.Forwarder(f"http://127.0.0.1:{hanging.getsockname()[1]}{traces.PATH}")
        forwarder.add(b"{}")
        connection, _ = hanging.accept()  # the forwarder has taken the first message, and takes no other
        with connection:
            for _ in range(2 * traces.MAX_WAITING):
                forwarder.add(b"{}")
            assert forwarder.waiting.full()


def message(number: int) -> dict:
    span = {
        "traceId": trace(number), "spanId": "1" * 16, "name": "run", "startTimeUnixNano": "1", "endTimeUnixNano": "2",
    }  # fmt: skip
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "m"}, "spans": [span]}]}]}


def test_newest_messages_are_kept_and_lines_that_are_no_messages_skipped(tmp_path):
    line = len(json.dumps(message(1), separators=(",", ":"))) + 1
    files = TraceFiles(tmp_path, max_bytes=2 * line)
    for number in range(1, 8):
        files.append(message(number))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * line
    assert [int(span.trace, 16) for span in files.spans()] == [5, 6, 7]
    files.max_bytes = 10**6
    with files.newer.open("a") as file:
        file.write('{"resourceSpans": [{}]}\nno JSON\n{"resourceSpans": 3}\n')
        strange = message(8)
        strange["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"] = [{"key": "rows", "value": "8"}]
        file.write(json.dumps(strange) + "\n")
    files.append(message(9))
    with files.newer.open("a") as file:
        file.write(json.dumps(message(3))[:-20])
    assert [int(span.trace, 16) for span in files.spans()] == [5, 6, 7, 9]


def test_taken_port_and_a_full_disk_are_one_sentence(port, files, monkeypatch):
    files.newer.parent.write_text("a file in place of the folder")
    code, answer = post(port, traces.PATH, b'{"resourceSpans": []}', JSON)
    assert (code, str(files.newer) in answer) == (507, True)
    monkeypatch.setattr("sys.argv", ["receiver", str(port), "."])
    with pytest.raises(SystemExit, match=f"TRACE_PORT={port} cannot be opened: Address already in use. Stop"):
        traces.main()
