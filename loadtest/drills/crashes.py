"""Drills: a process crashes, or stands still for some seconds."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from functools import partial

from loadtest.drills.clients import RATE
from loadtest.drills.drill_stack import DrillStack
from loadtest.drills.harness import NOTHING_FAILS, RECOVERY_S, Bound, add, drill

# Both of Triton's own routes fail while the server or a step is down. The gateway holds what arrives meanwhile, and
# may lose what Triton was working on.
SERVER = Bound(gateway=RATE // 2, direct=int(2 * RATE * RECOVERY_S), reloads=True)
# The gateway is the door: while it restarts, its clients are refused, and those of Triton are not.
DOOR = Bound(gateway=int(RATE * RECOVERY_S))

STEPS = ("tokenizer", "encoder")
# Name of the drill and of the program or step -> what it is, and what its end may cost; None: it is not killed alone.
PROCESSES: dict[str, tuple[str, str, Bound | None]] = {
    "tokenizer": ("tokenizer", "the Python process of the tokenizer", SERVER),
    "encoder": ("encoder", "the Python process of the encoder", SERVER),
    "server": ("triton", "tritonserver", SERVER),
    "gateway": ("gateway", "the gateway", DOOR),
    "prometheus": ("prometheus", "Prometheus", NOTHING_FAILS),
    "supervisord": ("supervisord", "supervisord", None),
}


def send(stack: DrillStack, name: str, number: int) -> None:
    """Send a signal to a step or a program."""
    (stack.stub(name) if name in STEPS else stack.program(name)).send_signal(number)


def stop(stack: DrillStack, name: str) -> None:
    stack.pause(stack.stub(name) if name in STEPS else stack.program(name))


for drill_name, (name, noun, bound) in PROCESSES.items():
    if bound:
        add(f"{drill_name}-killed", f"kill -9 of {noun}", partial(send, name=name, number=signal.SIGKILL), bound)
    add(f"{drill_name}-stopped", f"{noun} stands still for 3 s", partial(stop, name=name))
TERMINATED = "gets SIGTERM from another program"
add("server-terminated", f"tritonserver {TERMINATED}", partial(send, name="triton", number=signal.SIGTERM), SERVER)
add("gateway-terminated", f"the gateway {TERMINATED}", partial(send, name="gateway", number=signal.SIGTERM), DOOR)
add("server-aborted", "tritonserver crashes (SIGSEGV)", partial(send, name="triton", number=signal.SIGSEGV), SERVER)
add(
    "encoder-left-stopped",
    "the Python process of the encoder is stopped (SIGSTOP), and nobody continues it",
    partial(send, name="encoder", number=signal.SIGSTOP),
    says=("was stopped; continuing it",),
)


@drill("kill -9 of the Python processes of both steps at once", SERVER)
def steps_killed(stack: DrillStack) -> None:
    for stub in [stack.stub(name) for name in STEPS]:
        stub.kill()


@drill("kill -9 of the watchdog, which reloads models, and 5 s later of the Python process of the encoder", SERVER)
def watcher_killed(stack: DrillStack) -> None:
    for watchdog in stack.processes("serving.watchdog"):
        watchdog.kill()
    time.sleep(5)  # the next one must have seen the process
    stack.stub("encoder").kill()


@drill("kill -9 of tritonserver and of the gateway at once", replace(SERVER, gateway=DOOR.gateway))
def server_and_gateway_killed(stack: DrillStack) -> None:
    server = stack.program("triton")
    stack.program("gateway").kill()
    server.kill()


@drill(
    "kill -9 of supervisord, with which all programs end, then `make up`, from which the recovery counts",
    Bound(gateway=int(2 * RATE * RECOVERY_S), direct=int(4 * RATE * RECOVERY_S), reloads=True),
)
def supervisord_killed(stack: DrillStack) -> None:
    stack.program("supervisord").kill()
    stack.until(lambda: not stack.processes(), "the end of all programs")
    stack.mark()
    stack.make("up")
