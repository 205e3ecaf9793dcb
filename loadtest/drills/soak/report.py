"""The results of a soak: soak.json, the rows of its table, and why it fails."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.drills.clients import ManyClients, Pace
from loadtest.drills.harness import counted
from loadtest.drills.soak.series import ERROR_RATE, SAMPLE_S, SHORT, Series, first_judged, verdicts
from loadtest.measure.verdicts import PROVEN, Cause, Code, sentence
from loadtest.server.machine import host
from triton_transformers.files import complete_folder, write_json

# The content of soak.json.
Results = dict[str, Any]

LATEST = "latest-soak"
COLUMNS = ("", "start", "end", "slope per hour", "interval", "verdict")


def command(pace: Pace, minutes: float) -> str:
    """Return the command that repeats the soak."""
    return f"make drill SOAK={minutes:g} USERS={pace.clients} WAIT={pace.wait[0]:g},{pace.wait[1]:g} SEED={pace.seed}"


def results_of(
    pace: Pace, minutes: float, clients: ManyClients, series: Sequence[Series], seconds: float, began: datetime
) -> Results:
    """Return the content of soak.json, with a verdict on each series.

    `minutes` is how long the soak was to last, and `seconds` is when the last sample was taken.
    """
    return {
        "run": f"{began:%Y%m%dT%H%M%SZ}",
        "command": command(pace, minutes),
        "host": host(),
        "minutes": seconds / 60,
        "clients": pace.clients,
        "wait_s": pace.wait,
        "sample_s": SAMPLE_S,
        "judged_from_s": (first_judged(len(series[0].values)) + 1) * SAMPLE_S,
        "error_rate": ERROR_RATE,
        "requests": {"good": counted(clients.outcomes), "bad": counted(clients.refusals)},
        "good_by_route": dict(Counter(outcome.route for outcome in clients.outcomes)),
        "series": [verdict.as_json() for verdict in verdicts(series)],
    }


def causes(results: Results) -> list[Cause]:
    """Return what the soak does not prove."""
    reasons = [Cause(Code.PROBLEM, problem=problem) for problem in results["problems"]]
    if results["stopped"]:
        reasons.append(Cause(Code.STOPPED, reason=results["stopped"]))
    if failing := [series["name"] for series in results["series"] if series["fails"]]:
        reasons.append(Cause(Code.NOT_FLAT, series=", ".join(failing)))
    for kind, figures in results["requests"].items():
        wrong = {
            "failed": figures["failed_gateway"] + figures["failed_direct"],
            "wrong": figures["wrong"],
            "lost": figures["lost"],
        }
        if any(wrong.values()):
            numbers = ", ".join(f"{count} {name}" for name, count in wrong.items() if count)
            errors = sorted(figures["errors"].items(), key=lambda item: -item[1])[:3]
            messages = "; ".join(f"{count} x {text}" for text, count in errors)
            requests = figures["requests"]
            reasons.append(Cause(Code.WRONG_ANSWERS, requests=requests, kind=kind, numbers=numbers, messages=messages))
    if not results["requests"]["good"]["requests"]:
        reasons.append(Cause(Code.NOTHING_SENT))
    if any(series["outcome"] == SHORT for series in results["series"]):
        reasons.append(Cause(Code.TOO_SHORT))
    return reasons


def headline(results: Results) -> str:
    good, bad = (results["requests"][kind]["requests"] for kind in ("good", "bad"))
    flat = ", and every series is flat" if results["verdict"]["word"] == PROVEN else ""
    sent = f"{results['clients']} clients sent {good:,} requests and {bad:,} bad ones{flat}."
    return sentence(results["verdict"], f"in {results['minutes']:.3g} minutes, {sent}")


def number(value: float | None) -> str:
    """Return a figure with three digits; from 100 on with all digits before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}') + 0.0:g}"  # the sum turns -0 into 0


def cells(series: Results) -> list[str]:
    """Return a series' row of the table."""
    interval = series["interval_per_hour"]
    unit = f" {series['unit']}" if series["unit"] else ""
    return [
        series["name"],
        *(f"{number(series[key])}{unit}" if series[key] is not None else "" for key in ("start", "end")),
        number(series["slope_per_hour"]),
        f"{number(interval[0])} to {number(interval[1])}" if interval else "",
        series["outcome"],
    ]


def write(results: Results, reports: Path) -> str:
    """Write reports/<UTC time>-soak/soak.json, and return its path from the current folder."""
    target = reports / f"{results['run']}-soak"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "soak.json")
    return os.path.relpath(target / "soak.json")
