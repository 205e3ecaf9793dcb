"""Drills: commands of make while clients send requests, also in the wrong order, twice, or interrupted."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from collections.abc import Iterator

from loadtest.drills.clients import RATE
from loadtest.drills.crashes import DOOR
from loadtest.drills.drill_stack import COMMAND_S, SHORT, BrokenError, DrillStack
from loadtest.drills.harness import RECOVERY_S, Bound, drill
from loadtest.server.own_stack import Make
from triton_transformers.model_config import NO_CONFIGURATION

# Everything fails from `make down`, which waits for requests, until `make up` has ended.
DOWN = Bound(gateway=int(RATE * (30 + RECOVERY_S)), direct=int(2 * RATE * (30 + RECOVERY_S)), reloads=True)
ECHO = """import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        time.sleep({seconds})

    def execute(self, requests):
        inputs = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", x)]) for x in inputs]
"""
ECHO_CONFIG = """backend: "python"
instance_group [ { kind: KIND_CPU } ]
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
WITH_ECHO = {"SYSTEMS": "embedding echo"}


def add_echo(stack: DrillStack, seconds: float = 0) -> None:
    """Add a small model to the repository. It takes this many seconds to load."""
    folder = stack.models / "echo/1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(ECHO.format(seconds=seconds))
    (folder.parent / "config.pbtxt").write_text(ECHO_CONFIG)


@contextlib.contextmanager
def edited(stack: DrillStack, model: str, pattern: str, replacement: str) -> Iterator[None]:
    """Edit the config.pbtxt of a model, and write the original back at the end."""
    path = stack.models / model / "config.pbtxt"
    original = path.read_text()
    text, count = re.subn(pattern, replacement, original)
    if not count:
        raise BrokenError(f"{path} has no {pattern}")
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(original)


def batcher_of(stack: DrillStack, model: str = "encoder") -> str:
    return json.dumps(stack.triton.config(model).get("dynamic_batching"))


@drill("`make up` although everything runs", says=("http://127.0.0.1:",))
def up_again(stack: DrillStack) -> None:
    stack.make("up")


@drill("`make down`, then `make up`, from which the recovery counts", DOWN)
def down_and_up(stack: DrillStack) -> None:
    stack.make("down")
    stack.mark()
    stack.make("up")


@drill("`make up` with another limit of the gateway, which restarts it alone, and back", DOOR)
def gateway_setting_changed(stack: DrillStack) -> None:
    stack.make("up", GATEWAY_IN_FLIGHT="128")
    stack.mark()
    stack.make("up")


@drill(
    "`make up` with a port that another program holds: refused, and the stack goes on",
    says=("cannot be opened on 127.0.0.1", "set another TRITON_GRPC_PORT in .env"),
)
def port_taken(stack: DrillStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        stack.refused("up", TRITON_GRPC_PORT=str(holder.getsockname()[1]))


@drill("another queue delay in the encoder's config.pbtxt, `make up`, and back")
def config_edited(stack: DrillStack) -> None:
    before = batcher_of(stack)
    with edited(
        stack, "encoder", r"dynamic_batching \{[^}]*\}", "dynamic_batching { max_queue_delay_microseconds: 3000 }"
    ):
        stack.make("up")
        if "3000" not in batcher_of(stack):
            raise BrokenError("the edited delay is not in force")
    stack.make("up")
    if batcher_of(stack) != before:
        raise BrokenError("the original delay is not in force again")


@drill(
    "a config.pbtxt that does not load, `make up`: refused, and the old model goes on",
    says=("parameter 'padding' must be one of none, bucket, max_length, longest, not 'wide'",),
)
def config_broken(stack: DrillStack) -> None:
    with edited(stack, "tokenizer", '"none"', '"wide"'):
        stack.refused("up")
    stack.make("up")


@drill(
    "a config.pbtxt that is no protobuf, `make up`: refused, and the old model goes on",
    says=(f"models/encoder/config.pbtxt, line 1, {NO_CONFIGURATION}",),
)
def config_unreadable(stack: DrillStack) -> None:
    with edited(stack, "encoder", r"\A", "max_batch_size: { this is not protobuf\n"):
        stack.refused("up")
    stack.make("up")


@drill("another system beside: loaded, and unloaded again")
def system_added_and_removed(stack: DrillStack) -> None:
    add_echo(stack)
    stack.make("up", **WITH_ECHO)
    if stack.triton.index().get("echo", ("", ""))[0] != "READY":
        raise BrokenError("the added system is not ready")
    stack.make("up")


@drill("Ctrl-C in a `make up` that loads another system: the next `make up` unloads it, and the same again loads it")
def up_interrupted(stack: DrillStack) -> None:
    interrupt(stack, signal.SIGINT)


@drill("kill -9 of a `make up` that loads another system: the next `make up` unloads it, and the same again loads it")
def up_killed(stack: DrillStack) -> None:
    interrupt(stack, signal.SIGKILL)


def interrupt(stack: DrillStack, number: signal.Signals) -> None:
    add_echo(stack, seconds=3)
    command = stack.start_make("up", **WITH_ECHO)
    stack.until(lambda: stack.processes("/models/echo/"), "the load of the other system")
    check_failed("the interrupted `make up`", command, command.end(number, COMMAND_S))
    stack.make("up")
    if "echo" in stack.triton.index():
        raise BrokenError("`make up` left the system of the interrupted one loaded")
    stack.make("up", **WITH_ECHO)
    stack.make("up")


@drill("two `make up` at once, one of which adds a system, then `make up`")
def two_ups(stack: DrillStack) -> None:
    add_echo(stack, seconds=1)
    commands = [stack.start_make("up"), stack.start_make("up", **WITH_ECHO)]
    for command in commands:
        text = command.communicate()[0]
        if command.returncode:
            raise BrokenError(f"one of two `make up` failed: {text[-300:]}")
    stack.make("up")


# --- a comparison ----------------------------------------------------------------------------------------------------


@drill("`make loadtest`, which writes its report and restores batching")
def comparison(stack: DrillStack) -> None:
    with restored(stack):
        compared(stack)


@drill(
    "kill -9 of a `make loadtest` while batching is off, then another one, which restores it",
    says=("an earlier comparison or search was killed: restored",),
)
def comparison_killed(stack: DrillStack) -> None:
    with restored(stack):
        started_comparison(stack, WORKERS="2").end(signal.SIGKILL, COMMAND_S)
        stack.until(lambda: not stack.processes("loadtest.load.worker"), "the end of the workers")
        compared(stack)


@drill("Ctrl-C in a `make loadtest` while batching is off: it is on again at the end of the command")
def comparison_interrupted(stack: DrillStack) -> None:
    with restored(stack):
        command = started_comparison(stack)
        check_failed("the interrupted `make loadtest`", command, command.end(signal.SIGINT, COMMAND_S))


@drill(
    "kill -9 of one of two Locust workers of a `make loadtest`, which ends with an error and restores batching",
    says=("of 2 was killed by SIGKILL",),
)
def worker_killed(stack: DrillStack) -> None:
    with restored(stack):
        command = started_comparison(stack, WORKERS="2")
        stack.until(lambda: stack.processes("loadtest.load.worker"), "a worker")[0].kill()
        check_failed("`make loadtest` without a worker", command, stack.printed_by(command))


def compared(stack: DrillStack) -> None:
    """Compare to the end. Raise unless the comparison wrote its report, whatever it could prove beside the drill."""
    code, text = stack.run("loadtest", **SHORT)
    if "report  " not in text:
        raise BrokenError(f"`make loadtest` ended with {code}: {text[-300:]}")


def started_comparison(stack: DrillStack, **settings: str) -> Make:
    """Start a comparison, and wait until it has switched batching off."""
    command = stack.start_make("loadtest", **SHORT, **settings)
    begun = "the mode without batching"
    stack.until(lambda: batcher_of(stack) == "null" or command.poll() is not None, begun, COMMAND_S)
    if command.poll() is not None:
        raise BrokenError(f"`make loadtest` ended early: {command.communicate()[0][-300:]}")
    return command


@contextlib.contextmanager
def restored(stack: DrillStack) -> Iterator[None]:
    """Raise unless a comparison leaves the configuration as it was."""
    before = batcher_of(stack)
    yield
    if batcher_of(stack) != before:
        raise BrokenError("the comparison did not restore the configuration")


def check_failed(what: str, command: Make, text: str) -> None:
    if not command.returncode or "Traceback" in text:
        raise BrokenError(f"{what} ended with {command.returncode}: {text[-300:]}")
