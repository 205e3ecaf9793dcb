"""Commands that wait for another one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from scripts.common.settings import ROOT

# Ends with the number of the signal that it receives.
CHILD = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda n, _: sys.exit(n))
print("ready", flush=True)
signal.pause()
"""
PARENT = f"""
import os, sys
from scripts.common.cli import call
sys.exit(call([sys.executable, "-c", {CHILD!r}], dict(os.environ)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_command_that_is_waited_for(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(number)
        assert parent.wait(60) == number
