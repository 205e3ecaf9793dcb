"""Build windows and results of a comparison without a server."""

from __future__ import annotations

from loadtest.compare import Comparison
from loadtest.crowd.crowd import Sample
from loadtest.examples import Examples
from loadtest.windows import Counters, Window
from scripts.common.settings import MODES, Settings


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
    return Window(number, mode, start, start + seconds, samples, counters, cpu, start)


def rounds(rates: list[tuple[float, ...]], **options) -> list[Window]:
    """Return the windows of rounds. `rates`: the requests per second of each round, by mode."""
    modes = ("none", "dynamic") if len(rates[0]) == 2 else MODES
    return [
        window(mode, number, rps, mean_batch=8 if mode == "dynamic" else 1, **options)
        for number, of_round in enumerate(rates, 1)
        for mode, rps in zip(modes, of_round, strict=True)
    ]


def comparison(settings: Settings, windows: list[Window], noun: str = "texts") -> Comparison:
    """Return a comparison that has measured these windows."""
    measured = Comparison(settings, windows, server_version="2.51.0", cores=2)
    measured.examples = Examples(noun, [])
    return measured
