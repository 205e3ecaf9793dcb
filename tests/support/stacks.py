"""Stacks for tests: the real programs, started by `make`, on free ports and in a temporary folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loadtest.server.own_stack import Make
from tests.support import onnx_models as models
from triton_transformers.http import opener
from triton_transformers.ports import free_ports
from triton_transformers.settings import DEFAULTS, ROOT
from triton_transformers.triton import Triton, TritonError
from triton_transformers.triton_messages import is_unreported

KEY = "a-key-of-the-tests"
SYSTEM = ("embedding", "tokenizer", "encoder")
ATTEMPTS = 3  # of what fails because a process got no CPU in time
ANSWER_S = 300
COMMAND_S = 1000  # the timeout of a command: a slow machine takes three times as long as an idle one
# A comparison that ends in seconds, and the causes for which it may prove nothing on a busy machine.
UNSURE = {"OTHER_PROGRAMS", "LOCUST_BOUND", "THINKING_USERS", "ROUNDS_DISAGREE", "CONTAINS_ONE"}
SHORT = {"MODES": "none dynamic", "ROUNDS": 3, "WINDOW": 1, "WARMUP": 0, "USERS": 16}


class PatientTriton(Triton):
    """Waits longer for answers, and repeats a load whose process reported too late, as the stack's commands do."""

    def load(self, *arguments: Any, **options: Any) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return super().load(*arguments, **options)
            except TritonError as error:
                if attempt == ATTEMPTS or not is_unreported(str(error)):
                    raise

    def infer(self, model: str, request: dict[str, Any], timeout: float = ANSWER_S) -> dict[str, Any]:
        return super().infer(model, request, timeout)

    def stream(self, model: str, fields: dict[str, Any], timeout: float = ANSWER_S) -> list[dict[str, Any]]:
        return super().stream(model, fields, timeout)


_reserved_ports: set[int] = set()


def reserve_ports(count: int) -> list[int]:
    """Return free ports that no other stack gets, even while the caller does not listen on them."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports: list[int] = []
    while len(ports) < count:
        (port,) = free_ports(1)
        if port % workers == worker % workers and port not in _reserved_ports:
            ports.append(port)
            _reserved_ports.add(port)
    return ports


def own_ports() -> dict[str, str]:
    """Return each setting of a port with a port that no other stack gets."""
    names = [name for name in DEFAULTS if name.endswith("_PORT")]
    return dict(zip(names, map(str, reserve_ports(len(names))), strict=True))


def wait_for(condition: Callable[[], Any], description: str, seconds: float, printed: Callable[[], str]) -> Any:
    """Wait until the condition is true; return its value. If the time is over, show what a program printed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s for {description}\n{printed()}")


class FollowedMake(Make):
    """A `make` that runs in the background. After follow(), wait() returns once `lines` has all that it printed."""

    reader: threading.Thread | None = None
    lines: list[str]

    def follow(self) -> list[str]:
        """Return the list of the lines that it prints from now on."""
        self.lines = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(iter(self.stdout.readline, "")), daemon=True)
        self.reader.start()
        return self.lines

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        if self.reader:
            self.reader.join(timeout)
        return code

    def wait_until(self, condition: Callable[[], Any], description: str, seconds: float = 300) -> None:
        """Wait until the condition is true. Raise AssertionError with `lines` if `make` ends first, or takes longer."""
        ended = object()

        def met_or_ended() -> Any:
            return condition() or (self.poll() is not None and ended)

        if wait_for(met_or_ended, description, seconds, lambda: "".join(self.lines)) is ended:
            self.wait(60)
            assert condition(), f"ended with {self.returncode} before {description}:\n{''.join(self.lines)}"


@dataclass
class TestStack:
    """A stack, and the environment in which `make` uses only this stack."""

    __test__ = False
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    client_key: str = "a-key-of-the-clients"  # for a gateway that has keys

    def __post_init__(self) -> None:
        self.environment |= own_ports() | {
            "RUNTIME": "local",
            # Most tests compare exact numbers, and measuring the engines takes seconds.
            "TRITON_ENGINE": "onnxruntime",
            "TRITON_ADMIN_KEY": KEY,
            "GRAFANA_ADMIN_PASSWORD": "a-password-of-the-tests",
            "LOCAL_STATE": str(self.folder / "state"),
            "MODEL_REPOSITORY": str(self.folder / "models"),
            "REPORTS": str(self.folder / "reports"),
            "COLUMNS": "160",
            "TRITON_SETTINGS_FILE": str(self.folder / ".env"),
        }

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.environment['TRITON_HTTP_PORT']}"

    @property
    def prometheus(self) -> str:
        return f"http://127.0.0.1:{self.environment['PROMETHEUS_PORT']}"

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.environment['GATEWAY_PORT']}"

    def post(self, path: str, **body: Any) -> Any:
        """Send the gateway a request with the clients' key; return the response's JSON."""
        headers = {"Authorization": f"Bearer {self.client_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.gateway + path, json.dumps(body).encode(), headers)
        with opener.open(request, timeout=120) as response:
            return json.load(response)

    def metrics(self, port: str = "TRITON_METRICS_PORT") -> str:
        with opener.open(f"http://127.0.0.1:{self.environment[port]}/metrics", timeout=120) as response:
            return response.read().decode()

    @property
    def triton(self) -> Triton:
        return PatientTriton(self.http, KEY)

    def ask(self, system: str, **columns: list[str]) -> dict[str, np.ndarray]:
        """Return the outputs for rows of texts, which are given by the names of their inputs."""
        inputs = [
            {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
            for name, texts in columns.items()
        ]
        answer = self.triton.infer(system, {"inputs": inputs})
        return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}

    @property
    def log(self) -> str:
        return (self.folder / "state/log/triton.log").read_text()

    def variables(self, **settings: object) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        return own | self.environment | {name: str(value) for name, value in settings.items()}

    def make(self, target: str, timeout: float = COMMAND_S, **settings: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *target.split()],
            cwd=ROOT,
            env=self.variables(**settings),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def paste(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command that `make add` or the page printed. It fails if the gateway refuses the request."""
        return subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -sS --fail-with-body ")],
            cwd=folder,
            env=self.variables(API_KEY=self.client_key),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def assemble(self, *systems: dict[str, object]) -> str:
        """Do as `make models` for each of these settings; return what it would print.

        This process has imported PyTorch already. Stand-ins in PYTHONPATH need another one.
        """
        chosen = [self.environment | {name: str(value) for name, value in settings.items()} for settings in systems]
        if "PYTHONPATH" not in self.environment:
            from tests.support.assemble_many import assemble_many

            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assemble_many(chosen)
            return " ".join(printed.getvalue().split())
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.assemble_many"],
            cwd=ROOT,
            env=self.variables(),
            input=json.dumps(chosen),
            capture_output=True,
            text=True,
            timeout=300 + 60 * len(systems),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def serve(self, *systems: str) -> TestStack:
        """Serve exactly these systems and the embedding system, without a restart; later commands use them, too."""
        self.environment["SYSTEMS"] = " ".join(["embedding", *systems])
        return bring_up(self)

    def start_make(self, target: str, **settings: object) -> FollowedMake:
        """Start `make` in its own process group, so that a test can send Ctrl-C."""
        return FollowedMake(target, self.variables(**settings))

    def follow_make(self, target: str, **settings: object) -> tuple[FollowedMake, list[str]]:
        """Start `make` as start_make does; return it with the lines that it prints from now on."""
        process = self.start_make(target, **settings)
        return process, process.follow()

    def configurations(self) -> dict[str, dict]:
        """Return the configuration of each model of the embedding system, as the server has it."""
        return {name: self.triton.config(name) for name in SYSTEM}

    def server(self) -> psutil.Process:
        """Wait until exactly one server runs. A new child has its name for a moment, and a dead one may linger."""

        def only_server() -> psutil.Process | None:
            servers = self.processes("tritonserver")
            return servers[0] if len(servers) == 1 else None

        return self.wait(only_server, "exactly one server")

    def replaced(self, before: psutil.Process) -> psutil.Process:
        """Wait for the server that replaces a killed one."""
        return self.wait(lambda: now if (now := self.server()) != before else None, "the replaced server")

    def stub(self, model: str) -> psutil.Process:
        """Wait until the model has exactly one Python process. After a reload the old one may linger."""

        def only_stub() -> psutil.Process | None:
            stubs = self.processes("triton_python_backend_stub", f"/{model}/")
            return stubs[0] if len(stubs) == 1 else None

        return self.wait(only_stub, f"exactly one process of {model}")

    def executions(self, model: str, rows: int, before: dict[str, Any]) -> int:
        """Return the executions for these rows, since the statistics `before`. Triton counts rows after it responds."""

        def counted() -> int:
            now = self.triton.statistics()[model]
            all_rows = now["inference_count"] >= before["inference_count"] + rows
            return all_rows and now["execution_count"] - before["execution_count"]

        return self.wait(counted, f"{rows} rows of {model} in the statistics")

    def processes(self, program: str, argument: str = "") -> list[psutil.Process]:
        """Return this stack's living processes of a program, with this in their arguments."""
        matching = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                arguments = " ".join(line)
                if line and line[0].endswith(program) and str(self.folder) in arguments and argument in arguments:
                    matching.append(process)
            except psutil.Error:
                continue
        return matching

    def wait(self, condition: Callable[[], Any], description: str, seconds: float = 300) -> Any:
        """Wait until the condition is true; return its value."""
        return wait_for(condition, description, seconds, lambda: self.log[-3000:])

    def results(self) -> dict:
        return json.loads((self.folder / "reports/latest/results.json").read_text())

    def results_of(self, code: int, output: str) -> dict:
        """Return the results of a comparison that ended with this exit code; fail if its numbers do not count."""
        results = self.results()
        assert {cause["code"] for cause in results["verdict"]["causes"]} <= UNSURE, output
        assert (code == 0) == (results["verdict"]["word"] == "proven"), output
        return results

    def destroy(self) -> None:
        if (self.folder / "state/run").exists():
            self.make("down")
        for leftover in self.processes("tritonserver"):
            leftover.send_signal(signal.SIGKILL)
        shutil.rmtree(self.folder)


def fill_repository(folder: Path, queue_delay_us: int) -> None:
    """Link the assembled embedding system, and save the small models of the tests."""
    for name in SYSTEM:
        (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "model_repository" / name / "config.pbtxt", folder / name)
        (folder / name / "1").symlink_to(ROOT / "model_repository" / name / "1")
    for name, (config, save) in small_models(queue_delay_us).items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        save(folder / name / "1/model.onnx")


TYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64", "INT8": "INT8",
    "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE",
    "BYTES": "STRING",
}  # fmt: skip

# Long enough for the requests of a test to share a batch.
QUEUE_DELAY_US = 200_000


def small_models(queue_delay_us: int) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """Return name -> (config.pbtxt, function that saves model.onnx). The backend completes what a config leaves out."""
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {queue_delay_us} }}"
    return {
        "alltypes": (
            'backend: "onnxruntime"',
            lambda path: models.save_identity(path, {t.lower(): (onnx, ["n", 2]) for t, onnx in TYPES.items()}),
        ),
        "fixed": (
            'platform: "onnxruntime_onnx"\nmax_batch_size: 0',
            lambda path: models.save_identity(path, {"x": ("INT64", [2, "t"]), "scale": ("FLOAT", [])}),
        ),
        "lookup": (
            'backend: "onnxruntime"\nmax_batch_size: 32\n'
            f"{batching}\n"
            "instance_group [ { count: 1 kind: KIND_AUTO } ]\n"
            'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
            'parameters { key: "execution_mode" value { string_value: "1" } }\n'
            'parameters { key: "enable_mem_arena" value { string_value: "0" } }\n'
            "optimization { graph { level: 1 } }",
            models.save_lookup,
        ),
        "accelerated": (
            'backend: "onnxruntime"\nmax_batch_size: 32\n'
            'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "openvino"\n'
            '  parameters { key: "precision" value: "FP32" } } ] } }',
            models.save_lookup,
        ),
        "ongpu": ('backend: "onnxruntime"\ninstance_group [ { kind: KIND_GPU } ]', models.save_lookup),
        "sequence": (
            'backend: "onnxruntime"\nmax_batch_size: 8\n'
            'input [ { name: "number" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
            'output [ { name: "sum" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
            "sequence_batching { max_sequence_idle_microseconds: 600000000\n"
            '  control_input [ { name: "start"\n'
            "  control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }",
            models.save_sequence_model,
        ),
        "wrongtype": (
            'backend: "onnxruntime"\nmax_batch_size: 4\n'
            'input [ { name: "ids" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
            'output [ { name: "row" data_type: TYPE_FP32 dims: [ 1 ] } ]',
            models.save_lookup,
        ),
        "tokens": (
            'backend: "packed_onnx"\nmax_batch_size: 64\n'
            'input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true },\n'
            '        { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]\n'
            'output [ { name: "per_token" data_type: TYPE_FP32 dims: [ -1, 1 ] },\n'
            '         { name: "pooled" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
            f"{batching}",
            models.save_token_model,
        ),
    }


@contextlib.contextmanager
def stacks(make: Callable[[], TestStack]) -> Iterator[Callable[[], TestStack]]:
    """Yield a function that makes stacks; destroy them all at the end."""
    created: list[TestStack] = []

    def create() -> TestStack:
        created.append(make())
        return created[-1]

    try:
        yield create
    finally:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda stack: stack.destroy(), created))


def bring_up(stack: TestStack, timeout: float = COMMAND_S) -> TestStack:
    done = stack.make("up", timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return stack


def filled_stack(queue_delay_us: int = QUEUE_DELAY_US) -> TestStack:
    """Return a stack, not yet up, with the embedding system and the small models, which wait this long for a batch."""
    stack = TestStack(Path(tempfile.mkdtemp(prefix="stack-")))
    fill_repository(stack.folder / "models", queue_delay_us)
    (stack.folder / "state/serving").mkdir(parents=True)
    (stack.folder / "state/serving/engines").symlink_to(os.environ["MEASUREMENTS_OF_TESTS"])
    return stack


def measure_anew(stack: TestStack) -> TestStack:
    """Let a stack, not yet up, measure as on a new machine."""
    (stack.folder / "state/serving/engines").unlink()
    return stack
