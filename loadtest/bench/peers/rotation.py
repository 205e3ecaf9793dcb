"""Measure the servers in turn: in every round each gets a short window, while all others are paused.

The result has a row for each, on the terminal and in Markdown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import fill

from rich.markup import escape

from loadtest.bench.clients import Clients, Window, measure
from loadtest.bench.comparisons import fetch_embedding
from loadtest.bench.peers.known_peers import INT8, ONNX, PEERS, OwnPeer, Peer, Site, Variant, weights_with_graph
from loadtest.bench.peers.running import Running, reference
from loadtest.bench.tables import spread
from loadtest.server.machine import host
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table
from triton_transformers.corpus import MIXED
from triton_transformers.settings import Settings, UserError

COLUMNS = ("cores", "precision", "server", "requests/s", "p50 ms", "p95 ms", "cosine", "settings")
PRECISIONS = ("fp32", "bf16", "int8", "–")  # in the order of the table; servers without a window have none
CELL_WIDTH = 40
CORES = (1, 2)
CLIENTS = 64
ROUNDS = 3
WARMUP_S, TRIAL_S, WINDOW_S = 1.0, 2.0, 4.0
CHECKED_TEXTS = 32
ATTEMPTS = 3  # of a window with failures


@dataclass
class Row:
    """One server on some cores: its windows, or the sentence that explains why it has none."""

    cores: int
    name: str
    is_rival: bool
    precision: str = PRECISIONS[-1]
    cosine: float = 0.0  # the smallest one with the reference
    variant: Variant = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    problem: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(window.rate for window in self.windows) if self.windows else 0.0

    @property
    def cells(self) -> list[str]:
        if not self.windows:
            return [str(self.cores), self.precision, self.name, "–", "–", "–", "–", self.problem]
        rates = [window.rate for window in self.windows]
        p50, p95 = (statistics.median(getattr(window, key) for window in self.windows) for key in ("p50_ms", "p95_ms"))
        settings = "; ".join([*self.settings, *self.failures])
        figures = [spread(rates, 0), f"{p50:.0f}", f"{p95:.0f}", f"{self.cosine:.4f}"]
        return [str(self.cores), self.precision, self.name, *figures, settings]

    @property
    def settings(self) -> list[str]:
        return [", ".join(f"{name} {value}" for name, value in self.variant.items()) or "default"]

    @property
    def failures(self) -> list[str]:
        failures = [failure for window in self.windows for failure in (*window.failures, *window.refused)]
        return [f"{len(failures)} requests failed, the first with: {failures[0]}"] if failures else []


def run() -> None:
    with folder() as work:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        site = prepared(work / ONNX, cpus, ONNX)
        for form in INT8:
            # `make models` prints why a format is refused, and the rows without it refer to that.
            with contextlib.suppress(UserError):
                site.formats[form] = prepared(work / form, cpus, form)
        expected = reference(site.weights, MIXED.texts[:CHECKED_TEXTS])
        rows: list[Row] = []
        for cores in CORES:
            if cores <= len(cpus):
                rows += compare(PEERS, replace(site, cpus=cpus[:cores]), cpus[cores:] or cpus, expected)
    report(rows)


def prepared(work: Path, cpus: tuple[int, ...], form: str) -> Site:
    """Assemble the model in a format, in a folder of its own."""
    work.mkdir()
    stack = OwnStack(work, SYSTEMS="embedding", FORMAT=form)
    stack.command("models")
    weights = fetch_embedding()
    if (graph := stack.models / "encoder/1/model.onnx").exists():
        weights = weights_with_graph(weights, graph, work / "weights")
    return Site(cpus, weights, stack.models, work)


def compare(peers: Sequence[Peer | OwnPeer], site: Site, client_cpus: tuple[int, ...], expected: dict) -> list[Row]:
    """Measure all servers on the CPUs of the site, and the clients on theirs."""
    window = partial(measured_window, site, ",".join(map(str, client_cpus)))
    rows = [Row(len(site.cpus), peer.name, peer.is_rival) for peer in peers]
    servers: list[tuple[Row, Running]] = []
    with contextlib.ExitStack() as stack:
        for peer, row in zip(peers, rows, strict=True):
            try:
                kept = stack.enter_context(contextlib.ExitStack())
                running, row.variant, row.cosine = start_fastest(peer, site, window, expected, kept)
                row.precision = running.precision
                servers.append((row, running))
            except UserError as error:
                row.problem = " ".join(str(error).split())
        for number in range(ROUNDS):
            first = number * len(servers) // ROUNDS
            for row, running in servers[first:] + servers[:first]:
                row.windows.append(window(row.name, running, WINDOW_S))
    return rows


def measured_window(site: Site, cpus: str, name: str, running: Running, seconds: float) -> Window:
    """Return one window of a server, which runs only during it, with the clients on these CPUs.

    Repeat a window with failures: after a pause, Triton may count one of its processes as crashed, and recover.
    """
    with err.status(f"{len(site.cpus)} core(s): {name}"):
        running.resume()
        try:
            for _ in range(ATTEMPTS):
                window = measure(Clients(running.url, running.form, CLIENTS, WARMUP_S, seconds), cpus)
                if not window.failures:
                    break
            return window
        finally:
            running.pause()


def start_fastest(
    peer: Peer | OwnPeer,
    site: Site,
    window: Callable[[str, Running, float], Window],
    expected: dict,
    kept: contextlib.ExitStack,
) -> tuple[Running, Variant, float]:
    """Start the peer with each of its settings, and leave it running, paused, with the fastest; `kept` stops it."""
    fastest: tuple[float, Running, Variant, float] | None = None
    reason = ""
    variants = peer.variants(len(site.cpus))
    for variant in variants:
        try:
            with contextlib.ExitStack() as trial, err.status(f"starting {peer.name}"):
                running = trial.enter_context(peer.serve(site, variant))
                cosine = running.check(expected)
                has_choice = len(variants) > 1
                rate = window(f"trying {peer.name}", running, TRIAL_S).rate if has_choice else 0.0
                running.pause()
                if not fastest or rate > fastest[0]:
                    kept.close()
                    kept.push(trial.pop_all())
                    fastest = rate, running, variant, cosine
        except (UserError, OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    if not fastest:
        raise UserError(reason)
    return fastest[1:]


def report(rows: list[Row]) -> None:
    """Write the rows as JSON and Markdown, and print them."""
    reports = Settings.load().reports / "bench"
    reports.mkdir(parents=True, exist_ok=True)
    path = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-peers"
    path.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(rows))
    show(rows)
    out.print(summary(rows))
    for suffix in (".md", ".json"):
        out.print(os.path.relpath(path.with_suffix(suffix)))


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.cores, PRECISIONS.index(row.precision), -row.rate))


def show(rows: list[Row]) -> None:
    """Print the table, and long settings or problems in several lines."""
    cells = [[escape(fill(cell, CELL_WIDTH)) for cell in row.cells] for row in ordered(rows)]
    print_table(COLUMNS, cells, text_columns=("precision", "server", "settings"))


def markdown(rows: list[Row]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.cells for row in ordered(rows))]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
    return f"{summary(rows)}\n\n{table}\n"


def summary(rows: list[Row]) -> str:
    """Return the machine, and this project / the fastest rival for each number of cores and precision."""
    lines = [f"CPU: {host()['cpu']}. Command: `make bench BENCH=peers`."]
    for cores, precision in itertools.product(sorted({row.cores for row in rows}), PRECISIONS):
        alike = [row for row in rows if (row.cores, row.precision) == (cores, precision) and row.windows]
        own, best = (
            max((row for row in alike if row.is_rival == is_rival), key=lambda row: row.rate, default=None)
            for is_rival in (False, True)
        )
        if own and best:
            lines.append(
                f"{cores} core(s), {precision}: {own.name} {own.rate:.0f} requests/s, {own.rate / best.rate:.1f} times "
                f"the fastest other server ({best.name}, {best.rate:.0f})."
            )
    return "\n".join(lines)
