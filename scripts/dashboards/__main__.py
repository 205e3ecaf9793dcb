"""python -m scripts.dashboards [--check]: write the dashboards for Grafana, or say whether they are as committed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from scripts.common.cli import err, out, run
from scripts.common.settings import ROOT
from scripts.dashboards.definitions.comparison import batching
from scripts.dashboards.definitions.hardware import PROFILES, hardware
from scripts.dashboards.definitions.throughput import throughput

FOLDER = ROOT / "monitoring/grafana"


def files() -> dict[Path, str]:
    made = {"dashboards/throughput.json": throughput(), "dashboards/batching.json": batching()}
    made |= {f"hardware/{profile}/hardware.json": hardware(profile) for profile in PROFILES}
    return {FOLDER / name: text(builder) for name, builder in made.items()}


def text(builder) -> str:
    dashboard = builder.build()
    for i, panel in enumerate(dashboard.panels, 1):
        panel.id_val = i
    made = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    for annotation in made["annotations"]["list"]:
        # The SDK knows no field for either; by itself Grafana looks once a minute, and a window is shorter.
        annotation |= {"step": "1s", "titleFormat": "{{mode}}, round {{round}}"}
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    checking = parser.parse_args().check
    made = files()
    there = {path: path.read_text() for path in FOLDER.rglob("*.json")}
    changed = sorted(path for path in made.keys() | there.keys() if made.get(path) != there.get(path))
    for path in changed:
        name = path.relative_to(ROOT)
        if checking:
            err.print(f"{name} is not what scripts/dashboards makes: run `make dashboards-json`")
        elif path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path])
            out.print(f"written  {name}")
        else:
            path.unlink()
            out.print(f"removed  {name}")
    return 1 if checking and changed else 0


if __name__ == "__main__":
    run(main)
