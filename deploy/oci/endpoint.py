"""A deployment's /predict: signed, asked again while it is busy, and with the face of scripts.common.triton.Triton."""

from __future__ import annotations

import contextlib
import email.utils
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests

from deploy.oci.limits import REQUEST_BYTES
from scripts.common.cli import err
from scripts.common.settings import UserError
from scripts.common.triton import reason

# The service's own limit on an answer, and a little.
TIMEOUT_S = 70
ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass
class Endpoint:
    url: str  # with /predict
    signer: Any
    version: Callable[[str], str] = lambda model: "1"
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    session: requests.Session = field(default_factory=requests.Session)
    has_answered: bool = False

    def infer(self, model: str, request: dict, timeout: float = TIMEOUT_S) -> dict:
        """No message holds anything of the request: what is asked is nobody else's business."""
        body = json.dumps(request).encode()
        if len(body) > REQUEST_BYTES:
            raise UserError(f"the request has {len(body)} bytes, and a deployment takes {REQUEST_BYTES}")
        headers = {"Content-Type": "application/json", "model_name": model, "model_version": self.version(model)}
        answer = self.answered(body, headers, min(timeout, TIMEOUT_S))
        if answer.status_code != 200:
            raise UserError(sentence(answer, model, headers["model_version"]))
        if (found := outputs(answer)) is None:
            raise UserError(f"{self.url} answered, and not as Triton does{request_id(answer)}")
        return found

    def answered(self, body: bytes, headers: dict[str, str], timeout: float) -> requests.Response:
        """Asked again, ever later, while there are too many requests or the service fails."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                # Signed anew each time: a signature is for a moment.
                answer = self.session.post(
                    self.url, data=body, headers=headers, auth=self.signer, timeout=(10, timeout), allow_redirects=False
                )
            except requests.ReadTimeout:
                raise UserError(
                    f"no answer within {timeout:.0f} s, and a deployment has 60: ask for less at once (TOKENS=)"
                ) from None
            except requests.RequestException as error:
                if attempt == ATTEMPTS:
                    raise UserError(f"{self.url} does not answer ({type(error).__name__})") from None
                self.wait(self.pause(attempt, None), "no answer")
                continue
            if attempt == ATTEMPTS or not (answer.status_code == 429 or answer.status_code >= 500):
                self.has_answered = True
                return answer
            self.wait(self.pause(attempt, answer.headers.get("Retry-After")), str(answer.status_code))
        raise AssertionError("the last attempt returns or raises")

    def wait(self, pause: float, why: str) -> None:
        if not self.has_answered:  # what answered before is amid its text
            err.print(f"[dim]{why}: asking again in {pause:.0f} s[/]")
        self.sleep(pause)

    def pause(self, attempt: int, wished: str | None) -> float:
        """Twice as long each time, and never the same for two clients; as the service wishes, if it does."""
        usual = FIRST_PAUSE_S * 2 ** (attempt - 1) * (0.5 + self.jitter() / 2)
        return min(LONGEST_PAUSE_S, max(usual, seconds(wished)))


def outputs(answer: requests.Response) -> dict | None:
    try:
        found = answer.json()
        return found if all(isinstance(each["data"], list) and each["name"] for each in found["outputs"]) else None
    except (ValueError, TypeError, LookupError):
        return None


def seconds(wished: str | None) -> float:
    """Of a Retry-After: a number, or a date."""
    with contextlib.suppress(ValueError, TypeError):
        return float(wished or 0)
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(wished).timestamp() - time.time()
    return 0


def sentence(answer: requests.Response, model: str, version: str) -> str:
    said = f": {message(answer)}" if message(answer) else ""
    match answer.status_code:
        case 401:
            what = (
                "the deployment does not take the signature (401): check the account that deployment.toml names, and "
                "this machine's clock; a session that has ended goes on with `oci session refresh`"
            )
        case 404:
            what = (
                f"there is no such deployment, it has no version {version} of {model}, or you may not ask it (404): "
                "check SYSTEM, models.systems of deployment.toml, and the policies of docs/oci.md"
            )
        case 413:
            what = "the request is larger than a deployment takes (413)"
        case 429:
            what = (
                f"too many requests, also after {ATTEMPTS} attempts (429){said}. Ask less often, or raise "
                "instances.bandwidth_mbps or instances.count and run make deploy-oci"
            )
        case status if status >= 500:
            what = f"{model} failed, also after {ATTEMPTS} attempts ({status}){said}"
        case status:
            what = f"{model} refused the request ({status}){said}"
    return what + request_id(answer)


def message(answer: requests.Response) -> str:
    """Triton's words or the service's."""
    try:
        body = answer.json()
    except ValueError:
        return ""
    said = (body.get("error") or body.get("message")) if isinstance(body, dict) else ""
    return reason(str(said or "")).rstrip(".")


def request_id(answer: requests.Response) -> str:
    found = answer.headers.get("opc-request-id")
    return f" (opc-request-id {found})" if found else ""
