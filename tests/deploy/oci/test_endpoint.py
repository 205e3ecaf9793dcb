"""`make predict-oci`: its requests, its retries, and its messages about failures."""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from deploy.oci import endpoint
from deploy.oci.deployment import Deployment, Models
from deploy.oci.endpoint import MAXIMUM_PAUSE_S, Endpoint
from deploy.oci.predict import (
    answer_prompt,
    check_prompt,
    choose_model,
    newest_version,
    predict_url,
    read_form,
    read_request,
)
from tests.support.http_servers import DROP, HANG, Script, script
from tests.support.stacks import wait_for
from triton_transformers import settings as common
from triton_transformers.model_config import ModelConfig
from triton_transformers.settings import ROOT, Settings, UserError

SECRET = "a confidential prompt"
OK = (200, {"outputs": [{"name": "out", "datatype": "BYTES", "shape": [1], "data": [" on"]}]}, {})


@dataclass
class Service:
    """Stands in for a deployment: gives its answers in turn, then repeats the last one."""

    script: Script
    pauses: list[float] = field(default_factory=list)

    def endpoint(self, *answers: object, **options: object) -> Endpoint:
        self.script.received.clear()
        self.script.answers = [answer if answer in (HANG, DROP) else sent(*answer) for answer in answers]
        return Endpoint(f"{self.script.url}/predict", None, **options)

    @property
    def requests(self) -> list[tuple[dict, dict]]:
        """Return the headers and the body of each request."""
        return [(request.headers, json.loads(request.body)) for request in self.script.received]


def sent(status: int, content: object, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return status, {"opc-request-id": "R/1"} | headers, body


@pytest.fixture(scope="module")
def server() -> Iterator[Script]:
    with script([]) as server:
        yield server


@pytest.fixture
def service(server, monkeypatch) -> Service:
    """Return a service whose clients do not sleep, and wait one second and not half of it before the first retry."""
    service = Service(server)
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=service.pauses.append))
    monkeypatch.setattr(endpoint.random, "uniform", lambda low, high: high)
    return service


def ask(one: Endpoint) -> dict:
    return one.infer("gpt2_ensemble", {"inputs": [{"name": "TEXT", "data": [SECRET]}]})


def test_headers_name_the_model(service, monkeypatch, capsys):
    assert ask(service.endpoint(OK, version=lambda model: "7")) == OK[1]
    ((headers, body),) = service.requests
    assert (headers["model_name"], headers["model_version"]) == ("gpt2_ensemble", "7")
    assert body["inputs"][0]["data"] == [SECRET]
    assert service.pauses == []
    one = service.endpoint(OK, (429, {}, {}), OK)
    ask(one)
    ask(one)
    assert (len(service.requests), capsys.readouterr().err) == (3, "")  # a notice would interrupt the text
    monkeypatch.setattr(endpoint, "REQUEST_BYTES", 50)
    with pytest.raises(UserError, match="bytes, and a deployment takes at most 50"):
        ask(one)
    assert len(service.requests) == 3


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, "no answer"])
def test_request_is_repeated_until_it_succeeds(service, capsys, status):
    first, second = (DROP, DROP) if status == "no answer" else ((status, {}, {}), (status, b"<html>", {}))
    assert ask(service.endpoint(first, second, OK)) == OK[1]
    assert len(service.requests) == 3
    assert service.pauses == [1, 4]
    assert capsys.readouterr().err == f"{status}: trying again in 1 s\n{status}: trying again in 4 s\n"


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [
        *(("3", 3.0, 3.0), ("0", 1.0, 1.0), ("soon", 1.0, 1.0), ("9999", MAXIMUM_PAUSE_S, MAXIMUM_PAUSE_S)),
        # The id must not contain the time, because all workers of xdist must collect the same names.
        pytest.param(email.utils.formatdate(time.time() + 1e5, usegmt=True), 2.0, MAXIMUM_PAUSE_S, id="date"),
    ],
)
def test_retry_after_is_respected(service, retry_after, least, most):
    ask(service.endpoint((429, {}, {"Retry-After": retry_after}), OK))
    assert least <= service.pauses[0] <= most


def test_clients_wait_differently(service, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=service.pauses.append))
    for _ in range(5):
        ask(service.endpoint((429, {}, {}), OK))
    assert len({pause for pause in service.pauses if 0.5 <= pause <= 1}) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"code": "NotAuthenticated"}, {}), "rejects the signature (401)"),
        ((404, {"code": "NotAuthorizedOrNotFound"}, {}), "it has no version 1 of gpt2_ensemble, or you have no"),
        ((413, {}, {}), "larger than a deployment takes (413)"),
        ((400, {"error": "TEXT is empty"}, {}), "gpt2_ensemble refused the request (400): TEXT is empty"),
        ((302, b"", {}), "gpt2_ensemble refused the request (302)"),
        ((503, {"message": "busy."}, {}), "failed, also after 5 attempts (503): busy (opc-request-id R/1"),
        ((429, {"message": "LB bandwidth limit exceeded."}, {}), "(429): LB bandwidth limit exceeded. Send fewer"),
        ((200, b"<html>", {}), "answered, but not as Triton does"),
        *[((200, body, {}), "answered, but not as Triton does") for body in ({}, [], {"outputs": [{"name": "out"}]})],
        (HANG, "s; a deployment must answer within 60"),
        (DROP, "/predict does not answer (ConnectionError)"),
    ],
)
def test_failure_is_a_sentence(service, monkeypatch, answer, message):
    if answer == HANG:
        monkeypatch.setattr(endpoint, "TIMEOUT_S", 1.0)  # in which the server must read the request
    with pytest.raises(UserError) as error:
        ask(service.endpoint(answer))
    assert message in str(error.value)
    assert SECRET not in str(error.value)
    is_repeated = answer == DROP or (answer != HANG and answer[0] in (429, 503))
    assert service.pauses == ([1, 4, 8, 16] if is_repeated else [])
    wait_for(lambda: len(service.requests) > len(service.pauses), "the request", 60, str)
    assert len(service.requests) == len(service.pauses) + 1


# --- prompts ----------------------------------------------------------------------------------------------------------


def form(model: str) -> ModelConfig:
    return read_form(model, ROOT / "model_repository")


def test_answer_follows_the_prompt(service, capsys):
    """tests/scripts/stack/test_generate.py shows how other models continue a text."""
    answer = (200, {"outputs": [{"name": "out", "data": [" and on"]}]}, {})
    answer_prompt(service.endpoint(answer), "gpt2_generate", form("gpt2_generate"), "go", tokens=5)
    assert [tensor["data"] for tensor in service.requests[0][1]["inputs"]] == [["go"], [5]]
    assert capsys.readouterr().out == "go and on\n"


def test_vector_is_shown_shortened(service, capsys):
    vector = {"name": "output__0", "datatype": "FP32", "shape": [1, 8], "data": [0.123456789] * 8}
    one = service.endpoint((200, {"outputs": [vector]}, {}))
    answer_prompt(one, "embedding", form("embedding"), "a text", 5)
    assert capsys.readouterr().out == f"output__0 FP32 [1, 8]: {' '.join(['0.12346'] * 6)} ...\n"
    ((_, body),) = service.requests
    assert body == {"inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("falcon7b_stream", "SYSTEM=falcon7b_stream streams its answer, which /predict does not support"),
        ("vit_ensemble", "SYSTEM=vit_ensemble takes image, image_bytes, not a PROMPT"),
        ("gpt2_decoder", "SYSTEM=gpt2_decoder takes logits"),
        ("gpt2", "SYSTEM=gpt2 takes tensors, not a PROMPT"),
    ],
)
def test_model_that_takes_no_prompt_is_refused(model, message):
    with pytest.raises(UserError, match=message):
        check_prompt(model, form(model))


@pytest.mark.parametrize(
    ("dotenv", "command_line", "model"),
    [
        ("", "", "first"),
        ("SYSTEM=second\n", "", "second"),
        ("SYSTEM=embedding\n", "", "embedding"),  # the default of .env.example, but chosen
        ("SYSTEM=second\n", "third", "third"),
    ],
)
def test_system_is_read_from_dotenv(tmp_path, monkeypatch, dotenv, command_line, model):
    (tmp_path / ".env").write_text(dotenv)
    monkeypatch.setattr(common, "DOTENV", tmp_path / ".env")
    monkeypatch.setenv("SYSTEM", command_line)
    deployment = Deployment.model_construct(models=Models(systems=["first", "second"]))
    assert choose_model(Settings.load(), deployment) == model


def test_request_names_the_newest_version(tmp_path):
    for name in ("1", "3", "12", "old", "0"):
        (tmp_path / "m" / name).mkdir(parents=True)
    assert (newest_version("m", tmp_path), newest_version("elsewhere", tmp_path)) == ("12", "1")
    assert {predict_url(url) for url in ("http://x/o", "http://x/o/", "http://x/o/predict")} == {"http://x/o/predict"}
    with pytest.raises(UserError, match=r"SYSTEM=nowhere: .* has no nowhere/config\.pbtxt"):
        read_form("nowhere", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("{", "is not valid JSON"), ("[]", "must hold a request as Triton's infer takes it")],
)
def test_wrong_request_file_is_refused(tmp_path, text, message):
    path = tmp_path / "request.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_request(path)
