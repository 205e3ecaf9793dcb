"""Run one benchmark: python -m loadtest.bench embedding | engines | generation | ..."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable

from loadtest.bench import (
    comparisons,
    engine_rates,
    gateway_overhead,
    generation_rates,
    request_costs,
    speech_rates,
    tracing_cost,
)
from loadtest.bench.architectures import architectures
from loadtest.bench.gpu import rates, steps
from loadtest.bench.peers import generation_peers, rotation
from triton_transformers.cli import one_interrupt, run
from triton_transformers.settings import Settings


def generation() -> None:
    generation_rates.run()
    generation_peers.run()


def gpu() -> None:
    reports = Settings.load().reports / "bench/gpu"
    shutil.rmtree(reports, ignore_errors=True)
    rates.main(reports / "rates")
    steps.served(reports)


BENCHMARKS: dict[str, Callable[[], None]] = {
    "embedding": comparisons.run,
    "generation": generation,
    "speech": speech_rates.run,
    "architectures": architectures.run,
    "peers": rotation.run,
    "engines": engine_rates.run,
    "gpu": gpu,
    "requests": request_costs.run,
    "gateway": gateway_overhead.run,
    "tracing": tracing_cost.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench")
    parser.add_argument("benchmark", choices=BENCHMARKS)
    benchmark = BENCHMARKS[parser.parse_args().benchmark]
    with one_interrupt():
        benchmark()


if __name__ == "__main__":
    run(main)
