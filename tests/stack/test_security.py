"""The promises of docs/security.md on a real stack: canaries stay where they belong, and nothing else is open."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.embedding import body, embed
from tests.support.stacks import SHORT, TestStack, bring_up, filled_stack, reserve_ports, stacks
from triton_transformers.settings import ROOT
from triton_transformers.triton import ADMIN_HEADER, GRPC_ADMIN_HEADER

# Each text is searched for everywhere after requests, errors, a comparison and a crash.
TEXT = "canary-text-of-a-client"
API_KEY = "canary-api-key-of-a-client"
ADMIN_KEY = "canary-admin-key"
PASSWORD = "canary-password-of-grafana"
CANARIES = (TEXT, API_KEY, ADMIN_KEY, PASSWORD)
GOOD = {"model": "embedding", "input": [TEXT]}
SECRETS = {"TRITON_ADMIN_KEY": ADMIN_KEY, "GRAFANA_ADMIN_PASSWORD": PASSWORD, "API_KEYS": API_KEY}


@pytest.fixture(scope="module")
def stack() -> Iterator[TestStack]:
    """Start a server whose secrets are in its .env, in a shell that allows core dumps and asks for Vertex AI."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    with stacks(filled_stack) as create, pytest.MonkeyPatch.context() as patch:
        stack = create()
        for name in SECRETS:
            stack.environment.pop(name, None)
        (stack.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
        patch.setenv("AIP_MODE", "PREDICTION")
        patch.setenv("AIP_HTTP_PORT", str(reserve_ports(1)[0]))
        resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
        try:
            yield bring_up(stack)
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, limits)


def status(url: str, data: bytes | None = None, method: str | None = None, **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, names, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def grpc(stack: TestStack) -> grpcclient.InferenceServerClient:
    return grpcclient.InferenceServerClient(f"127.0.0.1:{stack.environment['TRITON_GRPC_PORT']}")


# --- canaries ---------------------------------------------------------------------------------------------------------


def ask_gateway(stack: TestStack, content: object, key: str = API_KEY) -> int:
    url = f"http://127.0.0.1:{stack.environment['GATEWAY_PORT']}/v1/embeddings"
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return status(url, data, authorization=f"Bearer {key}", content_type="application/json")


def send_to_gateway(stack: TestStack) -> None:
    assert ask_gateway(stack, GOOD) == 200
    wrong = [GOOD | {"encoding_format": TEXT}, GOOD | {TEXT: TEXT}, GOOD | {"input": {TEXT: TEXT}}, TEXT.encode()]
    assert {ask_gateway(stack, content) for content in wrong} == {400}
    assert ask_gateway(stack, GOOD | {"model": TEXT}) == 404
    assert ask_gateway(stack, GOOD, TEXT) == 401


def send_over_http(stack: TestStack) -> None:
    url = stack.http + "/v2/models/embedding/infer"
    text = TEXT.encode()
    embed(stack, text)
    data, headers = body(text + b"\xff")
    broken = [(data, headers), (data, {}), (text, {}), (json.dumps({"inputs": [{"name": TEXT}]}).encode(), {})]
    assert {status(url, request, **own) for request, own in broken} <= {400, 500}
    assert status(f"{stack.http}/v2/models/{TEXT}/infer", data, **headers) == 404
    load = f"{stack.http}/v2/repository/models/embedding/load"
    assert status(load, json.dumps({"parameters": {"config": TEXT}}).encode()) == 403


def send_over_grpc(stack: TestStack) -> None:
    def infer(text: bytes, model: str = "embedding", name: str = "input_text", shape: tuple[int, int] = (1, 1)) -> None:
        tensor = grpcclient.InferInput(name, shape, "BYTES")
        tensor.set_data_from_numpy(np.full(shape, text, object))
        client.infer(model, [tensor])

    with grpc(stack) as client:
        infer(TEXT.encode())
        wrong = ({"text": TEXT.encode() + b"\xff"}, {"model": TEXT}, {"name": TEXT}, {"shape": (1, 2)})
        for arguments in wrong:
            with pytest.raises(InferenceServerException):
                infer(**{"text": TEXT.encode(), **arguments})


def crash_a_model(stack: TestStack) -> None:
    """Crash the encoder's process, send it a text, and wait until it answers again."""
    below = stack.server().children(recursive=True)
    (watchdog,) = [process for process in below if "serving.watchdog" in " ".join(process.cmdline())]
    watchdog.suspend()
    try:
        stack.stub("encoder").send_signal(signal.SIGSEGV)
        stack.wait(lambda: ask_gateway(stack, GOOD) == 503, "an error after the crash")
    finally:
        watchdog.resume()
    stack.wait(lambda: ask_gateway(stack, GOOD) == 200, "an answer after the crash")


@pytest.fixture(scope="module")
def used(stack: TestStack) -> TestStack:
    """Return the stack after good and wrong requests over every door, a comparison and a crash."""
    send_to_gateway(stack)
    send_over_http(stack)
    send_over_grpc(stack)
    done = stack.make("loadtest", **SHORT, PROTOCOL="openai")
    stack.results_of(done.returncode, done.stdout + done.stderr)
    assert [canary for canary in CANARIES if canary in done.stdout + done.stderr] == []
    crash_a_model(stack)
    return stack


def test_canaries_are_in_no_file_but_those_of_the_settings(used):
    """Search logs, reports, data of Prometheus and the rest of the state, but no programs: they hold no request."""
    files = defaultdict(set)
    for folder, names, here in os.walk(used.folder):
        names[:] = [name for name in names if name != "debian"]
        for path in (Path(folder, name) for name in here):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                for canary in CANARIES:
                    if canary.encode() in content:
                        files[canary].add(str(path.relative_to(used.folder)))
                        assert path.stat().st_mode & 0o077 == 0, path
    settings = {".env", "state/run/started.json"}
    assert files == {API_KEY: settings | {"state/run/gateway.env"}, ADMIN_KEY: settings, PASSWORD: settings}
    assert "answered with 503" in (used.folder / "state/log/gateway.log").read_text()
    assert list((used.folder / "reports").glob("*/report.html"))


def test_canaries_are_on_no_page_of_metrics(used):
    ports = ("TRITON_METRICS_PORT", "GATEWAY_METRICS_PORT", "PROMETHEUS_PORT")
    pages = [f"http://127.0.0.1:{used.environment[port]}/metrics" for port in ports]
    pages.append(f"{used.prometheus}/api/v1/series?match[]=%7B__name__%3D~%22.%2B%22%7D")
    for page in pages:
        with urllib.request.urlopen(page, timeout=120) as response:
            content = response.read().decode()
        assert len(content) > 1000
        assert [canary for canary in CANARIES if canary in content] == []


def holders(file: str) -> dict[str, set[str]]:
    """Return canary -> the command lines of the processes that have it in this file of /proc."""
    lines = defaultdict(set)
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            content = Path(f"/proc/{process.pid}/{file}").read_bytes()
            for canary in CANARIES:
                if canary.encode() in content:
                    lines[canary].add(" ".join(process.cmdline()))
    return lines


def test_environment_of_no_other_program_has_a_secret(used):
    programs = {
        canary: {re.search(r"supervisord|serve\.sh|serving\.watchdog|$", line)[0] for line in lines}
        for canary, lines in holders("environ").items()
    }
    # serve.sh goes on as the loop that starts the watchdog again.
    assert programs == {ADMIN_KEY: {"supervisord", "serve.sh", "serving.watchdog"}, PASSWORD: {"supervisord"}}


def test_process_list_has_the_admin_key_of_triton_alone(used):
    """Triton takes it as an argument only."""
    assert holders("cmdline") == {ADMIN_KEY: {" ".join(used.server().cmdline())}}


def test_no_program_writes_core_dumps(used):
    pid = int((used.folder / "state/run/supervisord.pid").read_text())
    programs = psutil.Process(pid).children(recursive=True)
    assert {process.rlimit(psutil.RLIMIT_CORE) for process in programs} == {(0, 0)}
    assert [path for folder in (ROOT, used.folder) for path in folder.glob("core*")] == []


def test_memory_with_tensors_is_private(used):
    regions = [Path("/dev/shm", process.cmdline()[2]) for process in used.processes("triton_python_backend_stub")]
    assert len(regions) >= 2
    used.wait(lambda: all(region.stat().st_mode & 0o077 == 0 for region in regions), "private shared memory")


# --- what is open -----------------------------------------------------------------------------------------------------


def test_programs_listen_on_loopback_and_triton_on_three_ports(stack):
    supervisord = psutil.Process(int((stack.folder / "state/run/supervisord.pid").read_text()))
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")  # gRPC's IPv4 through an IPv6 socket
        for process in supervisord.children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    ports = {connection.laddr.port for connection in stack.server().net_connections("inet") if not connection.raddr}
    assert ports == {int(stack.environment[f"TRITON_{name}_PORT"]) for name in ("HTTP", "GRPC", "METRICS")}
    assert {status(f"{stack.http}/{path}") for path in ("ping", "models", "invocations", "predict")} == {404}


def test_names_do_not_leave_the_repository(stack, tmp_path):
    """Send no key. With it, Triton may load a model from anywhere."""
    (tmp_path / "1").mkdir()
    (tmp_path / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "1/model.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    relative = os.path.relpath(tmp_path, stack.folder / "models")
    names = [relative, str(tmp_path), f"encoder/../{relative}"]
    tensor = grpcclient.InferInput("x", [1], "INT64")
    tensor.set_data_from_numpy(np.zeros(1, np.int64))
    with grpc(stack) as client:
        for name in names:
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="restricted"):
                    call(name)
            for call in (client.get_model_config, client.get_model_metadata, lambda name: client.infer(name, [tensor])):
                with pytest.raises(InferenceServerException, match="unknown model"):
                    call(name)
    for name in (*names, *(name.replace("/", "%2f") for name in names)):
        assert status(f"{stack.http}/v2/repository/models/{name}/load", b"{}") in (403, 404)
        assert status(f"{stack.http}/v2/models/{name}/config") == 404
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("file", ["file:1/model.py", "file:../../outside.py", "file:/tmp/outside.py"])
def test_files_in_a_load_need_the_key(stack, file):
    parameters = {"parameters": {"config": '{"backend": "python"}', file: "aGVsbG8="}}
    load = f"{stack.http}/v2/repository/models/uploaded/load"
    assert status(load, json.dumps(parameters).encode()) == 403
    assert status(load, json.dumps(parameters).encode(), **{ADMIN_HEADER: ADMIN_KEY[:-1]}) == 403
    with grpc(stack) as client, pytest.raises(InferenceServerException, match="restricted"):
        client.load_model("uploaded", headers={GRPC_ADMIN_HEADER: "x"}, config="{}", files={file: b"hello"})


@pytest.mark.parametrize(
    "path", ["/api/v1/admin/tsdb/delete_series", "/api/v1/admin/tsdb/snapshot", "/-/reload", "/-/quit"]
)
def test_prometheus_cannot_be_changed(stack, path):
    assert status(stack.prometheus + path, b"", "POST") in (403, 500)
    assert status(stack.prometheus + "/-/ready") == 200


def test_logs_and_settings_are_private(stack):
    """Leave out the log of supervisord, which has only starts and ends of processes: every user may read it."""
    state = stack.folder / "state"
    files = [path for folder in ("run", "log") for path in (state / folder).iterdir() if path.name != "supervisord.log"]
    assert {path.name for path in files} >= {"started.json", "gateway.env", "supervisor.sock", "triton.log"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []
