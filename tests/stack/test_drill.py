"""`make drill`: the list of the drills, drills that test commands and recoveries, and a soak that is interrupted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from loadtest.drills.__main__ import DRILLS
from loadtest.drills.clients import GATEWAY, GRPC, HTTP
from loadtest.drills.drill_stack import DrillStack, repository_of
from loadtest.drills.harness import result
from loadtest.server.own_stack import Make
from tests.support.stacks import COMMAND_S
from triton_transformers.settings import ROOT, Settings

# They take half a minute each at most.
TESTED = [
    *("up-again", "port-taken", "config-edited", "config-broken", "config-unreadable", "gateway-killed"),
    *("supervisord-killed", "models-full"),
    pytest.param("reports-full", marks=pytest.mark.slow),
]
# Long enough for some samples, also on a machine that stands still for seconds.
SOAK_S = 20


def environment(folder) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return own | {"TRITON_SETTINGS_FILE": f"{folder}/.env", "COLUMNS": "200"}


def make_drill(folder, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "drill", f"REPORTS={folder}/reports", *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=COMMAND_S)


def test_drills_are_listed_without_starting_anything(tmp_path):
    done = make_drill(tmp_path, LIST="1")
    assert done.returncode == 0, done.stderr
    assert all(f"{name} " in done.stdout for name in ("port-taken", "prometheus-killed", "wrong-requests-to-gateway"))
    assert not (tmp_path / "reports").exists()


def test_interrupted_soak_answers_everything_stops_everything_and_writes_its_report(tmp_path):
    marked = environment(tmp_path) | {"STARTED_BY": str(tmp_path)}
    with Make(f"drill REPORTS={tmp_path}/reports SOAK=30 USERS=30 WAIT=0.2,0.5 SEED=1", marked) as process:
        lines = iter(process.stdout)
        begun = next(line for line in lines if line.startswith("30 clients for 30 minutes"))
        time.sleep(SOAK_S)
        os.killpg(process.pid, signal.SIGINT)
        text = begun + "".join(lines)
    assert process.returncode, text
    assert "of 30 minutes; what was measured until then is kept" in text
    assert "Also: the soak is too short to judge a slope." in text
    content = json.loads((tmp_path / "reports/latest-soak/soak.json").read_text())
    assert content["stopped"]
    good, bad = content["requests"]["good"], content["requests"]["bad"]
    assert set(content["good_by_route"]) == {GATEWAY, HTTP, GRPC}
    assert bad["requests"]  # with SEED=1, two of the clients have a bad one among their first four
    assert not good["errors"] and not bad["errors"]
    by_name = {one["name"]: one for one in content["series"]}
    assert {one["outcome"] for one in by_name.values()} == {"too short to judge"}
    for process in ("tritonserver", "tokenizer", "encoder", "gateway", "prometheus", "supervisord", "watchdog"):
        for kind in ("memory", "descriptors", "threads"):
            assert min(by_name[f"{kind} of {process}"]["values"]) > 0
    assert by_name["/dev/shm"]["values"][-1] > 100  # 64 MiB for each of two Python processes
    assert by_name["series in Prometheus"]["values"][-1] > 100
    assert not [one for one in psutil.process_iter() if started_by(one, tmp_path)]


def started_by(process: psutil.Process, folder) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("STARTED_BY") == str(folder)
    return False


@pytest.fixture(scope="module")
def stack() -> Iterator[DrillStack]:
    settings = Settings.load()
    with DrillStack(repository_of(settings), settings.local_state) as stack:
        yield stack


@pytest.mark.parametrize("name", TESTED)
def test_drill_costs_no_more_than_its_bound_and_says_why(stack, name):
    """How long a recovery takes depends on what else runs here, and so does whether a drill is held."""
    one = result(DRILLS[name], stack)
    if one.not_run == "only root may mount a small file system":
        pytest.skip(one.not_run)
    assert not (one.not_run or one.problem or one.wrong or one.lost), one
    assert one.requests and math.isfinite(one.recovery_s), one
    assert one.failed_gateway <= one.bound.gateway and one.failed_direct <= one.bound.direct, one
