"""Write the dashboards for Grafana, or check the committed ones: python -m monitoring [--check]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.definitions.comparison import batching
from monitoring.definitions.hardware import PROFILES, hardware
from monitoring.definitions.throughput import throughput
from triton_transformers.cli import err, out, run
from triton_transformers.settings import ROOT

FOLDER = ROOT / "monitoring/grafana"


def files() -> dict[Path, str]:
    dashboards = {"dashboards/throughput.json": throughput(), "dashboards/batching.json": batching()}
    dashboards |= {f"hardware/{profile}/hardware.json": hardware(profile) for profile in PROFILES}
    return {FOLDER / name: text(builder) for name, builder in dashboards.items()}


def text(builder: Any) -> str:
    dashboard = builder.build()
    panels = [panel for outer in dashboard.panels for panel in (outer, *(getattr(outer, "panels", None) or ()))]
    for i, panel in enumerate(panels, 1):
        panel.id_val = i
    written = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    for annotation in written["annotations"]["list"]:
        # The SDK has no field for either. Grafana's own step is a minute, and a window is shorter.
        annotation |= {"step": "1s", "titleFormat": "{{mode}}, round {{round}}"}
    return json.dumps(written, indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    checking = parser.parse_args().check
    defined = files()
    committed = {path: path.read_text() for path in FOLDER.rglob("*.json")}
    changed = sorted(path for path in defined.keys() | committed.keys() if defined.get(path) != committed.get(path))
    for path in changed:
        name = path.relative_to(ROOT)
        if checking:
            err.print(f"{name} differs from its definition. Run `make dashboards-json`")
        elif path in defined:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(defined[path])
            out.print(f"written  {name}")
        else:
            path.unlink()
            out.print(f"removed  {name}")
    return 1 if checking and changed else 0


if __name__ == "__main__":
    run(main)
