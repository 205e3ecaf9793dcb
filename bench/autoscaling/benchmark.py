"""Compare the signals that Kubernetes can scale on, each at its best setting: make bench BENCH=autoscaling."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from bench.autoscaling.horizontal_autoscaler import Behavior, Policy
from bench.autoscaling.measured_replica import Measurement, measure_replica
from bench.autoscaling.simulated_day import (
    CPU,
    HOUR_S,
    IN_FLIGHT,
    QUEUE,
    RATE,
    ROOT,
    Outcome,
    Scaler,
    arrivals,
    simulate,
)
from bench.autoscaling.steady_replica import SHARES, Replica, tabulate
from loadtest.host import host
from triton_transformers.cli import err, out, print_table
from triton_transformers.figures import PALETTES, Palette, render
from triton_transformers.settings import Settings

# The peak without bursts, in capacities of one replica.
PEAK = 14
# The settings are chosen on some days, and compared on others. Day 3 is in neither: we designed the candidates and the
# behaviors on it.
CHOSEN_ON, COMPARED_ON = (1, 2), (5, 6)
TARGET_S, TARGETS_S = 0.2, (0.05, 0.1, 0.2, 0.5)
# Seconds from the decision until a new replica serves: schedule the pod, start it, load the models (measured: see the
# output), pass the readiness probe. Slow: a node or an image is fetched first.
START_S, SLOW_START_S = 30, 120
# If texts become longer, each request costs this many times as much.
COSTLIER = 1.4

# A burst fills queues that hundreds of replicas could not empty at once; the default doubles every 15 seconds.
DOUBLE = (Policy(100, 60, is_percent=True), Policy(4, 60))
BEHAVIORS = {
    "defaults of Kubernetes": Behavior(),
    "scale in after 2 min": Behavior(down_window_s=120),
    "scale in after 2 min, at most double per minute": Behavior(down_window_s=120, up=DOUBLE),
    "scale in after 2 min, at most double per minute, tolerance 2 %": Behavior(0.02, down_window_s=120, up=DOUBLE),
}
# Targets: a share of the core; a ratio; requests per replica, twice; a share of the capacity.
TARGETS: dict[str, tuple[float, ...]] = {
    CPU: (0.5, 0.6, 0.7, 0.8, 0.85, 0.88, 0.9, 0.93, 0.95, 0.97),
    QUEUE: (0.2, 0.3, 0.35, 0.4, 0.425, 0.45, 0.475, 0.5),
    IN_FLIGHT: (1.5, 2, 3, 4, 6, 8, 12),
    ROOT: (1.5, 2, 3, 4, 6, 8, 10, 12, 16),
    RATE: (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8),
}


@dataclass(frozen=True)
class Candidate:
    """A setting, and its outcomes on several days."""

    scaler: Scaler
    days: tuple[Outcome, ...]

    @property
    def replica_hours(self) -> float:
        return float(np.mean([day.replica_hours for day in self.days]))

    @property
    def worst_hour_p95_s(self) -> float:
        return max(day.worst_hour_p95_s for day in self.days)

    @property
    def p95_s(self) -> float:
        return max(day.p95_s for day in self.days)

    def within(self, target_s: float) -> float:
        return min(day.within(target_s) for day in self.days)


def scalers(capacity: float) -> list[Scaler]:
    return [
        Scaler(signal, target * (capacity if signal == RATE else 1), behavior)
        for signal, targets in TARGETS.items()
        for target in targets
        for behavior in BEHAVIORS.values()
    ]


def days(
    replica: Replica, chosen: Sequence[Scaler], seeds: Sequence[int], start_s: float, cost: float = 1.0
) -> list[Candidate]:
    """Simulate several days, in processes side by side. The requests depend on `replica`, not on their `cost`."""
    table = tabulate(Replica(replica.fixed_s * cost, replica.each_s * cost, replica.largest_batch))
    with ProcessPoolExecutor(min(len(seeds), len(os.sched_getaffinity(0)))) as pool:
        tasks = [pool.submit(simulate, table, chosen, day(replica, seed), start_s) for seed in seeds]
        outcomes = [task.result() for task in tasks]
    return [Candidate(scaler, tuple(own)) for scaler, *own in zip(chosen, *outcomes, strict=True)]


def day(replica: Replica, seed: int) -> np.ndarray:
    return arrivals(PEAK * replica.capacity, seed)


def cheapest(candidates: Sequence[Candidate], signal: str, target_s: float) -> Candidate | None:
    """Return the cheapest setting of a signal whose p95 is within the target in every hour of every day."""
    good = [
        candidate
        for candidate in candidates
        if candidate.scaler.signal == signal and candidate.worst_hour_p95_s <= target_s
    ]
    return min(good, key=lambda candidate: candidate.replica_hours, default=None)


def run() -> None:
    measurement = measure_replica()
    replica = measurement.replica
    show_replica(measurement)
    with err.status("simulating days with every setting"):
        candidates = days(replica, scalers(replica.capacity), CHOSEN_ON, START_S)
        slow = days(replica, scalers(replica.capacity), CHOSEN_ON, SLOW_START_S)
        best = {signal: own.scaler for signal in TARGETS if (own := cheapest(candidates, signal, TARGET_S))}
        compared = days(replica, list(best.values()), COMPARED_ON, START_S)
        costlier = days(replica, list(best.values()), COMPARED_ON, START_S, COSTLIER)
    show_best(replica, compared, costlier)
    show_targets({START_S: candidates, SLOW_START_S: slow})
    write(measurement, candidates, compared)


def show_replica(measurement: Measurement) -> None:
    replica, machine = measurement.replica, host()
    columns = ("clients", "requests/s", "requests/execution", "CPU ms/execution", "p95 ms")
    rows = [
        (str(point.clients), f"{point.rate:.0f}", f"{point.batch:.1f}", f"{1000 * point.execution_s:.1f}",
         f"{point.p95_ms:.0f}")
        for point in measurement.points
    ]  # fmt: skip
    print_table(columns, rows)
    out.print(
        f"one core of {machine['cpu']}: an execution takes {1000 * replica.fixed_s:.2f} ms + "
        f"{1000 * replica.each_s:.2f} ms per request (error at most {measurement.largest_error:.0%}); capacity "
        f"{replica.capacity:.0f} requests/s; `make up` took {measurement.start_s:.0f} s\n"
    )


def show_best(replica: Replica, compared: Sequence[Candidate], costlier: Sequence[Candidate]) -> None:
    names = {behavior: name for name, behavior in BEHAVIORS.items()}
    cpu = next(candidate for candidate in compared if candidate.scaler.signal == CPU)
    columns = ("scaled on", "target", "hours", "of CPU's", "p95 ms", "worst", "in time", "costlier")
    rows = [
        (
            own.scaler.signal,
            f"{own.scaler.target:.4g}",
            f"{own.replica_hours:.0f}",
            f"{own.replica_hours / cpu.replica_hours:.2f}",
            f"{1000 * own.p95_s:.0f}",
            f"{1000 * own.worst_hour_p95_s:.0f}",
            f"{own.within(TARGET_S):.2%}",
            f"{1000 * slower.worst_hour_p95_s:.0f}",
        )
        for own, slower in zip(compared, costlier, strict=True)
    ]
    print_table(columns, rows, text_columns=columns[:1])
    for own in compared:
        out.print(f"{own.scaler.signal}: {names[own.scaler.behavior]}")
    ideal = np.mean([day(replica, seed).sum() for seed in COMPARED_ON]) / replica.capacity / HOUR_S
    out.print(
        f"each signal at its cheapest setting with p95 within {1000 * TARGET_S:.0f} ms in every hour of "
        f"{len(CHOSEN_ON)} days; figures of {len(COMPARED_ON)} other days\n"
        f"hours: replica hours per day; {ideal:.0f} if every replica were always full\n"
        f"worst: p95 of the worst hour, ms; costlier: the same if every request costs {COSTLIER:g} times as much; "
        f"in time: requests within {1000 * TARGET_S:.0f} ms\n"
    )


def show_targets(by_start: dict[int, Sequence[Candidate]]) -> None:
    rows = []
    for target_s in TARGETS_S:
        for start_s, candidates in by_start.items():
            best = [cheapest(candidates, signal, target_s) for signal in TARGETS]
            cells = [f"{own.replica_hours:.0f}" if own else "-" for own in best]
            rows.append([f"{1000 * target_s:.0f} ms", f"{start_s} s", *cells])
    print_table(("p95", "start", *TARGETS), rows)
    out.print(
        "replica hours of the cheapest setting with this p95 in every hour, if new replicas serve after that start, "
        "on the days on which it was chosen; -: no setting\n"
    )


# --- the report -------------------------------------------------------------------------------------------------------


def write(measurement: Measurement, candidates: Sequence[Candidate], compared: Sequence[Candidate]) -> None:
    reports = Settings.load().reports / "bench"
    reports.mkdir(parents=True, exist_ok=True)
    path = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-autoscaling"
    results = {
        "host": host(),
        "points": [asdict(point) for point in measurement.points],
        "replica": asdict(measurement.replica),
        "start_s": measurement.start_s,
        "chosen": [row(candidate) for candidate in candidates],
        "compared": [row(candidate) for candidate in compared],
    }
    path.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    written = [path.with_suffix(".json")]
    chart = partial(draw, measurement.replica, candidates, compared)
    for theme, palette in PALETTES.items():
        written.append(path.with_name(f"{path.name}-{theme}.svg"))
        written[-1].write_bytes(render(chart, (9.6, 7.2), palette, "svg"))
    for file in written:
        out.print(os.path.relpath(file))


def row(candidate: Candidate) -> dict[str, object]:
    return {
        **asdict(candidate.scaler),
        "replica_hours": candidate.replica_hours,
        "p95_s": candidate.p95_s,
        "worst_hour_p95_s": candidate.worst_hour_p95_s,
        "within_target": candidate.within(TARGET_S),
    }


def draw(
    replica: Replica, candidates: Sequence[Candidate], compared: Sequence[Candidate], figure: Figure, palette: Palette
) -> None:
    """Draw what each signal reads, the cost of each setting, and the replicas of a day."""
    colours = {CPU: palette.none, QUEUE: palette.instances, ROOT: palette.dynamic}
    plots = figure.subplot_mosaic([["signal", "cost"], ["day", "day"]], height_ratios=(1, 1.1))
    reading, cost, axes = plots["signal"], plots["cost"], plots["day"]
    table = tabulate(replica)
    percent = 100 * SHARES[1:]
    reading.plot(percent, table.busy[1:], color=colours[CPU])
    reading.plot(percent, (table.waiting[1:] / table.computing[1:]), color=colours[QUEUE])
    reading.plot(percent, np.cbrt(table.waiting[1:] + table.computing[1:]), color=colours[ROOT])
    reading.set(xlabel="load, % of the capacity", ylabel="signal", xlim=(0, 100), ylim=(0, 4))
    for signal, colour in colours.items():
        own = [candidate for candidate in candidates if candidate.scaler.signal == signal]
        latencies = [1000 * candidate.worst_hour_p95_s for candidate in own]
        cost.scatter([candidate.replica_hours for candidate in own], latencies, s=12, color=colour)
    cost.axhline(1000 * TARGET_S, color=palette.ink, linewidth=0.7, linestyle=":")
    cost.set(xlabel="replica hours per day", ylabel="p95 of the worst hour, ms", yscale="log", ylim=(10, 5000))
    cost.set_xlim(right=600)
    minutes = np.arange(0, 24 * 60) / 60
    needed = day(replica, COMPARED_ON[0])[::60] / replica.capacity
    axes.fill_between(minutes, needed, color=palette.faint, linewidth=0, label="always full")
    for candidate in compared:
        if candidate.scaler.signal in colours:
            axes.step(
                minutes, candidate.days[0].replicas, color=colours[candidate.scaler.signal], where="post", linewidth=1.2
            )
    for signal, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=4, label=signal)
    axes.set(xlabel="hour of the day", ylabel="replicas", xlim=(0, 24), xticks=range(0, 25, 3))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=4, handlelength=1.2, columnspacing=1.2)
