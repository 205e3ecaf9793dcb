"""The slowest requests of the windows with dynamic batching, step by step, from the traces of the server (TRACE=1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.measure.statistics import Results
from loadtest.measure.windows import Window
from monitoring.traces import Span, TraceFiles

SHOWN = 10
WAITING = ("queue", "transfer", "wait", "rest")
# Seconds until the last spans of a window have arrived: the server sends them every half second.
ARRIVAL_S = 2.0


class Run(NamedTuple):
    """A run of a model, which several requests share."""

    model: str
    start: int
    end: int
    rows: int
    longest: int  # tokens of its longest text


class Step(NamedTuple):
    """A part of a request's time in one model: its queue, a step that the backend traces, or all of its computing.

    Before those steps comes the `transfer` to the model's Python process, after them the `rest` of the batch.
    """

    model: str
    name: str
    start: int
    end: int
    attributes: Mapping[str, str] = {}
    links: Sequence[str] = ()


def slowest(folder: Path, system: str, windows: Sequence[Window]) -> Results:
    """Return the slowest of the system's traced requests in these windows, for results.json."""
    files = TraceFiles(folder)
    times = [(int(w.began_at * 1e9), int((w.began_at + w.end - w.start) * 1e9)) for w in windows if w.mode == "dynamic"]
    requests: list[Span] = []
    runs: set[Run] = set()
    for span in files.spans():
        if not any(start <= span.start < end for start, end in times):
            continue
        if span.attributes.get("triton.model_name") == system:
            requests.append(span)
        elif {"rows", "longest"} <= span.attributes.keys():
            rows, longest = (int(span.attributes[name]) for name in ("rows", "longest"))
            runs.add(Run(span.scope, span.start, span.end, rows, longest))
    shown = sorted(requests, key=lambda span: span.end - span.start, reverse=True)[:SHOWN]
    traces = {span.trace for span in shown}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in files.spans():
        if span.trace in traces:
            children[span.parent].append(span)
    return {"traced": len(requests), "requests": [waterfall(span, children, runs) for span in shown]}


def waterfall(request: Span, children: dict[str, list[Span]], runs: set[Run]) -> Results:
    ordered = sorted(steps(request, children), key=lambda step: step.start)
    return {
        "trace": request.trace,
        "ms": milliseconds(request.start, request.end),
        "cause": cause(max(ordered, key=lambda step: step.end - step.start), runs) if ordered else "",
        "steps": [
            {
                "model": step.model,
                "name": step.name,
                "waiting": step.name in WAITING,
                "start_ms": milliseconds(request.start, step.start),
                "ms": milliseconds(step.start, step.end),
                "links": list(step.links),
            }
            for step in ordered
        ],
    }


def steps(span: Span, children: dict[str, list[Span]]) -> Iterator[Step]:
    """Yield the steps of a model's span: those of its models if it is an ensemble."""
    model = span.attributes["triton.model_name"]
    below = children[span.id]
    for child in below:
        if "triton.model_name" in child.attributes:
            yield from steps(child, children)
    own = [child for child in below if child.scope == model]
    for child in below:
        if child.name == "compute":
            if queued := span.events.get("QUEUE_START"):
                yield Step(model, "queue", queued, child.start)
            if own:
                yield Step(model, "transfer", child.start, min(span.start for span in own))
                yield Step(model, "rest", max(span.end for span in own), child.end)
            else:
                yield Step(model, "compute", child.start, child.end)
    for child in own:
        yield Step(model, child.name, child.start, child.end, child.attributes, child.links)


def cause(step: Step, runs: set[Run]) -> str:
    """Return a sentence on the step that took longest."""
    took = f"{milliseconds(step.start, step.end):.0f} ms"
    numbers = {name: int(value) for name, value in step.attributes.items()}
    if step.name == "queue":
        during = [run for run in runs if run.model == step.model and run.start < step.end and run.end > step.start]
        other = max(during, key=lambda run: min(run.end, step.end) - max(run.start, step.start), default=None)
        behind = f", meanwhile {step.model} ran {size(other.rows, other.longest)}" if other else ""
        return f"waited {took} in the queue of {step.model}{behind}"
    if step.name == "wait" and not numbers["runs_ahead"]:
        return f"waited {took} for its run in {step.model}"
    if step.name == "wait":
        ahead = "a run" if numbers["runs_ahead"] == 1 else f"{numbers['runs_ahead']} runs"
        return f"waited {took} for {ahead} of up to {numbers['longest_ahead']} tokens in its own batch"
    if step.name == "transfer":
        return f"waited {took} until the process of {step.model} took its batch"
    if step.name == "rest":
        return f"waited {took} for the rest of its batch in {step.model}"
    if step.name == "run":
        return f"ran for {took} in {step.model}, as one of {size(numbers['rows'], numbers['longest'])}"
    return f"took {took} to {step.name} in {step.model}"


def size(rows: int, longest: int) -> str:
    return f"{rows} text{'s' if rows > 1 else ''} of up to {longest} tokens"


def milliseconds(start: int, end: int) -> float:
    return round((end - start) / 1e6, 3)
