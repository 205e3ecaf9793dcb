"""make locust: Locust's own web page, ready to start with the workload's users."""

from __future__ import annotations

import os
import sys

from loadtest.examples import Examples
from loadtest.workload import Workload
from scripts.common.cli import run
from scripts.common.ports import check_free
from scripts.common.settings import ROOT, Settings


def main() -> None:
    settings = Settings.load()
    check_free(settings, ["LOADTEST_METRICS_PORT"])
    workload = Workload.of(settings)
    Examples.of(settings, workload.texts)  # what is wrong with it is one sentence here, and a traceback in Locust
    command = [sys.executable, "-m", "locust", "--locustfile", "loadtest/locustfile.py"]
    command += ["--web-host", settings["BIND_ADDRESS"], "--web-port", str(settings.port("LOCUST_PORT"))]
    command += ["--users", str(workload.users), "--spawn-rate", str(workload.spawn_rate or workload.users)]
    os.chdir(ROOT)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    run(main)
