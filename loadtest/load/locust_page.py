"""make locust: start Locust's web page, with the number of users that the workload has."""

from __future__ import annotations

import os
import sys

from loadtest.load.examples import Examples
from loadtest.load.workload import Workload
from triton_transformers.cli import run
from triton_transformers.ports import check_free
from triton_transformers.settings import ROOT, Settings


def main() -> None:
    settings = Settings.load()
    check_free(settings, ["LOADTEST_METRICS_PORT"])
    workload = Workload.from_settings(settings)
    # An error here ends as one sentence; in locustfile.py it would be a traceback.
    Examples.from_server(settings, workload.corpus.texts)
    command = [sys.executable, "-m", "locust", "--locustfile", "loadtest/locustfile.py"]
    command += ["--web-host", str(settings.bind_address), "--web-port", str(settings.locust_port)]
    command += ["--users", str(workload.users), "--spawn-rate", str(workload.spawn_rate or workload.users)]
    os.chdir(ROOT)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    run(main)
