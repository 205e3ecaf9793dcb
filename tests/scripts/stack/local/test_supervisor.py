"""The supervisord of a state folder is found and stopped even if its socket and its pid file were deleted."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time

import psutil
import pytest

from scripts.stack.local.stack import LocalStack
from scripts.stack.local.supervisor import CONF, Supervisor
from tests.support.stacks import own_ports
from tests.support.supervisord_stand_in import supervisord_stand_in
from triton_transformers.settings import Settings, UserError


def test_supervisord_without_its_files_is_found_and_stopped(tmp_path):
    supervisor, other = Supervisor(tmp_path / "state"), Supervisor(tmp_path / "other")
    with supervisord_stand_in(tmp_path / "state") as (process, port):
        assert supervisor.running() and not supervisor.answers()
        assert supervisor.process().pid == process.pid
        assert supervisor.ports() == {port}
        assert not other.running() and other.process() is None and other.ports() == set()
        other.stop()
        assert psutil.pid_exists(process.pid)
        supervisor.stop()
        assert not supervisor.running()


def test_state_of_a_program_without_the_socket_is_one_sentence(tmp_path):
    supervisor = Supervisor(tmp_path)
    deleted = pytest.raises(UserError, match=f"because {supervisor.socket} was deleted: `make up` starts it again")
    with supervisord_stand_in(tmp_path), deleted:
        supervisor.program("triton")
    with pytest.raises(UserError, match="because the stack has just ended: `make up` starts it again"):
        supervisor.program("triton")


@pytest.mark.slow
def test_program_that_supervisord_gave_up_starts_when_it_can(tmp_path):
    """Also if its log's folder is gone."""
    ready, python = tmp_path / "ready", tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\n[ "$2" != gateway ] && exec {sys.executable} "$@"\n[ -e {ready} ] && exec sleep 600\nexit 1\n'
    )
    python.chmod(0o700)
    variables = dict.fromkeys(re.findall(r"%\(ENV_(\w+)\)s", CONF.read_text()), "unused")
    supervisor = Supervisor(tmp_path / "state")

    def until(state: str) -> None:
        while supervisor.program("gateway")["statename"] != state:
            time.sleep(0.1)

    try:
        supervisor.start(variables | {"PATH": f"{python.parent}:{os.environ['PATH']}"})
        supervisor.start_program("gateway")
        until("FATAL")
        shutil.rmtree(tmp_path / "state/log")
        ready.touch()
        until("RUNNING")
    finally:
        supervisor.stop()


def test_ports_of_a_stack_without_its_socket_are_its_own(tmp_path):
    with supervisord_stand_in(tmp_path / "state") as (_, port):
        ports = own_ports() | {"TRITON_HTTP_PORT": str(port)}
        own = {"LOCAL_STATE": str(tmp_path / "state"), "REPORTS": str(tmp_path), "GRAFANA_HOME": "none"}
        stack = LocalStack(Settings.load().replace(RUNTIME="local", **ports, **own))
        stack.check(["embedding"])
        assert stack.reason_to_restart() == f"{stack.supervisor.socket} was deleted"
