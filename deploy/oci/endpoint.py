"""Send requests to a deployment's /predict, with the interface of triton_transformers.triton.Triton."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InvalidHeader, ReadTimeoutError
from urllib3.util import Retry

from deploy.oci.limits import REQUEST_BYTES
from triton_transformers.cli import err
from triton_transformers.settings import UserError
from triton_transformers.triton import reason

# The service answers within 60 seconds.
TIMEOUT_S = 70
# All attempts carry the first one's signature, which Oracle Cloud accepts for five minutes.
ATTEMPTS = 5
MAXIMUM_PAUSE_S = 30


class PredictRetry(Retry):
    """Retry a busy or failing deployment, with a notice on stderr; the model keeps no state between requests."""

    shows_notice = True

    def new(self, **changes: Any) -> PredictRetry:
        retry = super().new(**changes)
        retry.shows_notice = self.shows_notice
        return retry

    def increment(self, method=None, url=None, response=None, error=None, _pool=None, _stacktrace=None) -> PredictRetry:
        if isinstance(error, ReadTimeoutError):  # the same request would take as long again
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)

    def parse_retry_after(self, retry_after: str) -> float:
        try:
            return super().parse_retry_after(retry_after)
        except InvalidHeader:
            return 0

    def sleep(self, response: Any = None) -> None:
        wished = response and self.get_retry_after(response)
        # urllib3's first pause is zero; clients that were refused together must not return together.
        pause = max(wished or 0, self.get_backoff_time() or random.uniform(0.5, 1))
        if self.shows_notice:
            err.print(f"[dim]{response.status if response else 'no answer'}: trying again in {pause:.0f} s[/]")
        time.sleep(pause)


@dataclass
class Endpoint:
    url: str  # with /predict
    signer: Any
    version: Callable[[str], str] = lambda model: "1"

    def __post_init__(self) -> None:
        self.retry = PredictRetry(
            total=ATTEMPTS - 1,
            status_forcelist={429, *range(500, 600)},
            allowed_methods=None,  # POST too
            raise_on_status=False,
            backoff_factor=2,
            backoff_max=MAXIMUM_PAUSE_S,
            backoff_jitter=1,
            retry_after_max=MAXIMUM_PAUSE_S,
        )
        self.session = requests.Session()
        self.session.mount(self.url, HTTPAdapter(max_retries=self.retry))

    def infer(self, model: str, request: dict, timeout: float = TIMEOUT_S) -> dict:
        """Return Triton's response. Messages quote nothing from the request, which may be confidential."""
        body = json.dumps(request).encode()
        if len(body) > REQUEST_BYTES:
            raise UserError(f"the request has {len(body)} bytes, and a deployment takes at most {REQUEST_BYTES}")
        headers = {"Content-Type": "application/json", "model_name": model, "model_version": self.version(model)}
        timeout = min(timeout, TIMEOUT_S)
        try:
            response = self.session.post(
                self.url, data=body, headers=headers, auth=self.signer, timeout=(10, timeout), allow_redirects=False
            )
        except requests.ReadTimeout:
            raise UserError(
                f"no answer within {timeout:.0f} s; a deployment must answer within 60. Ask for less at once (TOKENS=)"
            ) from None
        except requests.RequestException as error:
            raise UserError(f"{self.url} does not answer ({type(error).__name__}). Check the network") from None
        # From the first answer on, a notice would break the text that is being printed.
        self.retry.shows_notice = False
        if response.status_code != 200:
            raise UserError(sentence(response, model, headers["model_version"]))
        answer = parse(response)
        if answer is None:
            raise UserError(
                f"{self.url} answered, but not as Triton does. Check OCI_ENDPOINT and the proxy{request_id(response)}"
            )
        return answer


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
