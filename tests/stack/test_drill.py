"""`make drill`: the list of the drills, a wrong name, the drills of commands, and a soak that is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from loadtest.drills.clients import GATEWAY, GRPC, HTTP
from loadtest.server.own_stack import Make
from tests.support.stacks import COMMAND_S
from triton_transformers.settings import ROOT

# They take half a minute each at most.
MESSAGES = ("port-taken", "config-broken", "config-unreadable", "reports-full")
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
    assert all(f"{name} " in done.stdout for name in (*MESSAGES, "prometheus-killed", "wrong-requests-to-gateway"))
    assert not (tmp_path / "reports").exists()


@pytest.mark.slow
def test_drills_that_expect_a_message_find_it(tmp_path):
    """The drills of make's commands expect their messages, which change with the commands."""
    done = make_drill(tmp_path, DRILL=" ".join(MESSAGES))
    report = next((tmp_path / "reports").glob("*-drill/drill.json"), None)
    assert report, done.stdout + done.stderr
    drills = {drill["name"]: drill for drill in json.loads(report.read_text())["drills"]}
    for name in MESSAGES:
        drill = drills[name]
        if drill["not_run"] == "only root may mount a small file system":
            continue
        assert not drill["not_run"] and not drill["problem"], done.stdout + done.stderr
        # How long the recovery takes, which decides whether a drill is held, depends on what else runs here.
        assert drill["requests"] and drill["recovery_s"] is not None, done.stdout
        assert not drill["errors"], done.stdout


def test_interrupted_soak_answers_everything_stops_everything_and_writes_its_report(tmp_path):
    marked = environment(tmp_path) | {"STARTED_BY": str(tmp_path)}
    with Make(f"drill REPORTS={tmp_path}/reports SOAK=30 USERS=30 WAIT=0.2,0.5 SEED=1", marked) as process:
        lines = iter(process.stdout)
        begun = next(line for line in lines if line.startswith("30 clients for 30 minutes"))
        time.sleep(SOAK_S)
        os.killpg(process.pid, signal.SIGINT)
        text = begun + "".join(lines)
    assert process.returncode, text
    assert "of 30 minutes; what was sampled until then is kept" in text
    assert "That is too short to judge a slope." in text
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
