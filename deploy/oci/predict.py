"""make predict-oci: PROMPT, and what the deployment answers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from deploy.oci import asked
from deploy.oci import config as configuration
from deploy.oci.asked import Asked
from deploy.oci.config import Deployment
from deploy.oci.deploy import find
from deploy.oci.endpoint import Endpoint
from deploy.oci.service import Service, told
from scripts.cli import err, run
from scripts.generate import pieces, show
from scripts.settings import Settings, UserError

SHOWN = 6  # numbers of an output


def main() -> None:
    settings = Settings.load()
    if not settings["PROMPT"] and not settings["REQUEST"]:
        raise UserError('nothing to ask: make predict-oci PROMPT="My dog is cute, but", or REQUEST=file.json')
    tokens = settings.integer("TOKENS", least=1)
    deployment = configuration.read(settings.path("DEPLOYMENT"))
    model = chosen(deployment, os.environ.get("SYSTEM", ""))
    repository = settings.path("MODEL_REPOSITORY")
    request = read_request(settings.path("REQUEST")) if settings["REQUEST"] else None
    service = Service.of(deployment.account)
    with told():
        url = settings["OCI_ENDPOINT"] or address(service, deployment)
    endpoint = Endpoint(predict_url(url), service.signer, lambda name: version(name, repository))
    err.print(f"[dim]{model}[/]")
    if request:
        show_outputs(endpoint.infer(model, request))
    else:
        answer(endpoint, model, asked.of(model, repository), settings["PROMPT"], tokens)


def chosen(deployment: Deployment, said: str) -> str:
    """SYSTEM, if it was said for this command, or the first that is deployed. A part of one can be asked too."""
    return said or deployment.models.systems[0]


def read_request(path: Path) -> dict:
    try:
        request = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"REQUEST={path}: there is no such file") from None
    except ValueError as error:
        raise UserError(f"REQUEST={path} is no JSON: {error}") from None
    if not isinstance(request, dict) or "inputs" not in request:
        raise UserError(f"REQUEST={path} must be what Triton's infer takes: an object with inputs")
    return request


def address(service: Service, deployment: Deployment) -> str:
    found = find(service, deployment)
    if not found:
        raise UserError(
            f"there is no deployment '{deployment.name}' in {deployment.deployment.compartment_id}: make deploy-oci"
        )
    if found[0].lifecycle_state not in ("ACTIVE", "UPDATING", "NEEDS_ATTENTION"):
        raise UserError(f"{deployment.name} is {found[0].lifecycle_state.lower()}: make deploy-oci waits for it")
    return found[0].model_deployment_url


def predict_url(url: str) -> str:
    return f"{url.rstrip('/').removesuffix('/predict')}/predict"


def version(model: str, repository: Path) -> str:
    """The newest, as Triton serves it unless told otherwise: /predict wants one to be named."""
    numbers = [int(path.name) for path in (repository / model).glob("*/") if re.fullmatch(r"[1-9]\d*", path.name)]
    return str(max(numbers, default=1))


def answer(endpoint: Endpoint, model: str, wants: Asked, prompt: str, tokens: int) -> None:
    if wants.decoupled:
        raise UserError(f"SYSTEM={model} answers piece by piece, which /predict cannot: ask the one without _stream")
    if wants.names & {"TEXT", "prompt"}:
        show(prompt, pieces(endpoint, model, wants.names, prompt, tokens))
        return
    request = wants.text(prompt)
    if request is None:
        raise UserError(
            f"SYSTEM={model} asks for {', '.join(sorted(wants.names))}, which a PROMPT is not: put the whole request "
            "into a file, REQUEST=file.json"
        )
    show_outputs(endpoint.infer(model, request))


def show_outputs(answer: dict) -> None:
    for output in answer["outputs"]:
        data = output["data"]
        first = " ".join(f"{value:.5g}" if isinstance(value, float) else str(value) for value in data[:SHOWN])
        more = " ..." if len(data) > SHOWN else ""
        print(f"{output['name']} {output['datatype']} {output['shape']}: {first}{more}")


if __name__ == "__main__":
    run(main)
