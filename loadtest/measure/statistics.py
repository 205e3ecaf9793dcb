"""The numbers of a comparison, computed from its windows alone, and what speaks against them."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.load.arrivals import GIVEN_UP, Sample
from loadtest.measure.verdicts import ENOUGH_ROUNDS, Cause, Code, busy_machine, judge
from loadtest.measure.windows import Counters, Window
from loadtest.server.generating import Generated
from loadtest.server.machine import is_busy
from triton_transformers.files import complete_file
from triton_transformers.settings import MODES

# The content of results.json, or a part of it (docs/loadtest.md).
Results = dict[str, Any]

# Cores that Locust's busiest process may use before it counts as the bottleneck: the limit of Locust's own warning.
CLIENT_LIMIT = 0.9
# Triton updates its counters one after the other, so a reading under load may fall between two of them.
COUNTER_SKEW = 2
# Mean batch, or tokens per step of a generating model, from which batching counts as proven.
BATCHED_FROM = 1.02
# Responses from which on a window shows the latency of a generating system, or a 95th percentile in an open loop.
ENOUGH_RESPONSES, ENOUGH_ARRIVALS = 4, 20
# The ratio in the headline of a comparison: throughput with dynamic batching / in the other mode, or in an open loop
# the 95th percentile in the other mode / with dynamic batching. Above 1, dynamic batching is better.
THROUGHPUT_RATIO, LATENCY_RATIO = "throughput_ratio", "latency_ratio"
# The share of the requests that thinking users can send at most, from which on they are the limit and not the server.
USERS_LIMIT = 0.8

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; for more, the last is a little too wide.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(degrees: int) -> float:
    return _T95[min(degrees, len(_T95)) - 1]


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the values' mean; at least two values are required."""
    return t95(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class ModelBatches:
    """Triton's figures for one model: batch sizes, and time per request."""

    mean_batch: float
    queue_ms: float
    compute_ms: float
    batches: dict[int, int]  # executions by batch size

    @classmethod
    def from_counters(cls, counters: Sequence[Counters]) -> ModelBatches:
        requests = sum(c.requests for c in counters) or 1
        executions = sum(c.executions for c in counters)
        batches: Counter[int] = Counter()
        for c in counters:
            batches.update(c.batches)
        return cls(
            mean_batch=sum(c.rows for c in counters) / executions if executions else 0.0,
            queue_ms=sum(c.queue_ns for c in counters) / requests / 1e6,
            compute_ms=sum(c.compute_ns for c in counters) / requests / 1e6,
            batches=dict(sorted(batches.items())),
        )


def score(window: Window) -> float:
    """Return what modes are compared by; more is better, and 0 is a window without responses.

    In an open loop that is the inverse of the 95th percentile, because the rate of arrivals sets the throughput.
    """
    if window.open_loop:
        milliseconds = latencies([window])
        return 1 / float(np.percentile(milliseconds, 95)) if milliseconds else 0.0
    return throughput(window)


def throughput(window: Window) -> float:
    """Return generated tokens per second, or requests per second of any other system.

    Texts that start together end together, so a short window has too many of their responses, or too few.
    """
    return window.generated.tokens_per_second if window.generated else requests_per_second(window)


def requests_per_second(window: Window) -> float:
    answered = window.open_loop.answered if window.open_loop else sum(not s.error for s in window.samples)
    return answered / (window.end - window.start)


def units_per_second(window: Window) -> float:
    """Return the images, seconds of sound or pages that were answered per second; requests of a system without a unit.

    In an open loop that is an estimate, from the mean of the requests that arrived in the window.
    """
    amounts = [s.amount for s in window.samples if not s.error]
    return requests_per_second(window) * float(np.mean(amounts)) if amounts else 0.0


def timed_samples(window: Window) -> list[Sample]:
    """Return the samples whose latency counts: a request that waited in vain for a user was not answered sooner."""
    return [s for s in window.samples if not s.error or s.error == GIVEN_UP]


def latencies(windows: Sequence[Window]) -> list[float]:
    """Return the latencies in milliseconds."""
    return [sample.latency_ms for window in windows for sample in timed_samples(window)]


def failures(window: Window) -> int:
    return sum(bool(s.error) for s in window.samples) - given_up(window)


def given_up(window: Window) -> int:
    """Return how many requests waited in vain for a free user, because the server was overloaded."""
    return sum(s.error == GIVEN_UP for s in window.samples)


def heaviest(windows: list[Window]) -> str:
    """Return the model that computes the most: the one whose batches matter."""
    total: Counter[str] = Counter()
    for window in windows:
        for name, counters in window.counters.items():
            total[name] += counters.compute_ns
    return total.most_common(1)[0][0]


def summary(windows: list[Window], model: str) -> Results:
    """Return the numbers of several windows of one mode.

    Throughput is the windows' geometric mean, and in an open loop the 95th percentile too, so that the quotient of two
    modes is the ratio of the verdict.
    """
    milliseconds = latencies(windows)
    p50, p95, p99 = np.percentile(milliseconds, (50, 95, 99)).tolist() if milliseconds else (None,) * 3
    if windows[0].open_loop and (mean := geometric_mean([score(window) for window in windows])):
        p95 = 1 / mean
    models = {name: ModelBatches.from_counters([w.counters[name] for w in windows]) for name in windows[0].counters}
    if model not in models:  # another format of the system has other models
        model = heaviest(windows)
    return {
        "throughput_rps": geometric_mean([requests_per_second(w) for w in windows]),
        "units_per_second": geometric_mean([units_per_second(w) for w in windows]),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "requests": sum(len(w.samples) for w in windows),
        "answered_by_triton": sum(w.counters[model].requests for w in windows),
        "failures": sum(map(failures, windows)),
        "model": model,
        "mean_batch": models[model].mean_batch,
        "queue_ms": sum(m.queue_ms for m in models.values()),
        "compute_ms": sum(m.compute_ms for m in models.values()),
        "cpu": float(np.mean([w.client_cpu for w in windows])),
        "other_cores": mean_known([w.other_cores for w in windows]),
        **generation([w.generated for w in windows if w.generated]),
        **streams(windows),
        **open_loop(windows),
        "models": {name: asdict(m) for name, m in models.items()},
    }


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def generation(windows: list[Generated]) -> Results:
    """Return the numbers of a system that generates text; nothing for any other system."""
    if not windows:
        return {}
    total = sum(windows[1:], windows[0])
    return {
        "tokens_per_second": geometric_mean([window.tokens_per_second for window in windows]),
        "generated_tokens": total.generated_tokens,
        "tokens_per_step": total.tokens_per_step,
        "first_token_ms": total.first_token_ms,
        "output_token_ms": total.output_token_ms,
    }


def streams(windows: list[Window]) -> Results:
    """Return the percentiles of the times to the first token and of each later one; nothing without streams."""
    samples = [sample for window in windows for sample in window.samples]
    times = {
        "first_token": [sample.first_token_ms for sample in samples if sample.first_token_ms is not None],
        "output_token": [sample.output_token_ms for sample in samples if sample.output_token_ms is not None],
    }
    return {
        f"{name}_p{percent}_ms": float(np.percentile(milliseconds, percent))
        for name, milliseconds in times.items()
        for percent in (50, 95)
        if milliseconds
    }


def open_loop(windows: list[Window]) -> Results:
    """Return the numbers of an open loop; nothing for a closed one."""
    loops = [window.open_loop for window in windows if window.open_loop]
    if not loops:
        return {}
    overloaded = sum(loop.overloaded for loop in loops)
    return {
        "overloaded": 2 * overloaded >= len(loops),
        "overloaded_windows": overloaded,
        "windows_kept_up": len(loops) - overloaded,
        "given_up": sum(map(given_up, windows)),
        "unanswered_at_start": sum(loop.unanswered_at_start for loop in loops),
        "unanswered_at_end": sum(loop.unanswered_at_end for loop in loops),
    }


def window_record(window: Window, model: str) -> Results:
    return {
        "mode": window.mode,
        "round": window.round,
        "start": window.start,
        "end": window.end,
        "began_at": window.began_at,
        "counted_s": window.counted_s,
        **{key: value for key, value in summary([window], model).items() if key != "models"},
    }


def verdict(windows: list[Window], model: str, formats: Sequence[str] = ()) -> Results:
    """Compare dynamic batching with each other mode, or each other format with the first one.

    The headline is the ratio of dynamic batching to the best other mode, or of the second format to the first.
    """
    rounds = complete_rounds(windows)
    modes = modes_of(windows, formats)
    headline = LATENCY_RATIO if windows[0].open_loop else THROUGHPUT_RATIO
    if formats:
        baseline, subject, *_ = modes
        ratios = {form: ratio(rounds, baseline, headline, form) for form in modes[1:]}
        compared = ratios[subject]
    else:
        subject, others = "dynamic", [mode for mode in modes if mode != "dynamic"]
        baseline = best(rounds, others)
        ratios = {mode: ratio(rounds, mode, headline) for mode in others}
        compared = ratios[baseline]
    figures = {mode: summary([by_mode[mode] for by_mode in rounds], model) for mode in (baseline, subject)}
    overloaded = [mode for mode in figures if figures[mode].get("overloaded")]
    return {
        **compared,
        "headline": headline,
        "subject": subject,
        "baseline": baseline,
        "p95_ratio": figures[subject]["p95_ms"] / figures[baseline]["p95_ms"],
        "ratios": ratios,
        "overloaded": overloaded,
        "client_bound": any(w.client_cpu >= CLIENT_LIMIT for w in windows),
    }


def best(rounds: list[dict[str, Window]], modes: list[str]) -> str:
    """Return the mode with the best score of all rounds together.

    As the baseline it never flatters dynamic batching: of two modes that are equally good, it is the one that chance
    favoured.
    """
    return max(modes, key=lambda mode: geometric_mean([score(by_mode[mode]) for by_mode in rounds]))


def ratio(
    rounds: list[dict[str, Window]], other: str, key: str = THROUGHPUT_RATIO, subject: str = "dynamic"
) -> Results:
    """Return the ratio of the scores, subject / other, over the rounds, with the interval that their spread allows."""
    logs = [math.log(score(by_mode[subject]) / score(by_mode[other])) for by_mode in rounds]
    mean = float(np.mean(logs))
    interval = None
    if len(logs) >= ENOUGH_ROUNDS:
        half = half_width(logs)
        interval = [math.exp(mean - half), math.exp(mean + half)]
    return {key: math.exp(mean), "ci95": interval, "rounds": [*map(math.exp, logs)]}


def modes_of(windows: list[Window], formats: Sequence[str] = ()) -> list[str]:
    """Return those of the modes, or of these formats, that were measured, in the order in which reports show them."""
    measured = {window.mode for window in windows}
    return [mode for mode in formats or MODES if mode in measured]


def complete_rounds(windows: list[Window]) -> list[dict[str, Window]]:
    """Return the windows by mode of each round in which every mode answered requests.

    A generating system may count tokens in a window in which no request succeeded: that window has no latency.
    """
    modes = {window.mode for window in windows}
    has_subject = "dynamic" in modes or not modes <= {*MODES}  # formats have no mode to be compared with all others
    if len(modes) < 2 or not has_subject:
        return []
    rounds: dict[int, dict[str, Window]] = {}
    for window in windows:
        if score(window) and latencies([window]):
            rounds.setdefault(window.round, {})[window.mode] = window
    return [by_mode for by_mode in rounds.values() if len(by_mode) == len(modes)]


def batching_error(windows: list[Window], model: str, noun: str = "texts", remedy: str = "") -> Cause | None:
    """Return how the counters contradict the modes, or nothing: only dynamic batching runs batches."""
    for window in windows:
        batches = window.mode == "dynamic"
        if window.generated:
            steps = window.generated.tokens_per_step
            if not batches and steps > BATCHED_FROM:
                return Cause(Code.RAN_TOGETHER, model=model, steps=steps)
            if batches and steps < BATCHED_FROM:
                return Cause(Code.RAN_ONE_AT_A_TIME, model=model, steps=steps, remedy=remedy)
            continue
        for name, counters in window.counters.items():
            if not batches and abs(counters.rows - counters.executions) > COUNTER_SKEW:
                mean = ModelBatches.from_counters([counters]).mean_batch
                return Cause(Code.FOREIGN_BATCHES, model=name, mean=mean, noun=noun)
        mean = ModelBatches.from_counters([window.counters[model]]).mean_batch
        if batches and mean < BATCHED_FROM:
            return Cause(Code.NO_BATCHES, model=model, mean=mean, noun=noun, remedy=remedy)
    return None


def more_batches(users: int, rate: float, generates: bool) -> str:
    """Return what makes dynamic batching run batches, if it ran none."""
    if rate:
        return "Set a higher RATE: requests arrive so seldom that none waits for another."
    if users == 1:
        return "Set more USERS: one user never has two requests waiting."
    if generates:
        return "Set a max_batch above 1, or ask for texts of more than one token (docs/loadtest.md)."
    return "Set more USERS than the model's instances answer at once (docs/loadtest.md has the other causes)."


def judged(results: Results, batching: Cause | None) -> Results:
    """Return the verdict of a comparison: its numbers, and what they prove."""
    verdict: Results = results["verdict"]
    settings, windows = results["settings"], results["windows"]
    rate, machine = settings["rate"], results["host"]["cores"]
    causes = [batching, foreign_requests(results), few_responses(results), thinking_users(results)]
    if results["stopped"]:
        causes.append(Cause(Code.STOPPED, reason=results["stopped"]))
    if len(verdict["overloaded"]) > 1:  # then all latencies grow with the window
        causes.append(Cause(Code.NEVER_KEEPS_UP, rate=rate))
    if failed := sum(window["failures"] for window in windows):
        causes.append(Cause(Code.FAILED_REQUESTS, failed=failed, file="requests.csv"))
    taken = [window["other_cores"] for window in windows if is_busy(window["other_cores"], machine)]
    causes.append(busy_machine(max(taken, default=None), machine, f"in {len(taken)} of {len(windows)} windows "))
    if verdict["client_bound"]:
        effect = "a part of the latency is its own" if rate else "the server was not the limit"
        causes.append(Cause(Code.LOCUST_BOUND, effect=effect))
    more = f"Set ROUNDS={2 * settings['rounds']}."
    if verdict["overloaded"]:  # the latency of an overloaded mode depends on how long the windows are
        if (rounds := len(verdict["rounds"])) < ENOUGH_ROUNDS:
            causes.append(Cause(Code.FEW_ROUNDS, rounds=rounds, more=more))
        if settings["min_ratio"] and (subject := verdict["subject"]) in verdict["overloaded"]:
            minimum = settings["min_ratio"]
            causes.append(Cause(Code.SUBJECT_OVERLOADED, mode=subject, rate=rate, minimum=minimum))
        return verdict | judge(causes)
    number = verdict[verdict["headline"]]
    # Another mode may be the best of the others, if the ratio to it is not clear of 1.
    others = {} if results["formats"] else verdict["ratios"]
    unclear = {mode: other["ci95"] for mode, other in others.items() if other["ci95"] and other["ci95"][0] <= 1}
    if unclear and verdict["ci95"][0] > 1:
        mode, (low, high) = unclear.popitem()
        ratios = f"the 95 % interval of the ratio to {mode} is"
        causes.append(Cause(Code.ROUNDS_DISAGREE, ratios=ratios, low=low, high=high, more=more))
    return verdict | judge(causes, number, verdict["rounds"], verdict["ci95"], settings["min_ratio"], more)


def thinking_users(results: Results) -> Cause | None:
    """Return the cause if users who think between their requests were the limit in both modes of the ratio."""
    settings, verdict = results["settings"], results["verdict"]
    thinking_s = sum(settings["wait"]) / 2
    if settings["rate"] or not thinking_s:
        return None
    limit = settings["users"] / thinking_s
    slowest = min(results["modes"][verdict[key]]["throughput_rps"] for key in ("subject", "baseline"))
    if slowest < USERS_LIMIT * limit:
        return None
    return Cause(Code.THINKING_USERS, users=settings["users"], limit=limit, share=100 * slowest / limit)


def foreign_requests(results: Results) -> Cause | None:
    """Return the cause if Triton answered more requests than Locust sent, or nothing.

    Requests that cross a window's edges do not count as more.
    """
    windows = results["windows"]
    answered, sent = (sum(window[key] for window in windows) for key in ("answered_by_triton", "requests"))
    # Locust's users go on while the counters are read, which takes seconds on a busy machine; an open loop does not.
    expected = sent
    if not results["settings"]["rate"]:
        expected = sum(w["requests"] * w["counted_s"] / (w["end"] - w["start"]) for w in windows)
    crossing = sum(window.get("unanswered_at_start", 2 * results["settings"]["users"]) for window in windows)
    if answered <= 1.25 * expected + crossing:
        return None
    return Cause(Code.FOREIGN_REQUESTS, answered=answered, sent=sent)


def few_responses(results: Results) -> Cause | None:
    """Return the cause if a window is too short for the latency of a generating system or an open loop."""
    rate = results["settings"]["rate"]
    enough = ENOUGH_ARRIVALS if rate else ENOUGH_RESPONSES if results["generates"] else 0
    window = min(results["windows"], key=lambda window: window["requests"])
    if window["requests"] >= enough:
        return None
    return Cause(Code.FEW_RESPONSES, mode=window["mode"], requests=window["requests"])


def geometric_mean(values: list[float]) -> float:
    return math.exp(float(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def write_csv(windows: list[Window], path: Path) -> None:
    with complete_file(path) as temporary, temporary.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["answered_at_s", "latency_ms", "mode", "round", "error"])
        for window in windows:
            rows.writerows(
                [f"{s.at:.6f}", f"{s.latency_ms:.3f}", window.mode, window.round, s.error] for s in window.samples
            )
