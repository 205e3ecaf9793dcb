"""Draw the dashboards as one self-contained page (make dashboards): without Grafana, or to keep and send."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

from monitoring.drawing.draw import draw
from monitoring.drawing.evaluate import Evaluator, Range, dashboards, since
from triton_transformers.cli import err, out, run
from triton_transformers.files import write_atomically
from triton_transformers.http import answers
from triton_transformers.pages import page
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import Settings, UserError

MAX_RANGE_S = 31 * 86400


def main() -> None:
    settings = Settings.load()
    shown = chosen_range(settings)
    start, end = (f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S}" for when in (shown.start, shown.end))
    profile = settings.profile
    prometheus = Prometheus(settings.url("PROMETHEUS_PORT"))
    if not answers(f"{prometheus.url}/-/ready"):
        raise UserError(f"no Prometheus answers on {prometheus.url}. Start the stack: `make up`")
    check_ours(prometheus, settings)
    if not prometheus.over("up", shown.start, shown.end, shown.step):
        raise UserError(
            f"Prometheus has no samples from {start} to {end} UTC. Set RANGE and UNTIL to a time when the stack was up"
        )
    with err.status("asking Prometheus and drawing"):
        drawn = [
            {key: dashboard[key] for key in ("uid", "title", "description")}
            | {"html": draw(prometheus, dashboard, shown)}
            for dashboard in dashboards(profile)
        ]
    folder = settings.reports
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dashboards.html"
    first = dashboards(profile)[0]
    shaded = {colour for colour, _, _ in Evaluator(prometheus, first, shown).regions()}
    shades = [window for window in first["annotations"]["list"] if window["iconColor"] in shaded]
    html = page(__package__, "page.html.j2", dashboards=drawn, shades=shades, start=start, end=end)
    write_atomically(path, html)
    out.print(f"dashboards  {os.path.relpath(path)}  ({start} to {end} UTC)")


def check_ours(prometheus: Prometheus, settings: Settings) -> None:
    """Raise UserError if the Prometheus on our port scrapes another stack."""
    address = settings.address()
    if prometheus.url != f"http://{address}:{settings.prometheus_port}":
        return  # in Compose's network, where there is no other
    target = f"{address}:{settings.triton_metrics_port}"
    scraped = sorted({series.labels.get("instance", "") for series in prometheus.at('up{job="triton"}', time.time())})
    if target not in scraped:
        raise UserError(
            f"the Prometheus on {prometheus.url} belongs to another stack: it scrapes "
            f"{', '.join(scraped) or 'no Triton'}, not {target}. Set PROMETHEUS_PORT in .env to a free port and run "
            "`make up`"
        )


def chosen_range(settings: Settings) -> Range:
    length = since(settings.range)
    if length > MAX_RANGE_S:
        raise UserError(f"RANGE={settings.range}: must be at most {MAX_RANGE_S // 86400}d")
    if not settings.until:
        return Range(time.time() - length, time.time())
    try:
        until = datetime.fromisoformat(settings.until)
        end = (until if until.tzinfo else until.replace(tzinfo=UTC)).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        end = 0.0
    if end < length:
        raise UserError(f"UNTIL={settings.until}: must be a time such as 2026-11-21T18:30:00Z")
    return Range(end - length, end)


if __name__ == "__main__":
    run(main)
