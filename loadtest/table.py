"""The verdict as a sentence and as a table, the same on the terminal and in the report."""

from __future__ import annotations

import os

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.other_programs import is_busy
from loadtest.statistics import NARROW, NOT_PROVEN, THROUGHPUT_RATIO, Results, heaviest, summary, throughput
from loadtest.windows import Window

WINDOWS_HEADER = f"{'round':>5}  {'mode':<10}{'requests/s':>11}{'p95 ms':>9}{'batch':>8}{'failed':>8}"
# The same for a system that generates text.
GENERATING_HEADER = f"{'round':>5}  {'mode':<10}{'tokens/s':>11}{'p95 ms':>9}{'together':>10}{'failed':>8}"


def label(mode: str, results: Results) -> str:
    """Return a mode's name as tables and charts show it."""
    if results["generates"]:
        return {"none": "one at a time", "dynamic": "together"}[mode]
    instances = f"{results['triton']['cores']} instances"
    return {"none": "no batching", "instances": instances, "dynamic": "dynamic batching"}[mode]


def sentence(results: Results) -> str:
    return open_loop_sentence(results) if results["settings"]["rate"] else closed_loop_sentence(results)


def closed_loop_sentence(results: Results) -> str:
    verdict, users, system = results["verdict"], results["settings"]["users"], results["system"]
    interval = verdict["ci95"]
    load = f"with {users} user{'s' if users > 1 else ''}"
    generates = results["generates"]
    batching, answer = ("batching", "generate") if generates else ("dynamic batching", "answer")
    times = f"{verdict[THROUGHPUT_RATIO]:.2f} times as many {'tokens' if generates else 'requests'} of {system}"
    baseline = f"the same server with {without_batching(results)}"
    if interval is None or verdict["outcome"] == NOT_PROVEN:
        return not_proven(f"{load}, {batching} {past(answer)} {times} as {baseline}", interval)
    low, high = (f"{bound:.2f}" for bound in interval)
    dynamic, other = (results["modes"][mode]["p95_ms"] for mode in ("dynamic", verdict["baseline"]))
    return (
        f"{load.capitalize()}, {batching} {answer}s {times} (95 % interval {low} to {high}) as {baseline}. "
        f"p95: {dynamic:.0f} ms instead of {other:.0f} ms."
    )


def open_loop_sentence(results: Results) -> str:
    verdict, modes, system = results["verdict"], results["modes"], results["system"]
    overloaded, interval = verdict["overloaded"], verdict["ci95"]
    load = f"at {results['settings']['rate']:g} requests per second"
    batching, baseline = "batching" if results["generates"] else "dynamic batching", without_batching(results)
    dynamic, other = (f"{modes[mode]['p95_ms']:.0f} ms" for mode in ("dynamic", verdict["baseline"]))
    grows = "the latency grows as long as the load lasts"
    if len(overloaded) == 2:
        return f"Not proven: {load}, the server does not keep up, neither with {batching} nor with {baseline}: {grows}."
    ratio = f"{verdict[verdict['headline']]:.2f} times as fast"
    if interval is None or verdict["outcome"] == NOT_PROVEN:
        return not_proven(f"{load}, {batching} was {ratio} as with {baseline} (95th percentile)", interval)
    low, high = (f"{bound:.2f}" for bound in interval)
    if "dynamic" in overloaded:
        return (
            f"{load.capitalize()}, with {batching} the server does not keep up: {grows}. With {baseline}, it answers "
            f"95 % of the requests of {system} within {other}."
        )
    answers = f"{load.capitalize()}, {batching} answers 95 % of the requests of {system} within {dynamic}"
    if overloaded:
        return f"{answers}. With {baseline}, the server does not keep up: {grows}."
    return f"{answers} instead of {other} with {baseline}: {ratio} (95 % interval {low} to {high})."


def not_proven(claim: str, interval: list[float] | None) -> str:
    """Return the sentence for a ratio that has no interval, or one that contains 1."""
    if interval is None:
        return f"Not proven: {claim} in the only complete round, and one round has no interval."
    low, high = interval
    return f"Not proven: {claim}, but the 95 % interval, {low:.2f} to {high:.2f}, contains 1. {NARROW}"


def past(verb: str) -> str:
    return verb.removesuffix("e") + "ed"


def without_batching(results: Results) -> str:
    """Return how the server was configured in the baseline, and that it is the best of several modes."""
    if results["generates"]:
        return "one text at a time"
    baseline = "dynamic batching off"
    if results["verdict"]["baseline"] == "instances":
        baseline += f" and one instance for each of its {results['triton']['cores']} cores"
    return baseline + (", the best of the other modes" if len(results["modes"]) > 2 else "")


def explanation(results: Results) -> str:
    """Return what the modes are, and what they have in common."""
    if results["generates"]:
        return (
            "Every mode runs on this server with the same model, users and texts. One at a time: the model generates "
            "one text after the other. Together: as configured, a text runs together with the others that are there."
        )
    cores, modes = results["triton"]["cores"], results["modes"]
    parts = [
        f"Every mode runs on this server with the same models, users and {results['noun']}.",
        "No batching: the configured instances run each request by itself." if "none" in modes else "",
        f"{cores} instances: the same with one instance for each core of the server, with one thread each."
        if "instances" in modes
        else "",
        "Dynamic batching: the configured instances run requests that wait together.",
    ]
    return " ".join(filter(None, parts))


def left_out(results: Results) -> list[str]:
    """Return a sentence for each mode that was not measured."""
    return [f"The mode {mode} is left out: {reason}." for mode, reason in results["left_out"].items()]


def columns(results: Results) -> list[str]:
    """Return the header of the table: a column for each mode, and the ratio to the baseline."""
    dynamic = "together" if results["generates"] else "dynamic"
    modes = [label(mode, results) for mode in results["modes"]]
    return ["", *modes, f"{dynamic} / {label(results['verdict']['baseline'], results)}"]


def rows(results: Results) -> list[list[str]]:
    """Return a row for each number: its label, its value in each mode, its ratio. results.json has every number."""
    modes, verdict = results["modes"], results["verdict"]

    def row(name: str, key: str, form: str, compare: bool = True) -> list[str]:
        values = [figures[key] for figures in modes.values()]
        dynamic, other = modes["dynamic"][key], modes[verdict["baseline"]][key]
        shown = ["-" if value is None else format(value, form) for value in values]
        ratio = dynamic / other if compare and dynamic and other else 0.0
        return [name, *shown, f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}" if ratio else ""]

    # The latency of an overloaded mode depends on how long the windows are, and so would its ratio.
    comparable = not verdict["overloaded"]
    p50, p95, p99 = (row(f"latency {p}, ms", f"{p}_ms", ".0f", comparable) for p in ("p50", "p95", "p99"))
    locust = [
        row("Locust, cores", "cpu", ".2f", compare=False),
        row("other programs, cores", "other_cores", ".2f", compare=False),
        row("requests measured", "requests", "d", compare=False),
        row("failed", "failures", "d", compare=False),
    ]
    ratios = [
        {} if "dynamic" in verdict["overloaded"] or figures.get("overloaded") else verdict["ratios"].get(mode, {})
        for mode, figures in modes.items()
    ]
    of_what = "p95, this mode / dynamic" if results["settings"]["rate"] else "dynamic / this mode"
    own_ratio = [of_what, *(f"{r[verdict['headline']]:.2f}" if r else "" for r in ratios), ""]
    own_interval = ["  95 % interval", *("-".join(f"{bound:.2f}" for bound in r.get("ci95") or ()) for r in ratios), ""]
    own_ratios = [own_ratio, own_interval] if len(modes) > 2 else []
    requests = row("requests/s", "throughput_rps", ".2f" if results["generates"] else ".1f")
    latency = [p50, p95, p99]
    if results["settings"]["rate"]:
        requests[0] = "answered, requests/s"
        kept_up = [
            f"{figures['windows_kept_up']} of {figures['windows_kept_up'] + figures['overloaded_windows']}"
            for figures in modes.values()
        ]
        first = [p95, *own_ratios, ["windows that kept up", *kept_up, ""], requests]
        latency = [p50, p99]
        locust.append(row("not sent, all users busy", "given_up", "d", compare=False))
    elif results["generates"]:
        first = [row("tokens/s", "tokens_per_second", ".1f"), requests]
    else:
        first = [requests, *own_ratios]
    if results["generates"]:
        return [
            *first,
            row("time to first token, ms", "first_token_ms", ".0f"),
            row("time per output token, ms", "output_token_ms", ".1f"),
            *latency,
            row("texts together (tokens per step)", "tokens_per_step", ".2f"),
            *locust,
        ]
    return [
        *first,
        *latency,
        row(f"{results['noun']} per batch ({results['model']})", "mean_batch", ".2f"),
        row("waiting in Triton's queues, ms", "queue_ms", ".1f"),
        row("computing, ms", "compute_ms", ".1f"),
        *locust,
    ]


def print_table(results: Results, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns(results)):
        # One word per line, so that the table of three modes fits a terminal of 80 columns.
        table.add_column(column.replace(" ", "\n", 1), justify="right" if number else "left", vertical="bottom")
    for row in rows(results):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(f"[bold]{escape(sentence(results))}[/]")
    for line in [explanation(results), *left_out(results)]:
        console.print(escape(line))


def window_line(window: Window) -> str:
    """Return the line of a window under WINDOWS_HEADER or GENERATING_HEADER."""
    numbers = summary([window], heaviest([window]))
    p95 = "-" if numbers["p95_ms"] is None else f"{numbers['p95_ms']:.0f}"
    together = f"{numbers['tokens_per_step']:>10.2f}" if window.generated else f"{numbers['mean_batch']:>8.2f}"
    overloaded = "  does not keep up" if numbers.get("overloaded") else ""
    line = f"{window.round:>5}  {window.mode:<10}{throughput(window):>11.1f}{p95:>9}{together}{numbers['failures']:>8}"
    others = f"  others took {window.other_cores:.1f} cores" if is_busy(window.other_cores, os.cpu_count() or 1) else ""
    return line + overloaded + others
