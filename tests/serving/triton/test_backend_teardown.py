"""The Python process of a model ends without Python's teardown, which could crash or hang it."""

import os
import subprocess
import sys

import pytest

from triton_transformers.settings import ROOT

SCRIPT = """
import atexit
from tests.support.python_backend import instance_args

class Sender:
    def __del__(self):
        print("freed")

def end_of_a_library():
    many = [[] for _ in range(10**6)]  # enough for the garbage collector to start by itself
    print("the end of a library")

from serving.triton.backend import Backend

class Model(Backend):
    def set_up(self, config, args):
        atexit.register(end_of_a_library)

    def execute(self, requests): ...

model = Model()
model.initialize(instance_args(""))
model.finalize()
print("served")
sender = Sender()
sender.itself = sender
del sender
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("triton_python_backend_stub", ["served", "the end of a library"]),
        ("python3", ["served", "the end of a library", "freed"]),
    ],
)
def test_only_a_models_process_skips_the_teardown(program, printed):
    # Without PYTHONUNBUFFERED, so that Python prints only when it flushes.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [f"/backends/python/{program}", "-c", SCRIPT, *"abcdefgh"],
        executable=sys.executable,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, printed), done.stderr
