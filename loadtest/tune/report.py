"""The files of a search's report: tune.json, the winner's files, the charts as PNG, and tune.html with all of it."""

from __future__ import annotations

from pathlib import Path

from loadtest.statistics import Results
from loadtest.tune import table
from loadtest.tune.charts import all_charts
from loadtest.tune.goal import LATEST, WINNER
from triton_transformers.figures import PALETTES, Chart, images, write_charts
from triton_transformers.files import complete_folder, write_atomically, write_json
from triton_transformers.pages import page


def write(result: Results, reports: Path) -> Path:
    """Write reports/<UTC time>-<system>-tune/, and point reports/latest-tune at it if it is complete."""
    target = reports / f"{result['run']}-{result['system']}-tune"
    with complete_folder(target, LATEST) as work:
        write_json(result, work / "tune.json")
        if result["outcome"] == "better":
            for name, text in result["files"].items():
                (file := work / WINNER / name).parent.mkdir(parents=True)
                write_atomically(file, text)
        charts = all_charts(result)
        write_charts(charts, work)
        write_atomically(work / "tune.html", html(result, charts))
    return target


def html(result: Results, charts: dict[str, Chart]) -> str:
    return page(
        "loadtest",
        "tune/tune.html.j2",
        results=result,
        sentence=table.sentence(result),
        columns=table.columns(result),
        rows=table.rows(result),
        confirmation=len(table.confirmation_rows(result)),
        failures=table.failures(result),
        notes=table.notes(result),
        palettes=PALETTES,
        images=images(charts),
    )
