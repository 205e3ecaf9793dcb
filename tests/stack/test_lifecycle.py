"""Start, stop, crash and recover the stack. The tests break one stack that no other module uses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from dotenv import unset_key

from export.catalogue import RECIPES
from export.record import Record
from loadtest.server.switching import Switch, plan
from loadtest.tune.winner import winner_files
from scripts.stack.apply import apply
from scripts.stack.local.stack import LocalStack
from scripts.stack.local.supervisor import Supervisor
from tests.support.certificates import save_certificate
from tests.support.embedding import embed
from tests.support.stacks import ATTEMPTS, COMMAND_S, SYSTEM, bring_up, measure_anew
from tests.support.triton_clients import IDS, connect, exchange_over_shared_memory
from triton_transformers.corpus import MIXED
from triton_transformers.files import comparison_lock, exclusive
from triton_transformers.settings import MODES, ROOT, Settings, UserError
from triton_transformers.triton import TritonError, engines
from triton_transformers.triton_messages import is_unreported

# Between two requests of a client that goes on beside a test.
PAUSE_S = 0.03


@pytest.fixture(scope="module")
def stack(new_stack):
    """Start a server that the tests stop, kill and configure anew."""
    return bring_up(measure_anew(new_stack()))


def state(stack) -> tuple[str, object]:
    """Return the settings and the configurations of a stack that answers; otherwise nothing."""
    try:
        assert answers(stack)
        return (stack.folder / "state/run/started.json").read_text(), stack.configurations()
    except (OSError, AssertionError, TritonError):
        return "", None


@pytest.fixture(scope="module")
def first_state(stack) -> tuple[str, object]:
    return state(stack)


@pytest.fixture(autouse=True)
def up(stack, first_state, request):
    """Start the stack if the test before left it stopped, incomplete or with other settings."""
    if "stopped" not in request.fixturenames and state(stack) != first_state:
        bring_up(stack)


@pytest.fixture
def stopped(stack):
    """Stop the stack for a test that starts it. Such tests follow those that leave the stack stopped."""
    stack.make("down")


def answers(stack) -> bool:
    try:
        return embed(stack, "a text").shape == (1, 384)
    except (urllib.error.URLError, ConnectionError):
        return False


def test_status_and_smoke_bypass_the_proxy(stack):
    """A company's proxy must not get the requests to servers on this machine."""
    status = stack.make("status", http_proxy="http://127.0.0.1:9")
    assert status.returncode == 0
    for word in ("gateway", "triton", "prometheus", "running", *SYSTEM, "ready", stack.http):
        assert word in status.stdout
    smoke = stack.make("smoke", http_proxy="http://127.0.0.1:9")
    assert smoke.returncode == 0
    assert smoke.stdout.split() == ["ok", "embedding"]


def test_logs_end_without_a_terminal(stack):
    done = stack.make("logs")
    assert done.returncode == 0
    assert "Started HTTPService" in done.stdout


def test_stack_whose_control_files_were_deleted_is_found(stack):
    """`down` stops it, and `up` restarts it with its systems."""
    assert stack.make("up", SYSTEMS="embedding lookup").returncode == 0
    before = stack.server()
    shutil.rmtree(stack.folder / "state/run")
    status = stack.make("status")
    assert status.returncode != 0
    assert "supervisor.sock was deleted: `make up` starts it again, `make down` stops it" in status.stderr
    again = stack.make("up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "supervisor.sock was deleted: restarting the stack" in again.stdout
    assert stack.server() != before
    assert ready_models(stack) == {*SYSTEM, "lookup"}
    shutil.rmtree(stack.folder / "state/run")
    assert stack.make("down").stdout == "stopped\n"
    assert stack.processes("tritonserver") == []


@pytest.mark.usefixtures("stopped")
def test_crashing_prometheus_is_reported(stack, tmp_path):
    (tmp_path / "prometheus").write_text("#!/bin/sh\necho no disk; exit 1\n")
    (tmp_path / "prometheus").chmod(0o755)
    done = stack.make("up", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "prometheus does not stay up. Its log ends:\nno disk" in done.stderr


@pytest.mark.usefixtures("stopped")
def test_two_ups_at_once_start_one_stack(stack):
    both = [stack.start_make("up") for _ in range(2)]
    outputs = [process.communicate(timeout=COMMAND_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert stack.server()


def test_down_leaves_no_process(stack):
    group = [stack.server(), *stack.server().children(recursive=True)]
    assert stack.make("down").returncode == 0
    _, alive = psutil.wait_procs(group, timeout=120)
    assert alive == []
    assert stack.make("down").stdout == "not running\n"
    assert "not running" in stack.make("status").stdout
    smoke = stack.make("smoke")
    assert smoke.returncode != 0
    assert "`make status` shows what runs there" in smoke.stderr


@pytest.mark.usefixtures("stopped")
def test_failed_load_at_start_shows_the_reason(stack):
    config = stack.folder / "models/encoder/config.pbtxt"
    good = config.read_text()
    try:
        config.write_text(good.replace("dims: [ 384 ]", "dims: [ 385 ]"))
        done = stack.make("up")
        assert done.returncode != 0
        assert "output 'sentence_embedding' has dims [384], not [385]" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        config.write_text(good)
    # After the config is corrected, the same command starts the stack.
    corrected = stack.make("up")
    assert corrected.returncode == 0, corrected.stderr
    assert answers(stack)


def test_changed_setting_restarts_the_server(stack):
    before = stack.server().pid
    done = stack.make("up", TRITON_LOG_VERBOSE=1, TRITON_SHARED_MEMORY=1)
    assert "settings changed" in done.stdout
    assert stack.server().pid != before
    assert "HTTP request: " in stack.log  # which only the verbose log has
    stack.triton.load("lookup")
    for library in (httpclient, grpcclient):
        with connect(stack, library) as client:
            assert exchange_over_shared_memory(client, library, headers={}).tolist() == IDS.tolist()


def test_settings_of_the_gateway_restart_it_alone(stack, tmp_path):
    cert, key = save_certificate(tmp_path)
    before = stack.server().pid
    secret = "a-key-for-the-gateway"
    done = stack.make("up", API_KEYS=secret, TLS_CERT=cert, TLS_KEY=key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "settings changed (API_KEYS, TLS_CERT, TLS_KEY): restarting the gateway" in done.stdout
    url = f"https://127.0.0.1:{stack.environment['GATEWAY_PORT']}"
    assert f"Page        {url}" in done.stdout

    def models(**headers: str) -> str:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=60, context=ssl.create_default_context(cafile=cert)) as response:
            return response.read().decode()

    with pytest.raises(urllib.error.HTTPError, match="401"):
        models()
    assert '"embedding"' in models(Authorization=f"Bearer {secret}")
    for file in (stack.folder / "state").rglob("*"):
        if file.is_file() and file.stat().st_size < 10**7 and secret.encode() in file.read_bytes():
            assert file.stat().st_mode & 0o077 == 0, file
            assert file.suffix != ".log"
    assert "restarting the gateway" in stack.make("up").stdout
    assert stack.server().pid == before


def test_gateway_that_would_answer_everybody_stays_as_it_is(stack):
    before = gateway_pid(stack)
    done = stack.make("up", GATEWAY_BIND="0.0.0.0")
    assert done.returncode != 0
    assert "GATEWAY_BIND=0.0.0.0 opens the gateway to other machines, and API_KEYS is empty" in done.stderr
    assert gateway_pid(stack) == before


@pytest.mark.slow
def test_overload_is_refused_and_the_server_recovers(stack):
    settings = {"GATEWAY_IN_FLIGHT": "2", "USERS": "2", "WINDOW": "3", "WARMUP": "1"}
    before = embed(stack, "a text")
    done = stack.make("loadtest", OVERLOAD=10, **settings)
    assert "refused with 429" in done.stdout, done.stdout + done.stderr
    folder = stack.folder / "reports/latest-overload"
    results = json.loads((folder / "results.json").read_text())
    assert (done.returncode == 0) == (results["verdict"]["word"] == "proven")
    assert results["refused"] > 0 < results["accepted"]
    assert results["failed"] == 0
    assert results["arrived"] == results["accepted"] + results["refused"] + results["given_up"]
    assert "at 10 times its capacity" in (folder / "report.html").read_text()
    np.testing.assert_allclose(embed(stack, "a text"), before, atol=1e-5)


def gateway_pid(stack) -> int:
    return Supervisor(stack.folder / "state").program("gateway")["pid"]


def test_measured_engine_answers_like_onnxruntime_and_outlives_switches_and_the_server(stack):
    texts = MIXED.texts[:48]
    expected, log_before = embed(stack, *texts), stack.log
    done = stack.make("up", TRITON_ENGINE="auto")
    assert "settings changed (" in done.stdout
    (line,) = [line for line in stack.make("status").stdout.splitlines() if line.startswith("encoder ")]
    chosen = " ".join(line.split()[2:4])
    assert chosen in ("onnxruntime f32", "openvino f32", "openvino bf16")
    (file,) = (stack.folder / "state/serving/engines").glob("encoder-1-????????????.json")
    decision = json.loads(file.read_text())
    assert decision["engine"] in (chosen.split()[0], chosen.replace(" ", "-"))
    assert (embed(stack, *texts) * expected).sum(axis=1).min() > 0.9998
    metrics = f"http://127.0.0.1:{stack.environment['TRITON_METRICS_PORT']}"
    with Switch(stack.triton, plan(stack.triton.composing("embedding"), None, MODES, 2), stack.folder) as switch:
        for mode in MODES:
            switch.to(mode)
            assert (embed(stack, *texts[:4]) * expected[:4]).sum(axis=1).min() > 0.9998
            # The replaced process sets the gauge to 0 when it ends, and the new one soon to 1 again.
            stack.wait(lambda: engines(metrics).get("encoder") == chosen, "the metric of the new process")

    def loads() -> list[str]:
        """Return for each load of the encoder whether its engine was measured before."""
        lines = re.findall(
            r"encoder_\d_\d: runs on (.*) in (.*) \((measured before)?", stack.log.removeprefix(log_before)
        )
        assert {f"{engine} {precision}" for engine, precision, _ in lines} == {chosen}
        return [before for *_, before in lines]

    assert loads() == [""] + ["measured before"] * (len(loads()) - 1)
    assert len(loads()) >= len(MODES)
    stack.make("down")
    assert stack.make("up", TRITON_ENGINE="auto").returncode == 0
    assert set(loads()) == {"measured before"}


def test_result_of_a_search_is_applied_while_clients_get_answers(stack, monkeypatch, tmp_path):
    """All models of an ensemble change at once. A configuration that does not load is taken back."""
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)
    local = LocalStack(Settings.load())
    models = stack.folder / "models"
    original = stack.configurations()

    def apply_fields(fields: dict, copies: Path) -> None:
        files, _ = winner_files(fields, stack.triton.composing("embedding"), models, "cpu")
        assert len(files) == len(fields)
        apply(local, {"configs": fields, "files": files}, copies)

    def fields(size: int, count: int) -> dict:
        (group,) = stack.triton.config("tokenizer")["instance_group"]
        instances = {"tokenizer": {"instance_group": [group | {"count": count}]}}
        return {model: {"max_batch_size": size} | instances.get(model, {}) for model in SYSTEM}

    with clients(stack) as refused:
        for size, count in ((16, 2), (64, 1)):
            apply_fields(fields(size, count), tmp_path / str(size))
            configs = stack.triton.composing("embedding")
            assert {model: config["max_batch_size"] for model, config in configs.items()} == dict.fromkeys(SYSTEM, size)
            assert configs["tokenizer"]["instance_group"][0]["count"] == count
        with pytest.raises(UserError, match="parameter 'padding' must be one of none, bucket, max_length, longest"):
            apply_fields({"tokenizer": {"parameters": {"padding": {"string_value": "wide"}}}}, tmp_path / "wide")
    assert refused[:3] == []
    assert stack.triton.config("tokenizer")["parameters"]["padding"]["string_value"] == "none"
    assert "encoder uses configs/cpu.pbtxt of `make tune`, not config.pbtxt\n" in stack.make("status").stdout
    config = models / "encoder/config.pbtxt"
    good = config.read_text()
    config.write_text(good + "# A person's edit.\n")
    assert f"{config} was changed after `make tune` wrote" in stack.make("up").stderr
    config.write_text(good)
    for path in models.glob("*/configs/cpu.pbtxt"):
        path.unlink()
    assert stack.make("up").returncode == 0
    assert stack.configurations() == original
    assert "not config.pbtxt" not in stack.make("status").stdout


def test_wrong_setting_is_one_sentence_and_changes_nothing(stack):
    before = stack.server().pid, stack.triton.index()
    for target, settings, message in (
        ("up", {"LOCAL_STATE": "/tmp/" + "long/" * 20}, "too long for a socket: set LOCAL_STATE to a shorter folder"),
        ("up", {"READY_TIMEOUT": "soon", "SYSTEMS": "embedding lookup"}, "READY_TIMEOUT=soon: must be a whole number"),
        ("loadtest", {"ROUNDS": "2", "SYSTEM": "lookup"}, "ROUNDS=2: must be at least 3"),
    ):
        done = stack.make(target, **settings)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert "in place" not in done.stdout  # checked before anything is assembled
    assert (stack.server().pid, stack.triton.index()) == before


@contextlib.contextmanager
def clients(stack, count: int = 4) -> Iterator[list[str]]:
    """Send requests to `embedding` from several threads; yield the list of those that were refused."""
    refused: list[str] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(PAUSE_S):
            try:
                embed(stack, "a text")
            except OSError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(send)
        try:
            yield refused
        finally:
            stop.set()


def assemble_spam(stack) -> None:
    """Put a system of one small model into the repository, with a record as `make models` writes it."""
    models = stack.folder / "models"
    shutil.copytree(models / "lookup", models / "spam")
    shutil.copytree(models / "lookup", models / "spam_v2")
    task = "text-classification"
    files = ("spam/config.pbtxt", "spam/1/model.onnx")
    Record("spam", (), task, "onnx", RECIPES[task].version, files, "/nowhere", "/nowhere 1").write(models)


def test_systems_change_while_another_answers_every_request(stack):
    """Add, load, edit, unload and remove systems beside `embedding`; the same server goes on."""
    assemble_spam(stack)
    lookup = stack.folder / "models/lookup/config.pbtxt"
    config = lookup.read_text()
    before = stack.server().pid
    with clients(stack) as refused:
        added = stack.make("add", SYSTEM="spam")
        assert added.returncode == 0, added.stderr
        assert "spam: loaded in " in added.stdout and '.env: SYSTEMS="embedding spam"' in added.stdout
        assert set(stack.triton.index()) >= {"embedding", "spam"}

        exact = stack.make("up", SYSTEMS="embedding lookup")
        assert "spam: unloaded" in exact.stdout and "lookup: loaded in " in exact.stdout
        assert set(stack.triton.index()) == {*SYSTEM, "lookup"}
        lookup.write_text(config.replace("max_batch_size: 32", "max_batch_size: 16"))
        assert stack.make("up", SYSTEMS="embedding lookup").returncode == 0
        assert stack.triton.config("lookup")["max_batch_size"] == 16

        assert stack.make("add", SYSTEM="spam").returncode == 0
        removed = stack.make("remove", SYSTEM="spam")
        assert removed.returncode == 0, removed.stderr
        assert "spam: unloaded" in removed.stdout and '.env: SYSTEMS="embedding"' in removed.stdout
    lookup.write_text(config)
    unset_key(stack.environment["TRITON_SETTINGS_FILE"], "SYSTEMS")
    assert refused == []
    assert stack.server().pid == before
    assert set(stack.triton.index()) == {*SYSTEM, "lookup"}
    assert not (stack.folder / "models/spam").exists()
    assert (stack.folder / "models/spam_v2/1/model.onnx").exists()


def test_crashed_server_comes_back_with_the_systems_that_it_had(stack):
    def crashes() -> int:
        (line,) = [line for line in stack.make("status").stdout.splitlines() if line.startswith("triton ")]
        return int(line.split()[-1])

    assert stack.make("up", SYSTEMS="embedding lookup").returncode == 0
    before, crashes_before = stack.server(), crashes()
    before.send_signal(signal.SIGKILL)
    stack.replaced(before)
    stack.wait(lambda: ready_models(stack) == {*SYSTEM, "lookup"}, "both systems")
    assert answers(stack)
    assert crashes() == crashes_before + 1


def test_system_of_a_running_comparison_is_not_removed(stack):
    (stack.folder / "reports").mkdir(exist_ok=True)
    shutil.rmtree(stack.folder / "models/spam", ignore_errors=True)
    shutil.rmtree(stack.folder / "models/spam_v2", ignore_errors=True)
    assemble_spam(stack)
    with exclusive(comparison_lock(Settings.load().replace(**stack.environment)), "the test"):
        done = stack.make("remove", SYSTEM="spam")
        assert "a comparison or a search is running against this stack: wait for it, or stop it" in done.stderr
        assert (stack.folder / "models/spam/1/model.onnx").exists()
        done = stack.make("up", TRITON_LOG_VERBOSE=1)
        assert "a comparison or a search is running against this stack" in done.stderr
        assert stack.server()
        before = stack.stub("encoder").pid
        (stack.folder / "models/encoder/config.pbtxt").touch()
        done = stack.make("up")
        assert "edited configurations wait for the next `make up`" in done.stdout, done.stderr
        assert stack.stub("encoder").pid == before


def test_crashed_python_process_is_replaced_and_keeps_its_override(stack):
    config = stack.triton.config("encoder")
    stack.triton.load("encoder", {name: value for name, value in config.items() if name != "dynamic_batching"})
    for crash in (1, 2):  # twice, because Triton skips a second load of the same config
        stack.stub("encoder").send_signal(signal.SIGKILL)
        stack.wait(lambda n=crash: stack.log.count("watchdog: model 'encoder' is back") >= n, "encoder reloaded")
        assert answers(stack)
    assert "dynamic_batching" not in stack.triton.config("encoder")
    stack.triton.load("encoder", config)
    (line,) = [line for line in stack.make("status").stdout.splitlines() if line.startswith("encoder ")]
    assert line.split()[-1] == "2"


def test_stopped_python_process_keeps_its_requests_and_goes_on(stack):
    """The process stands still until the watchdog continues it, long after Triton would have given up on it."""
    text = {"inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}
    expected = stack.triton.infer("embedding", text)["outputs"]
    for attempt in range(1, ATTEMPTS + 1):
        process = stack.stub("encoder")
        process.suspend()
        try:
            answers_after = stack.triton.infer("embedding", text)["outputs"]
            break
        except TritonError as error:
            # If the watchdog gets no CPU for a second either, another process replaces this one: docs/reliability.md.
            if attempt == ATTEMPTS or not is_unreported(str(error)):
                raise
            stack.wait(lambda: answers(stack), "an answer of the replaced process")
    for answer, before in zip(answers_after, expected, strict=True):
        assert np.allclose(answer["data"], before["data"], atol=1e-3)
    assert stack.stub("encoder") == process
    assert f"process {process.pid} was stopped; continuing it" in stack.log


def test_server_killed_during_a_load_releases_the_caller(stack):
    """A Python process that is starting inherits the server's sockets, which would keep the caller waiting."""
    folder = add_model(stack, "endless", MODEL.format(initialize=ENDLESS))
    before = stack.server()
    with ThreadPoolExecutor() as pool:
        load = pool.submit(stack.triton.load, "endless")
        stack.wait((folder / "loading").exists, "the start of the load")
        before.send_signal(signal.SIGKILL)
        with pytest.raises(TritonError, match="does not answer"):
            load.result(timeout=300)
    shutil.rmtree(folder)
    stack.replaced(before)
    stack.wait(lambda: answers(stack), "an answer of the restarted server")


def test_killed_and_concurrent_make_models_leave_a_whole_repository(new_stack, tmp_path):
    """A killed run leaves nothing; of two runs at once, the second waits and assembles nothing."""
    stack = new_stack()
    elsewhere = {"MODEL_REPOSITORY": tmp_path / "elsewhere"}
    first = stack.start_make("models", **elsewhere, PYTHONPATH=ROOT / "tests/support/stop_before_rename")

    def is_stopped() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(p.status() == psutil.STATUS_STOPPED for p in psutil.Process(first.pid).children(recursive=True))
        return False

    stack.wait(is_stopped, "the end of the assembly", 300)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(COMMAND_S)
    assert list((tmp_path / "elsewhere").glob(".assembling-*/encoder/1/model.onnx"))
    assert not (tmp_path / "elsewhere/encoder/1/model.onnx").exists()

    both = [stack.start_make("models", **elsewhere) for _ in range(2)]
    outputs = [process.communicate(timeout=COMMAND_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("in place" in output for output in outputs) == [False, True]
    assert list((tmp_path / "elsewhere").glob(".assembling-*")) == []
    assert (tmp_path / "elsewhere/encoder/config.pbtxt").read_text() == (
        ROOT / "model_repository/encoder/config.pbtxt"
    ).read_text()


MODEL = """
import os
import pathlib
import signal
import time


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"])
        {initialize}

    def execute(self, requests):
        raise NotImplementedError
"""
STAND_STILL_ONCE = """if not (folder / "stood_still").exists():
            (folder / "stood_still").touch()
            os.kill(os.getpid(), signal.SIGSTOP)"""
ENDLESS = """(folder / "loading").touch()
        time.sleep(600)"""
CONFIG = """
backend: "python"
instance_group [ { kind: KIND_CPU } ]
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


def add_model(stack, name: str, code: str) -> Path:
    folder = stack.folder / "models" / name
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(code)
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def test_process_that_stands_still_during_its_load_is_ended_and_the_model_loaded(stack):
    """Triton would wait for the process to end, and the process for Triton."""
    add_model(stack, "still", MODEL.format(initialize=STAND_STILL_ONCE))
    before = stack.server().pid
    with clients(stack, 1) as refused:
        done = stack.make("add", SYSTEM="still")
    assert done.returncode == 0, done.stderr
    assert "of model 'still' did not report to Triton in time. Loading the system again" in done.stderr
    assert "still: loaded in " in done.stdout
    assert stack.server().pid == before
    assert refused == []


def ready_models(stack) -> set[str]:
    with contextlib.suppress(TritonError):
        return {model for model, (state, _) in stack.triton.index().items() if state == "READY"}
    return set()
