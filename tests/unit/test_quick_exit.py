"""The Python process of a model ends without Python's teardown, which could crash or hang it."""

import subprocess
import sys

import pytest

from scripts.common.settings import ROOT

SCRIPT = """
import atexit
from shared.quick_exit import leave_out_teardown

class Sender:
    def __del__(self):
        print("freed")

leave_out_teardown()
atexit.register(print, "a library's own end")
sender = Sender()
sender.itself = sender
print("served")
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("triton_python_backend_stub", ["served", "a library's own end"]),
        ("python3", ["served", "a library's own end", "freed"]),
    ],
)
def test_only_a_models_process_leaves_out_the_teardown(program, printed):
    done = subprocess.run(
        [f"/backends/python/{program}", "-c", SCRIPT, *"abcdefgh"],
        executable=sys.executable,
        cwd=ROOT / "images/triton/backends",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, printed), done.stderr
