"""make dashboards: the dashboards as one self-contained page, for where there is no Grafana, and to keep or to send."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

from scripts.common.cli import err, out, run
from scripts.common.files import write_atomically
from scripts.common.http import answers
from scripts.common.pages import page
from scripts.common.prometheus import Prometheus
from scripts.common.settings import PROFILES, Settings, UserError
from scripts.dashboards.render.draw import draw
from scripts.dashboards.render.evaluate import Range, dashboards, since

LONGEST_S = 31 * 86400


def main() -> None:
    settings = Settings.load()
    shown = chosen_range(settings)
    start, end = (f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S}" for when in (shown.start, shown.end))
    profile = settings.choice("PROFILE", PROFILES)
    prometheus = Prometheus(settings.url("PROMETHEUS_PORT"))
    if not answers(f"{prometheus.url}/-/ready"):
        raise UserError(f"no Prometheus answers on {prometheus.url}: `make up` starts the stack")
    if not prometheus.over("up", shown.start, shown.end, shown.step):
        raise UserError(f"Prometheus has nothing of the time from {start} to {end} UTC")
    with err.status("asking Prometheus and drawing"):
        drawn = [
            {key: each[key] for key in ("uid", "title", "description")} | {"html": draw(prometheus, each, shown)}
            for each in dashboards(profile)
        ]
    folder = settings.path("REPORTS")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dashboards.html"
    write_atomically(path, page("scripts.dashboards.render", "page.html.j2", dashboards=drawn, start=start, end=end))
    out.print(f"dashboards  {os.path.relpath(path)}  ({start} to {end} UTC)")


def chosen_range(settings: Settings) -> Range:
    length = since(settings["RANGE"])
    if length > LONGEST_S:
        raise UserError(f"RANGE={settings['RANGE']}: at most {LONGEST_S // 86400}d")
    if not settings["UNTIL"]:
        return Range(time.time() - length, time.time())
    try:
        until = datetime.fromisoformat(settings["UNTIL"])
        end = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        end = 0.0
    if end < length:
        raise UserError(f"UNTIL={settings['UNTIL']}: a time as in 2026-11-21T18:30:00Z")
    return Range(end - length, end)


if __name__ == "__main__":
    run(main)
