"""What a comparison leaves behind: results.json, requests.csv, the plots as PNG, and report.html with all of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

from markupsafe import Markup

from loadtest import charts as plots
from loadtest import statistics as results
from loadtest.host import host
from loadtest.switching import MODES
from loadtest.table import rows, sentence
from loadtest.telemetry import LAST_SCRAPE_S
from scripts.common.figures import LIGHT, pictures, render
from scripts.common.pages import page
from scripts.common.prometheus import Prometheus, PrometheusError
from scripts.common.settings import EXAMPLE, SECRETS, Settings, dotenv_values
from scripts.dashboards.render.draw import draw
from scripts.dashboards.render.evaluate import BATCHING, Range, load

LATEST = "latest"
WRITING = ".writing"
PLACES = ("REPORTS", "LOCAL_STATE", "MODEL_REPOSITORY", "BIND_ADDRESS", "GRAFANA_HOME", "RANGE", "UNTIL")


def sweep(reports: Path) -> None:
    """What a killed run left half-written."""
    for leftover in reports.glob(f".*{WRITING}"):
        shutil.rmtree(leftover, ignore_errors=True)


def results_of(comparison) -> dict:
    found = measured(comparison)
    return found | {"complaints": complaints(found)}


def measured(comparison) -> dict:
    windows = [w for pair in results.paired(comparison.windows) for w in pair]
    model = results.heaviest(windows)
    settings = comparison.settings
    workload = comparison.workload
    return {
        "run": comparison.run,
        "system": comparison.plan.system,
        "profile": settings["PROFILE"],
        "runtime": settings["RUNTIME"],
        "host": host(),
        "triton": {"version": comparison.server_version, "image": os.environ.get("TRITON_IMAGE_BUILT")},
        "settings": {
            "workload": workload.name,
            "protocol": comparison.job.protocol,
            "users": workload.users,
            "workers": comparison.workers,
            "spawn_rate": workload.spawn_rate,
            "wait": list(workload.wait),
            "max_batch": workload.max_batch,
            "rounds": comparison.plan.rounds,
            "window_s": comparison.plan.window_s,
            "warmup_s": comparison.plan.warmup_s,
            "seed": comparison.job.seed,
            comparison.examples.noun: examples(comparison),
            "min_ratio": comparison.least_ratio,
            "triton_cpus": settings["TRITON_CPUS"],
            "loadtest_cpus": settings["LOADTEST_CPUS"],
        },
        "command": command(settings),
        "model": model,
        "noun": comparison.examples.noun,
        "modes": {mode: results.summary([w for w in windows if w.mode == mode], model) for mode in MODES},
        "windows": [results.window_record(w, model) for w in comparison.windows],
        "verdict": results.verdict(windows, model),
        "stopped": comparison.stopped,
        "unproven": results.unproven(windows, model, comparison.examples.noun),
    }


def examples(comparison) -> dict:
    sent, workload = comparison.examples, comparison.workload
    if sent.noun == "texts":
        return {"file": workload.file, "count": len(workload.texts), "sha256": workload.sha256}
    return {"count": len(sent.requests), "sha256": sent.sha256}


def command(settings: Settings) -> str:
    """The command that makes this again: what differs from the defaults, but for secrets and where things lie."""
    defaults = dotenv_values(EXAMPLE)
    changed = [
        f"{name}={shlex.quote(value)}"
        for name, value in settings.items()
        if value != (defaults[name] or "") and not name.endswith(("_KEY", "_PORT")) and name not in (*PLACES, *SECRETS)
    ]
    return " ".join(["make loadtest", *changed])


def complaints(found: dict) -> list[str]:
    """Why the comparison does not count; empty if it does."""
    said = []
    if found["stopped"]:
        said.append(f"stopped early: {found['stopped']}; what was measured until then is kept")
    if found["unproven"]:
        said.append(found["unproven"] + likely_cause(found))
    if foreign := results.foreign(found):
        said.append(foreign)
    if failed := sum(window["failures"] for window in found["windows"]):
        said.append(f"{failed} request(s) failed; requests.csv has their errors")
    if found["verdict"]["client_bound"]:
        said.append(
            "Locust used a whole core, so the server was not the limit: more WORKERS, fewer USERS, or a heavier model"
        )
    least_ratio = found["settings"]["min_ratio"]
    if found["verdict"]["throughput_ratio"] < least_ratio:
        said.append(
            f"the throughput ratio {found['verdict']['throughput_ratio']:.2f} is below MIN_RATIO={least_ratio:g}"
        )
    return said


def likely_cause(found: dict) -> str:
    if found["modes"]["dynamic"]["mean_batch"] >= results.BATCHED_FROM:
        return ""
    if found["settings"]["users"] == 1:
        return ": one user never has two requests waiting; use more USERS"
    return (
        ". Likely causes: too few USERS for the model's instances, requests of unequal length on an input that "
        "does not say allow_ragged_batch, or a max_batch_size of 1 (docs/comparison.md)"
    )


def write(found: dict, comparison) -> Path:
    """reports/<UTC time>-<system>/, whole or not at all, and reports/latest pointing at it."""
    reports = comparison.settings.path("REPORTS")
    name = f"{comparison.run}-{found['system']}"
    work = reports / f".{name}{WRITING}"
    work.mkdir(parents=True)
    try:
        (work / "results.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
        results.write_csv(comparison.windows, work / "requests.csv")
        figures = plots.all_plots(found, comparison.windows)
        for title, plot in figures.items():
            (work / f"{title}.png").write_bytes(render(plot.draw, plot.size, LIGHT, "png"))
        (work / "report.html").write_text(html(found, figures, watched(comparison)), encoding="utf-8")
        target = reports / name
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    link = reports / f".{LATEST}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, reports / LATEST)
    return target


def watched(comparison) -> Markup:
    """The dashboard of this comparison, drawn of what Prometheus saw of it; a sentence where that cannot be."""
    last = comparison.windows[-1]
    start, end = comparison.windows[0].began_at, last.began_at + last.end - last.start + LAST_SCRAPE_S
    prometheus = Prometheus(comparison.settings.url("PROMETHEUS_PORT"))
    try:
        if comparison.run not in prometheus.label_values("run", "loadtest_measured_seconds_total", start, end):
            raise PrometheusError(f"the Prometheus on {prometheus.url} did not see this comparison")
        return draw(prometheus, load(BATCHING), Range(start, end), {"run": comparison.run})
    except Exception as error:  # whatever it is, the measurements are worth more
        return Markup("<p class=note>Not drawn: {}.</p>").format(error)


def html(found: dict, figures: dict[str, plots.Plot], dashboard: Markup) -> str:
    return page(
        "loadtest",
        "report.html.j2",
        found=found,
        sentence=sentence(found),
        rows=rows(found),
        pictures={title: pictures(plot.draw, plot.size) for title, plot in figures.items()},
        complaints=found["complaints"],
        dashboard=dashboard,
    )
