"""The files of a report: results.json, requests.csv, the figures as PNG, and report.html with all of it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from markupsafe import Markup

from loadtest.charts import all_charts
from loadtest.statistics import Results, write_csv
from loadtest.table import columns, explanation, left_out, rows, sentence
from loadtest.telemetry import LAST_SCRAPE_S
from loadtest.windows import Window
from triton_transformers.dashboards.render.draw import draw
from triton_transformers.dashboards.render.evaluate import BATCHING, Range, load
from triton_transformers.figures import PALETTES, Chart, images, write_charts
from triton_transformers.files import WRITING, complete_folder, write_atomically, write_json
from triton_transformers.pages import page
from triton_transformers.prometheus import Prometheus, PrometheusError
from triton_transformers.settings import DEFAULTS, TABLE, Settings

LATEST = "latest"


def shown(settings: Settings) -> dict[str, str]:
    return {name: settings[name] for name, row in TABLE.items() if row.shown}


def command(settings: Settings, target: str = "loadtest") -> str:
    """Return the command that repeats a measurement: the shown settings that differ from their defaults."""
    changed = [f"{name}={shlex.quote(value)}" for name, value in shown(settings).items() if value != DEFAULTS[name]]
    return " ".join([f"make {target}", *changed])


def remove_leftovers(reports: Path) -> None:
    """Delete the half-written reports of comparisons that were killed."""
    for leftover in reports.glob(f".*{WRITING}"):
        shutil.rmtree(leftover, ignore_errors=True)


def write(results: Results, windows: list[Window], reports: Path, dashboard: Markup) -> Path:
    """Write reports/<UTC time>-<system>/, and point reports/latest at it if it is complete."""
    target = reports / f"{results['run']}-{results['system']}"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "results.json")
        write_csv(windows, work / "requests.csv")
        charts = all_charts(results, windows)
        write_charts(charts, work)
        write_atomically(work / "report.html", html(results, charts, dashboard))
    return target


def html(results: Results, charts: dict[str, Chart], dashboard: Markup) -> str:
    return page(
        "loadtest",
        "report.html.j2",
        results=results,
        sentence=sentence(results),
        columns=columns(results),
        rows=rows(results),
        explanation=" ".join([explanation(results), *left_out(results)]),
        palettes=PALETTES,
        images=images(charts),
        dashboard=dashboard,
    )


def drawn_dashboard(prometheus: Prometheus, run: str, windows: list[Window]) -> Markup:
    """Return the charts that Prometheus recorded of this comparison, or the reason why there are none."""
    last = windows[-1]
    start, end = windows[0].began_at, last.began_at + last.end - last.start + LAST_SCRAPE_S
    try:
        if run not in prometheus.label_values("run", "loadtest_measured_seconds_total", start, end):
            raise PrometheusError(f"the Prometheus on {prometheus.url} did not record this comparison")
        return draw(prometheus, charts_only(load(BATCHING)), Range(start, end), {"run": run})
    except Exception as error:  # the measurements matter more than any error here
        return Markup("<p class=note>Not drawn: {}.</p>").format(error)


def charts_only(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard's charts over time, two per row, or three in the first row if their number is odd.

    Its other panels repeat the report's numbers, computed differently: Prometheus divides the requests of all windows
    by their seconds, where the report takes the mean over rounds.
    """
    panels = [p for p in dashboard["panels"] if p["type"] == "timeseries" and p["title"] != "Requests/s"]
    first = 3 if len(panels) % 2 else 2
    places = [{"x": n * 24 // first, "y": 0, "w": 24 // first, "h": 8} for n in range(first)]
    places += [{"x": n % 2 * 12, "y": (n // 2 + 1) * 8, "w": 12, "h": 8} for n in range(len(panels) - first)]
    return dashboard | {"panels": [p | {"gridPos": place} for p, place in zip(panels, places, strict=True)]}
