"""make predict-oci: what it asks, how often, and what it says when that fails."""

from __future__ import annotations

import email.utils
import json
import time
from dataclasses import dataclass, field

import pytest
import requests

from deploy.oci import endpoint
from deploy.oci.endpoint import ATTEMPTS, LONGEST_PAUSE_S, Endpoint, seconds
from deploy.oci.predict import answer, check_prompt, predict_url, read_request, show_outputs, version
from deploy.oci.request_form import RequestForm
from scripts.common.settings import ROOT, UserError

SECRET = "what nobody else is to read"
OK = (200, {"outputs": [{"name": "out", "datatype": "BYTES", "shape": [1], "data": [" on"]}]}, {})


@dataclass
class Session:
    """Stands in for the network: answers in turn, the last for ever."""

    answers: list
    asked: list = field(default_factory=list)

    def post(self, url: str, data: bytes, headers: dict, **_: object) -> requests.Response:
        self.asked.append((url, json.loads(data), headers))
        given = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(given, Exception):
            raise given
        status, body, more = given
        response = requests.Response()
        response.status_code = status
        response._content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response.headers.update({"opc-request-id": "R/1"} | more)
        return response


def endpoint_of(*answers, **how) -> tuple[Endpoint, Session, list[float]]:
    session, slept = Session(list(answers)), []
    return Endpoint("http://x/predict", None, session=session, sleep=slept.append, **how), session, slept


def ask(one: Endpoint) -> dict:
    return one.infer("gpt2_ensemble", {"inputs": [{"name": "TEXT", "data": [SECRET]}]})


def test_the_headers_say_which_model():
    one, session, slept = endpoint_of(OK, version=lambda model: "7")
    assert ask(one) == OK[1]
    ((url, body, headers),) = session.asked
    assert (url, headers["model_name"], headers["model_version"]) == ("http://x/predict", "gpt2_ensemble", "7")
    assert body["inputs"][0]["data"] == [SECRET]
    assert slept == []


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_asked_again_until_it_answers(status):
    one, session, slept = endpoint_of((status, {}, {}), (status, b"<html>", {}), OK, jitter=lambda: 1.0)
    assert ask(one) == OK[1]
    assert len(session.asked) == 3
    assert slept == [1.0, 2.0]


def test_no_two_clients_wait_alike():
    waits = []
    for share in (0.0, 0.5, 1.0):
        one, _, slept = endpoint_of((429, {}, {}), OK, jitter=lambda share=share: share)
        ask(one)
        waits += slept
    assert waits == [0.5, 0.75, 1.0]


@pytest.mark.parametrize(("wished", "waited"), [("3", 3.0), ("0", 1.0), ("soon", 1.0), ("9999", LONGEST_PAUSE_S)])
def test_retry_after(wished, waited):
    one, _, slept = endpoint_of((429, {}, {"Retry-After": wished}), OK, jitter=lambda: 1.0)
    ask(one)
    assert slept == [waited]


def test_retry_after_as_a_date():
    assert 15 < seconds(email.utils.formatdate(time.time() + 20, usegmt=True)) <= 20
    assert seconds(None) == 0


def test_it_does_not_ask_for_ever():
    one, session, slept = endpoint_of((503, {"message": "busy."}, {}), jitter=lambda: 1.0)
    with pytest.raises(
        UserError, match=r"gpt2_ensemble failed, also after 6 attempts \(503\): busy \(opc-request-id R/1"
    ):
        ask(one)
    assert len(session.asked) == ATTEMPTS
    assert slept == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((401, {"code": "NotAuthenticated"}, {}), "does not take the signature (401)"),
        (
            (404, {"code": "NotAuthorizedOrNotFound"}, {}),
            "it has no version 1 of gpt2_ensemble, or you may",
        ),
        ((413, {}, {}), "larger than a deployment takes (413)"),
        ((400, {"error": "TEXT is empty"}, {}), "gpt2_ensemble refused the request (400): TEXT is empty"),
        ((302, b"", {}), "gpt2_ensemble refused the request (302)"),
        ((429, {"message": "LB bandwidth limit exceeded."}, {}), "(429): LB bandwidth limit exceeded. Ask less often"),
        ((200, b"<html>", {}), "answered, and not as Triton does"),
        *[((200, body, {}), "answered, and not as Triton does") for body in ({}, [], {"outputs": [{"name": "out"}]})],
        (requests.ReadTimeout(), "no answer within 70 s, and a deployment has 60"),
        (requests.ConnectionError(SECRET), "http://x/predict does not answer (ConnectionError)"),
    ],
)
def test_what_is_said(given, said):
    one, session, _ = endpoint_of(given)
    with pytest.raises(UserError) as error:
        ask(one)
    assert said in str(error.value)
    assert SECRET not in str(error.value)
    again = isinstance(given, requests.ConnectionError) or (isinstance(given, tuple) and given[0] == 429)
    assert len(session.asked) == (ATTEMPTS if again else 1)


def test_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(endpoint, "REQUEST_BYTES", 50)
    one, session, _ = endpoint_of(OK)
    with pytest.raises(UserError, match="bytes, and a deployment takes 50"):
        ask(one)
    assert session.asked == []


# --- what is asked for ------------------------------------------------------------------------------------------------


def continued(*pieces: str, model: str = "gpt2_ensemble", tokens: int = 5, prompt: str = " two  spaces") -> Session:
    answers = [(200, {"outputs": [{"name": "out", "data": [piece]}]}, {}) for piece in pieces]
    one, session, _ = endpoint_of(*answers)
    answer(one, model, RequestForm.read(model, ROOT / "model_repository"), prompt, tokens)
    return session


def test_the_loop_appends_as_it_is(capsys):
    session = continued("", "")
    assert capsys.readouterr().out == " two  spaces\n"
    session = continued(" a", "  b", "\n", "")
    assert capsys.readouterr().out == " two  spaces a  b\n\n"
    assert [body["inputs"][0]["data"] for _, body, _ in session.asked] == [
        [" two  spaces"],
        [" two  spaces a"],
        [" two  spaces a  b"],
        [" two  spaces a  b\n"],
    ]


def test_one_call(capsys):
    session = continued(" and on", model="gpt2_generate", prompt="go", tokens=9)
    assert [each["data"] for each in session.asked[0][1]["inputs"]] == [["go"], [9]]
    assert capsys.readouterr().out == "go and on\n"
    continued("go and on", model="falcon7b", prompt="go")
    assert capsys.readouterr().out == "go and on\n"


def test_numbers(capsys):
    vector = {"name": "output__0", "datatype": "FP32", "shape": [1, 8], "data": [0.123456789] * 8}
    one, session, _ = endpoint_of((200, {"outputs": [vector]}, {}))
    answer(one, "embedding", RequestForm.read("embedding", ROOT / "model_repository"), "a text", 5)
    assert capsys.readouterr().out == f"output__0 FP32 [1, 8]: {' '.join(['0.12346'] * 6)} ...\n"
    assert session.asked[0][1] == {
        "inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]
    }
    show_outputs({"outputs": [{"name": "label", "datatype": "BYTES", "shape": [1, 1], "data": ["spam"]}]})
    assert capsys.readouterr().out == "label BYTES [1, 1]: spam\n"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("falcon7b_stream", "SYSTEM=falcon7b_stream answers piece by piece, which /predict cannot"),
        ("vit_ensemble", "SYSTEM=vit_ensemble asks for image, image_bytes, which a PROMPT is not"),
        ("encoder", "SYSTEM=encoder asks for attention_mask, input_ids"),
        ("gpt2_decoder", "SYSTEM=gpt2_decoder asks for logits"),
        ("gpt2", "SYSTEM=gpt2 asks for tensors, which a PROMPT is not"),
    ],
)
def test_what_a_prompt_cannot_do(model, said):
    with pytest.raises(UserError, match=said):
        check_prompt(model, RequestForm.read(model, ROOT / "model_repository"))


def test_a_model_that_is_nowhere(tmp_path):
    with pytest.raises(UserError, match=r"SYSTEM=nowhere: .* has no nowhere/config\.pbtxt"):
        RequestForm.read("nowhere", tmp_path)


def test_the_newest_version(tmp_path):
    for name in ("1", "3", "12", "old", "0"):
        (tmp_path / "m" / name).mkdir(parents=True)
    assert version("m", tmp_path) == "12"
    assert version("elsewhere", tmp_path) == "1"


def test_the_address_with_and_without_predict():
    assert {predict_url(url) for url in ("http://x/o", "http://x/o/", "http://x/o/predict")} == {"http://x/o/predict"}


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "there is no such file"), ("{", "is no JSON"), ("[]", "must be what Triton's infer takes")],
)
def test_a_request_in_a_file(tmp_path, text, said):
    path = tmp_path / "request.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_request(path)
    path.write_text('{"inputs": []}')
    assert read_request(path) == {"inputs": []}
