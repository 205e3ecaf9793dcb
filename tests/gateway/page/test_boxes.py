"""The gateway's page, and the route of its boxes, with stand-ins for Triton and Prometheus."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import numpy as np
import pytest
from google.protobuf.text_format import MessageToString
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.edge import monitoring, outages
from gateway.edge.config import Config, Limits
from gateway.edge.counters import Counters
from gateway.edge.monitoring import QUERY, is_loopback
from gateway.page import boxes
from gateway.page.front import STATIC, decimal
from gateway.triton.served import System
from tests.support import page_systems, promql
from tests.support.gateway import Reply, RunningGateway, gateway_before, running_gateway
from tests.support.page_systems import HOSTILE, NAMES, PrometheusStandIn, models
from tests.support.stacks import reserve_ports
from tests.support.triton_stand_in import GENERATION_INPUTS, GENERATION_OUTPUTS, Model, TritonStandIn, embedding
from triton_transformers.files import Measurement, comparison_lock, exclusive
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT, Settings
from triton_transformers.tasks.command import first_command
from triton_transformers.tasks.table import PIPELINE_TASKS
from triton_transformers.tensors import Tensor

KEY = "a-key-of-the-tests"
CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Reader(HTMLParser):
    """The text of a page by system, and what the content security policy forbids."""

    VOID = ("meta", "link", "input", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.systems: dict[str, str] = {}
        self.text = ""
        self.links: list[str] = []
        self.commands: list[str] = []
        self.forbidden: list[str] = []
        self._system = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "article":
            self._system = values["data-system"] or ""
            self.systems[self._system] = ""
        if tag == "pre":
            self.commands.append("")
        if tag == "a" and not (values["href"] or "").startswith("#"):
            self.links.append(values["href"] or "")
        if tag == "style" or (tag == "script" and "src" not in values):
            self.forbidden.append(tag)
        self.forbidden += [name for name in values if name == "style" or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "article":
            self._system = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.forbidden.append(data)
        if "pre" in self._open:
            self.commands[-1] += data
        text = f"{' '.join(data.split())} " if data.strip() else ""
        self.text += text
        if self._system:
            self.systems[self._system] += text


def read(gateway: RunningGateway, **headers: str) -> Reader:
    reply = gateway.get("/", **headers)
    assert reply.status == 200
    reader = Reader(reply.body.decode())
    assert not reader.forbidden
    return reader


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    with page_systems.patience():
        yield


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    with TritonStandIn(*models()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def prometheus() -> Iterator[PrometheusStandIn]:
    with PrometheusStandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def settings(prometheus: PrometheusStandIn, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Return settings with a running Prometheus, and no Grafana or Locust."""
    grafana, locust = reserve_ports(2)
    reports = str(tmp_path_factory.mktemp("reports"))
    ports = {"PROMETHEUS_PORT": prometheus.port, "GRAFANA_PORT": grafana, "LOCUST_PORT": locust}
    return Settings.load().replace(REPORTS=reports, **{name: str(port) for name, port in ports.items()})


@pytest.fixture(scope="module")
def config(triton: TritonStandIn) -> Config:
    return Config(triton=triton.address, systems=NAMES)


@pytest.fixture(scope="module")
def gateway(config: Config, settings: Settings) -> Iterator[RunningGateway]:
    with running_gateway(config, settings) as running:
        yield running


# --- the reading part -------------------------------------------------------------------------------------------------


def test_page_lists_systems_with_state_purpose_and_route(gateway: RunningGateway) -> None:
    reader = read(gateway)
    assert tuple(reader.systems) == NAMES
    assert "12 of 13 systems are ready" in reader.text
    assert "No key is required" in reader.text
    for name, purpose, route in (
        ("embedding", "turns texts into vectors", "POST /v1/embeddings"),
        ("reranker", "sorts texts", "POST /v1/rerank"),
        ("classifier", "classifies texts", "POST /v1/classify"),
        (
            "writer",
            "continues a text, and answers in a chat",
            "POST /v1/chat/completions POST /v1/responses POST /v1/messages POST /tokenize POST /detokenize",
        ),
        ("names", "recognizes names", "POST /models/names"),
        ("answers", "finds the answer to a question", "POST /models/answers"),
        ("mask", "fills in a masked word", "POST /models/mask"),
        ("sparse", "turns a text into a sparse vector", "POST /v1/embeddings POST /embed_sparse"),
        ("images", "turns an image into vectors", "POST /models/images"),
        ("pets", "classifies images", "POST /models/pets"),
        ("clip", "turns texts and images into vectors of one space", "POST /v1/embeddings"),
        ("tensors", "takes x and returns y", "no route"),
    ):
        assert f"{name} ready {purpose}" in reader.systems[name]
        assert route in reader.systems[name]
    assert reader.systems["absent"].startswith("absent not ready absent is not loaded")


@pytest.mark.parametrize(
    ("parameters", "more_inputs", "skills"),
    [
        ({}, (), ""),
        ({"tool_parser": "none"}, (), ""),
        ({"tool_parser": "hermes", "reasoning": "think"}, (), " (tools, reasoning)"),
        ({}, ("images",), " (images)"),
    ],
)
def test_page_shows_the_skills_of_a_chat_model(parameters, more_inputs, skills) -> None:
    system = language_model(*GENERATION_INPUTS, *more_inputs, **parameters)
    assert boxes.purpose(system) == f"continues a text, and answers in a chat{skills}"
    box = boxes.box(system, streams=True)
    assert box.options[0].choices[0] == ("chat", "Answer in a chat")
    assert ("image" in [field.name for field in box.fields]) == bool(more_inputs)
    assert ("tools" in [field.name for field in box.options]) == ("tools" in skills)


def test_model_without_a_chat_template_continues_texts() -> None:
    system = language_model(*(name for name in GENERATION_INPUTS if name != "messages"))
    assert boxes.purpose(system) == "continues a text; no chats, because it has no chat template"
    box = boxes.box(system, streams=True)
    assert (box.chats, [field.name for field in box.fields]) == (False, ["prompt", "max_tokens", "temperature"])


def language_model(*inputs: str, **parameters: str) -> System:
    config = ModelConfig(name="writer")
    for name in inputs:
        config.input.add(name=name, data_type="TYPE_STRING", dims=[-1])
    for name in GENERATION_OUTPUTS:
        config.output.add(name=name, data_type="TYPE_STRING", dims=[-1])
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    return System("writer", {"writer": config})


def test_page_shows_figures_engine_and_batching(gateway: RunningGateway) -> None:
    reader = read(gateway)
    assert (
        "requests/s through the gateway last 60 s 204 95 % answered within last 60 s 21.3 ms "
        "refused/s with 429 last 60 s 3.2 failed/s last 60 s 0 in flight now 12"
    ) in reader.text
    # Triton counted the two failures of the ensemble twice.
    assert (
        "requests/s last 60 s 202 mean latency last 60 s 13.1 ms mean batch last 60 s 7.9 failed/s last 60 s 2.0"
        in reader.systems["embedding"]
    )
    assert (
        "tokenizer dynamic, up to 64 – encoder packed_onnx, openvino bf16 dynamic, up to 64 7.9"
        in (reader.systems["embedding"])
    )
    # The model that streams counts the requests of the other one, too.
    assert "requests/s last 60 s 0.5 mean latency last 60 s 2.8 s tokens/s last 60 s 41.2" in reader.systems["writer"]
    assert (
        "writer generation by writer_stream – writer_stream generation continuous, up to 32 3.4"
        in (reader.systems["writer"])
    )
    assert "requests/s last 60 s 0 mean latency last 60 s – mean batch last 60 s –" in reader.systems["pets"]


def test_page_needs_no_prometheus(config: Config) -> None:
    with running_gateway(config) as running:
        reader = read(running)
    assert "Prometheus does not answer" in reader.text
    assert "embedding ready turns texts into vectors" in reader.systems["embedding"]
    assert "mean latency" not in reader.text


def test_api_does_not_wait_for_the_page(gateway: RunningGateway, prometheus: PrometheusStandIn) -> None:
    replies: list[Reply] = []
    viewer = threading.Thread(target=lambda: replies.append(gateway.get("/")))
    prometheus.received.clear()
    prometheus.gate.clear()
    try:
        viewer.start()
        assert prometheus.received.wait(40)
        assert gateway.post("/v1/embeddings", {"model": "embedding", "input": "text"}).status == 200
        assert not replies
    finally:
        prometheus.gate.set()
        viewer.join(40)
    assert "mean latency" in replies[0].body.decode()


def test_page_does_not_wait_for_a_hanging_prometheus(
    gateway: RunningGateway, prometheus: PrometheusStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "LIMIT_S", 0.05)
    prometheus.gate.clear()
    try:
        assert "Prometheus does not answer" in read(gateway).text
    finally:
        prometheus.gate.set()


def test_page_reports_a_triton_that_does_not_answer(settings: Settings) -> None:
    (port,) = free_ports(1)
    with running_gateway(Config(triton=f"127.0.0.1:{port}", systems=("embedding",)), settings) as running:
        reader = read(running)
    assert "embedding is not ready" in reader.text
    assert "Triton does not answer. make status shows its state" in reader.text


def test_page_names_the_system_that_keeps_triton_from_being_ready() -> None:
    failed = embedding("failed")
    failed.ready = False
    with TritonStandIn(embedding(), failed) as stand_in:
        with running_gateway(Config(triton=stand_in.address, systems=("embedding", "failed"))) as running:
            reader = read(running)
        assert "Triton is not ready: a model of failed is loading, or failed to load. make status shows" in reader.text
        assert "1 of 2 systems are ready" in reader.text
        assert "Triton does not answer" not in reader.text
        assert reader.systems["embedding"].startswith("embedding ready")
        with running_gateway(Config(triton=stand_in.address, systems=("embedding",))) as running:
            reader = read(running)
        assert "Triton is not ready: a model is loading" in reader.text
        assert "embedding is ready" in reader.text


def test_page_shows_a_running_comparison(settings: Settings) -> None:
    compared, other = embedding("compared"), embedding("other")
    lock = comparison_lock(settings)
    with TritonStandIn(compared, other) as stand_in:
        config = Config(triton=stand_in.address, systems=("compared", "other"))
        with running_gateway(config, settings) as running, exclusive(lock, "the test"):
            Measurement("comparison", "compared", "round 1 of 6, dynamic").write(lock)
            compared.ready = False
            reader = read(running)
            assert "A comparison of compared is running (round 1 of 6, dynamic)." in reader.text
            assert reader.systems["compared"].startswith("compared switching")
            assert "failed to load" not in reader.text
            other.ready = False  # which no comparison explains
            assert "a model of other is loading, or failed to load" in read(running).text
            Measurement("overload", "compared").write(lock)  # loads nothing
            assert "a model of compared, other is loading, or failed to load" in read(running).text


def ensemble(name: str, step: str) -> Model:
    model = embedding(name)
    model.settings = {"ensemble_scheduling": {"step": [{"model_name": step, "model_version": -1}]}}
    return model


def test_page_shows_the_steps_of_ensembles() -> None:
    model = embedding("model")
    model.settings = {"backend": "packed_onnx"}
    with gateway_before(ensemble("broken", "lost"), ensemble("outer", "inner"), ensemble("inner", "model"), model) as (
        running,
        _,
    ):
        systems = read(running).systems
    assert "its model lost is not loaded" in systems["broken"]
    assert "model packed_onnx off" in systems["outer"]


def test_page_reports_that_no_system_is_served() -> None:
    with gateway_before() as (running, _):
        assert "No system is served" in read(running).text


def test_served_texts_are_escaped() -> None:
    model = embedding(HOSTILE)
    model.parameters = {"max_batch": HOSTILE}
    model.settings = {"backend": HOSTILE}
    with gateway_before(model) as (running, _):
        page = running.get("/").body.decode()
    assert "<img" not in page
    assert html.escape(HOSTILE, quote=False) in page.replace("&#34;", '"')


def test_page_allows_only_its_own_script_and_style(gateway: RunningGateway) -> None:
    for path, media_type in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        reply = gateway.get(path)
        assert reply.headers["content-type"] == f"{media_type}; charset=utf-8"
        policy = reply.headers["content-security-policy"]
        assert policy.startswith(CLOSED) and "; script-src 'self'; style-src 'self';" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"


# --- links and commands -----------------------------------------------------------------------------------------------


def test_links_lead_to_programs_that_answer(
    config: Config, gateway: RunningGateway, settings: Settings, prometheus: PrometheusStandIn
) -> None:
    assert read(gateway, host="localhost:1").links[:-1] == [f"http://localhost:{prometheus.port}/"]
    # From another machine, the programs on loopback are out of reach.
    assert read(gateway, host="192.0.2.1:8080").links[:-1] == []
    opened = settings.replace(BIND_ADDRESS="0.0.0.0", PROMETHEUS_HOST="")
    with running_gateway(config, opened) as running:
        assert read(running, host="192.0.2.1:8080").links[:-1] == [f"http://192.0.2.1:{prometheus.port}/"]


def test_port_of_another_program_is_not_linked(config: Config, settings: Settings) -> None:
    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, daemon=True).start()
        with running_gateway(config, settings.replace(GRAFANA_PORT=str(listener.getsockname()[1]))) as running:
            reader = read(running)
    assert "Grafana" not in reader.text
    assert "Prometheus" in reader.text


def test_in_a_container_programs_are_found_by_name(
    config: Config, settings: Settings, prometheus: PrometheusStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_URL", f"http://localhost:{prometheus.port}")
    with running_gateway(config, settings.replace(PROMETHEUS_PORT="19090")) as running:
        reader = read(running, host="localhost")
    assert reader.links[:-1] == ["http://localhost:19090/"]
    assert "mean latency last 60 s 13.1 ms" in reader.text


def test_loopback_names_are_recognized() -> None:
    assert all(map(is_loopback, ["localhost", "a.localhost", "127.3.2.1", "[::1]"]))
    assert not any(map(is_loopback, ["192.0.2.1", "[2001:db8::1]", "example.org", "localhost.example.org"]))


def test_latest_reports_are_linked_and_shown(gateway: RunningGateway, settings: Settings) -> None:
    folder = settings.reports
    for kind, file in (("latest", "report"), ("latest-overload", "report"), ("latest-tune", "tune")):
        assert gateway.get(f"/reports/{kind}").status == 404
        made = folder / f"20260101T000000Z-embedding{kind.removeprefix('latest')}"
        made.mkdir()
        (made / f"{file}.html").write_text("<p>a report</p>")
        (folder / kind).symlink_to(made.name)
        assert f"/reports/{kind}" in read(gateway).links
        reply = gateway.get(f"/reports/{kind}")
        assert (reply.status, reply.body) == (200, b"<p>a report</p>")
        assert reply.headers["content-security-policy"] == f"{CLOSED}; style-src 'unsafe-inline'; img-src data:"
    assert gateway.get("/reports/latest-soak").status == 404
    assert gateway.get("/reports/..%2flatest").status == 404


DRAWINGS = (STATIC / "page_answers.js").read_text()
JPEG = b"\xff\xd8\xff, an image"


def test_commands_work_as_printed(gateway: RunningGateway, triton: TritonStandIn, tmp_path) -> None:
    (tmp_path / "image.jpg").write_bytes(JPEG)
    commands = [line for block in read(gateway).commands for line in block.split("\n\n")]
    assert len(commands) == 12  # two for the writer
    for command in commands:
        before = len(triton.received)
        done = subprocess.run(
            ["bash", "-c", re.sub(r"\bcurl ", "curl -sS --fail-with-body ", command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert len(triton.received) > before
    sent = [received.inputs for received in triton.received if received.model == "images"]
    assert sent[-1]["image_bytes"].data[4:] == JPEG  # after its length
    both = [received.inputs for received in triton.received if received.model == "clip"]
    assert {name for inputs in both[-2:] for name in inputs} == {"input_text", "image_bytes"}
    assert "[MASK]" in next(r for r in triton.received if r.model == "mask").inputs["input_text"].texts()[0]


def test_make_add_prints_the_first_command_of_the_page(gateway: RunningGateway, tmp_path) -> None:
    """It knows only the files of the model repository."""
    for model in models():
        (tmp_path / model.name / "1").mkdir(parents=True)
        (tmp_path / model.name / "config.pbtxt").write_text(MessageToString(model.config))
    (tmp_path / "writer/1/chat_template.jinja").touch()
    printed = [first_command(name, tmp_path, "cpu", "http://localhost:1", False) for name in NAMES]
    on_page = [block.split("\n\n")[0] for block in read(gateway, host="localhost:1").commands]
    assert [command for command in printed if command] == on_page
    assert "/v1/chat/completions" in printed[NAMES.index("writer")]
    assert '"temperature": 0' in printed[NAMES.index("writer")]
    (tmp_path / "writer/1/chat_template.jinja").unlink()
    assert "/v1/completions" in first_command("writer", tmp_path, "cpu", "http://localhost:1", False)


@pytest.mark.parametrize("task", PIPELINE_TASKS)
def test_page_has_a_form_and_a_command_for_each_pipeline(task: str, tmp_path) -> None:
    assert re.search(rf"^  (async )?{PIPELINE_TASKS[task].drawing}[(:]", DRAWINGS, re.MULTILINE)
    for file in ("image.jpg", "speech.wav", "clip.mp4"):
        (tmp_path / file).write_bytes(JPEG)
    names = {*PIPELINE_TASKS[task].fields, *PIPELINE_TASKS[task].required, "parameters"}
    answers = {
        "image-segmentation": [],
        "table-question-answering": {},
        "text-to-audio": {"audio": ""},
        "zero-shot-classification": {"labels": [], "scores": []},
    }
    answer = answers.get(task, ["x" * 5000])
    with gateway_before(page_systems.pipeline("m", task, answer)) as (running, triton):
        reader = read(running)
        assert f"m ready {PIPELINE_TASKS[task].purpose}" in reader.systems["m"]
        assert set(re.findall(r'id="m-(\w+)"', running.get("/").body.decode())) == names
        command = re.sub(r"\bcurl ", "curl -sS --fail-with-body ", reader.commands[0])
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        sent = {name: tensor.texts()[0] for name, tensor in triton.received[-1].inputs.items()}
        assert attempt(running, "m").error["param"] == "inputs.inputs"
        (output,) = running.post("/try/m", {"inputs": {"inputs": "a"}}).json["outputs"]
        assert json.loads(output["data"][0]) == answer
    for name, kind in PIPELINE_TASKS[task].fields.items():
        if name in sent and kind in ("image", "audio", "video"):
            assert base64.b64decode(sent[name]) == JPEG
        if name in sent and kind in ("images", "json"):
            json.loads(sent[name])
    assert json.loads(sent["parameters"]).keys() >= PIPELINE_TASKS[task].required.keys()


def test_hostile_host_is_not_repeated(gateway: RunningGateway) -> None:
    page = gateway.get("/", host='localhost:1"$(reboot)').body.decode()
    assert "reboot" not in page
    assert "curl http://localhost" in page


# --- keys -------------------------------------------------------------------------------------------------------------


def test_page_asks_browsers_for_the_key(config: Config) -> None:
    with running_gateway(replace(config, keys=(sha256(KEY.encode()).digest(),))) as running:
        for path in ("/", "/page.js", "/reports/latest"):
            reply = running.get(path)
            assert reply.status == 401
            assert reply.headers["www-authenticate"].startswith("Basic ")
        assert running.post("/try/names", {"inputs": {"input_text": "text"}}).status == 401
        basic = f"Basic {base64.b64encode(f'anybody:{KEY}'.encode()).decode()}"
        reader = read(running, authorization=basic)
        assert "Every request needs a key" in reader.text
        command = reader.commands[0].replace("curl ", "curl -sS --fail-with-body ")
        done = subprocess.run(["bash", "-c", command], env=os.environ | {"API_KEY": KEY}, capture_output=True)
        assert done.returncode == 0, done.stderr


# --- POST /try/{system} -----------------------------------------------------------------------------------------------


def attempt(gateway: RunningGateway, system: str, **inputs: str) -> Reply:
    return gateway.post(f"/try/{system}", {"inputs": inputs})


def test_try_returns_the_outputs_shortened(gateway: RunningGateway) -> None:
    reply = attempt(gateway, "names", input_text="text")
    assert (reply.status, reply.json["model"]) == (200, "names")
    label = {"name": "label", "datatype": "BYTES", "shape": [1, 2], "data": ["PER", HOSTILE]}
    assert reply.json["outputs"][0] == label
    assert reply.json["outputs"][2]["data"] == [0, 24]
    (output,) = attempt(gateway, "images", image_bytes="aW1hZ2U=").json["outputs"]
    assert (output["shape"], len(output["data"])) == ([1, 500], 256)


def test_try_shortens_long_texts_and_writes_valid_json() -> None:
    tensors = [
        Tensor.from_texts("text", ["x" * 10_000], [1, 1]),
        Tensor.from_values("numbers", "FP32", [[np.nan, np.inf, 1.5]]),
        Tensor("brain", "BF16", [1, 2], b"\0\0\0\0"),
        Tensor.from_values("flags", "BOOL", [[True, False]]),
    ]
    with gateway_before(Model("odd", {"input_text": ("STRING", [1])}, {}, lambda inputs: [tensors])) as (running, _):
        outputs = attempt(running, "odd", input_text="text").json["outputs"]
    assert [output["data"] for output in outputs] == [["x" * 4096], [None, None, 1.5], [], [True, False]]
    assert outputs[2]["shape"] == [1, 2]


def test_try_fits_models_without_a_batch_dimension() -> None:
    tensors = [Tensor.from_texts("out", [" word"])]
    model = Model("gpt2_ensemble", {"TEXT": ("STRING", [-1])}, {"out": ("STRING", [-1])}, lambda _: [tensors], 0)
    with gateway_before(model) as (running, triton):
        assert attempt(running, "gpt2_ensemble", TEXT="a").json["outputs"][0]["data"] == [" word"]
        assert list(triton.received[0].inputs["TEXT"].shape) == [1]


@pytest.mark.parametrize(
    ("system", "inputs", "status", "param", "message"),
    [
        ("absent", {}, 503, "model", "not ready"),
        ("encoder", {"input_text": "text"}, 404, "system", "does not exist"),
        ("answers", {"question": "?"}, 400, "inputs.context", "requires this input"),
        ("answers", {"question": "", "context": "text"}, 400, "inputs.question", "requires this input"),
        ("names", {"input_text": "text", "other": "text"}, 400, "inputs.other", "takes the inputs input_text"),
        ("images", {}, 400, "inputs.image_bytes", "requires this input"),
        ("tensors", {"x": "1"}, 400, "system", "takes x, which are not texts or images"),
        ("writer_stream", {"text_input": "text"}, 400, "system", "streams"),
    ],
)
def test_try_refuses_wrong_requests(gateway, monkeypatch, system, inputs, status, param, message) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 0)
    reply = attempt(gateway, system, **inputs)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert message in reply.error["message"]


def test_try_has_the_limits_of_the_api(config: Config) -> None:
    with running_gateway(replace(config, limits=Limits(body=1000))) as running:
        assert attempt(running, "names", input_text="x" * 2000).status == 413
        assert 'data-body-limit="1000"' in running.get("/").body.decode()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_query_reads_metrics_that_exist() -> None:
    own = {family.name for family in Counters().registry.collect()}
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE))
    for metric in promql.metrics(QUERY):
        assert re.sub("_(total|bucket)$", "", metric) in own or metric in documented, metric


def test_numbers_are_short() -> None:
    cases = {None: "–", 0: "0", 0.004: "0.004", 0.25: "0.2", 7.94: "7.9", 214.6: "215"}
    assert {value: decimal(value) for value in cases} == cases
