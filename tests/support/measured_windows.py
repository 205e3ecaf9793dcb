"""Build windows and results of a comparison without a server."""

from __future__ import annotations

import numpy as np

from loadtest.compare.compare import Comparison
from loadtest.load.arrivals import GIVEN_UP, Sample
from loadtest.load.examples import Examples
from loadtest.measure.windows import Counters, OpenLoop, Window
from loadtest.server.generating import Generated
from triton_transformers.settings import MODES, Settings


def window(
    mode: str,
    number: int,
    rps: float,
    mean_batch: float = 1.0,
    cpu: float = 0.2,
    errors: int = 0,
    seconds: float = 10.0,
    start: float = 0.0,
) -> Window:
    count = int(rps * seconds)
    samples = [Sample(start + i / rps, 1000 / rps, "") for i in range(count)]
    samples += [Sample(start + 1.0, 5.0, "500 no")] * errors
    executions = round(count / mean_batch)
    counters = {
        "encoder": Counters(count, count, executions, count * 10**6, count * 5 * 10**6, {int(mean_batch): executions}),
        "tokenizer": Counters(count, count, count, count * 10**5, count * 10**5, {1: count}),
    }
    return Window(number, mode, start, start + seconds, samples, counters, cpu, start, seconds)


def rounds(rates: list[tuple[float, ...]], **options) -> list[Window]:
    """Return the windows of rounds. `rates`: the requests per second of each round, by mode."""
    modes = ("none", "dynamic") if len(rates[0]) == 2 else MODES
    return [
        window(mode, number, rps, mean_batch=8 if mode == "dynamic" else 1, **options)
        for number, of_round in enumerate(rates, 1)
        for mode, rps in zip(modes, of_round, strict=True)
    ]


def open_loop_rounds(
    p95s: list[tuple[float, ...]], rate: float = 100.0, overloaded: tuple[str, ...] = ()
) -> list[Window]:
    """Return the windows of an open loop. `p95s`: the 95th percentile in milliseconds of each round, by mode.

    In the overloaded modes the server answers half of the requests, and users give up one.
    """
    windows = rounds([(rate,) * len(of_round) for of_round in p95s])
    for window, p95 in zip(windows, np.ravel(p95s), strict=True):
        latencies = np.linspace(0, p95 / 0.95, len(window.samples))
        window.samples = [s._replace(latency_ms=ms) for s, ms in zip(window.samples, latencies.tolist(), strict=True)]
        window.open_loop = OpenLoop(len(window.samples), 5, 6, False)
        if window.mode in overloaded:
            window.samples[-1] = window.samples[-1]._replace(error=GIVEN_UP)
            window.open_loop = OpenLoop(len(window.samples) // 2, 100, 600, True)
    return windows


def generating_window(
    mode: str, number: int, tokens_per_second: float, together: float, answers: int = 20, seconds: float = 10.0
) -> Window:
    """Return a window of a system that generates 32 tokens for each request."""
    tokens = tokens_per_second * seconds
    texts = tokens / 32
    measured = window(mode, number, answers / seconds, seconds=seconds)
    measured.counters = {"story": measured.counters["tokenizer"]}
    measured.generated = Generated(seconds, tokens, tokens / together, texts, texts * 4e5, texts * 31, texts * 31 * 5e4)
    return measured


def generating_rounds(rates: list[tuple[float, float]], together: float = 6.0) -> list[Window]:
    """Return the windows of rounds. `rates`: the tokens per second one at a time and together, of each round."""
    return [
        generating_window(mode, number, rate, 1.0 if mode == "none" else together)
        for number, of_round in enumerate(rates, 1)
        for mode, rate in zip(("none", "dynamic"), of_round, strict=True)
    ]


def comparison(settings: Settings, windows: list[Window], noun: str = "texts") -> Comparison:
    """Return a comparison that has measured these windows."""
    measured = Comparison(settings, windows, server_version="2.51.0", cores=2)
    measured.examples = Examples(noun, [])
    measured.generates = windows[0].generated is not None
    measured.is_pipeline = False
    return measured
