"""Drills: a process crashes, or stands still for some seconds."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from drills.drill_stack import DrillStack
from drills.harness import drill
from drills.outcomes import RATE, RECOVERY_S, Bound

# Both of Triton's own routes fail while the server or a step is down. The gateway holds what arrives meanwhile, and
# may lose what Triton was working on.
SERVER = Bound(gateway=RATE // 2, direct=int(2 * RATE * RECOVERY_S), reloads=True)
# The gateway is the door: while it restarts, its clients are refused, and those of Triton are not.
DOOR = Bound(gateway=int(RATE * RECOVERY_S))


@drill("kill -9 of the Python process of the tokenizer", SERVER)
def tokenizer_killed(stack: DrillStack) -> None:
    stack.stub("tokenizer").kill()


@drill("kill -9 of the Python process of the encoder", SERVER)
def encoder_killed(stack: DrillStack) -> None:
    stack.stub("encoder").kill()


@drill("kill -9 of tritonserver", SERVER)
def server_killed(stack: DrillStack) -> None:
    stack.program("triton").kill()


@drill("kill -9 of the Python processes of both steps at once", SERVER)
def steps_killed(stack: DrillStack) -> None:
    for stub in [stack.stub("tokenizer"), stack.stub("encoder")]:
        stub.kill()


@drill("tritonserver crashes (SIGSEGV)", SERVER)
def server_aborted(stack: DrillStack) -> None:
    stack.program("triton").send_signal(signal.SIGSEGV)


@drill("tritonserver gets SIGTERM from another program", SERVER)
def server_terminated(stack: DrillStack) -> None:
    stack.program("triton").terminate()


@drill("kill -9 of the watchdog, which reloads models, and 5 s later of the Python process of the encoder", SERVER)
def watcher_killed(stack: DrillStack) -> None:
    for watchdog in stack.processes("triton/watchdog"):
        watchdog.kill()
    time.sleep(5)  # the next one must have seen the process
    stack.stub("encoder").kill()


@drill("kill -9 of tritonserver and of the gateway at once", replace(SERVER, gateway=DOOR.gateway))
def server_and_gateway_killed(stack: DrillStack) -> None:
    server = stack.program("triton")
    stack.program("gateway").kill()
    server.kill()


@drill("kill -9 of the gateway", DOOR)
def gateway_killed(stack: DrillStack) -> None:
    stack.program("gateway").kill()


@drill("the gateway gets SIGTERM from another program", DOOR)
def gateway_terminated(stack: DrillStack) -> None:
    stack.program("gateway").terminate()


@drill("kill -9 of Prometheus")
def prometheus_killed(stack: DrillStack) -> None:
    stack.program("prometheus").kill()


@drill(
    "kill -9 of supervisord, with which all programs end, then `make up`, from which the recovery counts",
    Bound(gateway=int(2 * RATE * RECOVERY_S), direct=int(4 * RATE * RECOVERY_S), reloads=True),
)
def supervisord_killed(stack: DrillStack) -> None:
    stack.program("supervisord").kill()
    stack.until(lambda: not stack.processes("tritonserver"), "the end of tritonserver")
    stack.mark()
    stack.make("up")


@drill("tritonserver stands still for 3 s")
def server_stopped(stack: DrillStack) -> None:
    stack.pause(stack.program("triton"))


@drill("the Python process of the tokenizer stands still for 3 s")
def tokenizer_stopped(stack: DrillStack) -> None:
    stack.pause(stack.stub("tokenizer"))


@drill("the Python process of the encoder stands still for 3 s")
def encoder_stopped(stack: DrillStack) -> None:
    stack.pause(stack.stub("encoder"))


@drill("the Python process of the encoder is stopped (SIGSTOP), and nobody continues it")
def encoder_left_stopped(stack: DrillStack) -> None:
    stack.stub("encoder").suspend()


@drill("the gateway stands still for 3 s")
def gateway_stopped(stack: DrillStack) -> None:
    stack.pause(stack.program("gateway"))


@drill("Prometheus stands still for 3 s")
def prometheus_stopped(stack: DrillStack) -> None:
    stack.pause(stack.program("prometheus"))


@drill("supervisord stands still for 3 s")
def supervisord_stopped(stack: DrillStack) -> None:
    stack.pause(stack.program("supervisord"))
