"""Send requests to a deployment's /predict, with the interface of triton_transformers.triton.Triton."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from deploy.oci.limits import REQUEST_BYTES
from triton_transformers.cli import err
from triton_transformers.settings import UserError
from triton_transformers.triton_messages import reason

# The service answers within 60 seconds.
TIMEOUT_S = 70
# Before the second attempt, the third, ...
PAUSES_S = (1, 4, 8, 16)
ATTEMPTS = len(PAUSES_S) + 1
MAXIMUM_PAUSE_S = 30


@dataclass
class Endpoint:
    url: str  # with /predict
    signer: Any
    version: Callable[[str], str] = lambda model: "1"
    shows_notices: bool = True
    session: requests.Session = field(default_factory=requests.Session)

    def infer(self, model: str, request: dict, timeout: float = TIMEOUT_S) -> dict:
        """Return Triton's response. Messages quote nothing from the request, which may be confidential.

        Send the request again if the deployment is busy or fails: the model keeps no state between requests.
        """
        body = json.dumps(request).encode()
        if len(body) > REQUEST_BYTES:
            raise UserError(f"the request has {len(body)} bytes, and a deployment takes at most {REQUEST_BYTES}")
        headers = {"Content-Type": "application/json", "model_name": model, "model_version": self.version(model)}
        response = self._post(body, headers, min(timeout, TIMEOUT_S))
        for pause in PAUSES_S:
            if isinstance(response, requests.Response) and response.status_code not in (429, *range(500, 600)):
                break
            self._wait(pause, response)
            response = self._post(body, headers, min(timeout, TIMEOUT_S))
        if isinstance(response, requests.ConnectionError):
            raise UserError(f"{self.url} does not answer ({type(response).__name__}). Check the network")
        # From the first answer on, a notice would break the text that is being printed.
        self.shows_notices = False
        if response.status_code != 200:
            raise UserError(sentence(response, model, headers["model_version"]))
        answer = parse(response)
        if answer is None:
            raise UserError(
                f"{self.url} answered, but not as Triton does. Check OCI_ENDPOINT and the proxy{request_id(response)}"
            )
        return answer

    def _post(
        self, body: bytes, headers: dict[str, str], timeout: float
    ) -> requests.Response | requests.ConnectionError:
        try:
            return self.session.post(
                self.url, data=body, headers=headers, auth=self.signer, timeout=(10, timeout), allow_redirects=False
            )
        except requests.ReadTimeout:  # the same request would take as long again
            raise UserError(
                f"no answer within {timeout:.0f} s; a deployment must answer within 60. Ask for less at once (TOKENS=)"
            ) from None
        except requests.ConnectionError as error:
            return error
        except requests.RequestException as error:
            raise UserError(f"{self.url} does not answer ({type(error).__name__}). Check OCI_ENDPOINT") from None

    def _wait(self, pause: float, refusal: requests.Response | requests.ConnectionError) -> None:
        # Clients that were refused together must not return together.
        pause *= random.uniform(0.5, 1)
        cause: object = "no answer"
        if isinstance(refusal, requests.Response):
            cause = refusal.status_code
            with contextlib.suppress(InvalidHeader):
                wished = Retry().parse_retry_after(refusal.headers.get("Retry-After", "0"))
                pause = min(max(wished, pause), MAXIMUM_PAUSE_S)
        if self.shows_notices:
            err.print(f"[dim]{cause}: trying again in {pause:.0f} s[/]")
        time.sleep(pause)


def parse(response: requests.Response) -> dict | None:
    """Return Triton's response, or None if it is something else."""
    try:
        answer = response.json()
        is_tritons = all(isinstance(output["data"], list) and output["name"] for output in answer["outputs"])
        return answer if is_tritons else None
    except (ValueError, TypeError, LookupError):
        return None


def sentence(response: requests.Response, model: str, version: str) -> str:
    details = f": {message(response)}" if message(response) else ""
    match response.status_code:
        case 401:
            problem = (
                "the deployment rejects the signature (401). Check the account in deployment.toml and this machine's "
                "clock. Renew an expired session with `oci session refresh`"
            )
        case 404:
            problem = (
                f"no such deployment, or it has no version {version} of {model}, or you have no permission (404). "
                "Check SYSTEM, models.systems in deployment.toml, and the policies in docs/oci.md"
            )
        case 413:
            problem = "the request is larger than a deployment takes (413)"
        case 429:
            problem = (
                f"too many requests, also after {ATTEMPTS} attempts (429){details}. Send fewer, or raise "
                "instances.bandwidth_mbps or instances.count and run make deploy-oci"
            )
        case status if status >= 500:
            problem = f"{model} failed, also after {ATTEMPTS} attempts ({status}){details}"
        case status:
            problem = f"{model} refused the request ({status}){details}"
    return problem + request_id(response)


def message(response: requests.Response) -> str:
    """Return the error message of Triton or of the service."""
    try:
        body = response.json()
    except ValueError:
        return ""
    text = (body.get("error") or body.get("message")) if isinstance(body, dict) else ""
    return reason(str(text or "")).rstrip(".")


def request_id(response: requests.Response) -> str:
    identifier = response.headers.get("opc-request-id")
    return f" (opc-request-id {identifier})" if identifier else ""
