"""make predict-oci: PROMPT, and what the deployment answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.markup import escape

from deploy.oci import deployment as configuration
from deploy.oci.client import Service, told
from deploy.oci.deploy import find
from deploy.oci.deployment import Deployment
from deploy.oci.endpoint import Endpoint
from deploy.oci.request_form import RequestForm
from scripts.common.cli import err, run
from scripts.common.model_config import with_steps
from scripts.common.settings import Settings, UserError
from scripts.stack.generate import pieces, show

SHOWN = 6  # numbers of an output
MENDS = {"FAILED": "makes it anew", "INACTIVE": "starts it"}


def main() -> None:
    settings = Settings.load()
    if not settings["PROMPT"] and not settings["REQUEST"]:
        raise UserError('nothing to ask: make predict-oci PROMPT="My dog is cute, but", or REQUEST=file.json')
    if settings["PROMPT"] and settings["REQUEST"]:
        raise UserError("PROMPT and REQUEST both say what is asked: say one")
    tokens = settings.integer("TOKENS", minimum=1)
    url = settings["OCI_ENDPOINT"]
    if url and not re.match(r"https?://[^/]", url):
        raise UserError(f"OCI_ENDPOINT={url}: must begin with https://")
    needed = configuration.TO_ASK if url else configuration.TO_FIND
    deployment = configuration.read(settings.path("DEPLOYMENT"), needed)
    repository = settings.path("MODEL_REPOSITORY")
    model = settings["SYSTEM"] if settings.chosen("SYSTEM") else next(iter(deployment.models.systems), "")
    if not url:
        check_served(deployment, model, repository)
    if settings["REQUEST"]:
        request, form = read_request(settings.path("REQUEST")), None
    else:
        request, form = None, RequestForm.read(model, repository)
        check_prompt(model, form)
    service = Service.of(deployment.account)
    with told():
        url = url or address(service, deployment)
    endpoint = Endpoint(predict_url(url), service.signer, lambda name: version(name, repository))
    err.print(f"[dim]{escape(model)}[/]")
    if request:
        show_outputs(endpoint.infer(model, request))
    else:
        answer(endpoint, model, form, settings["PROMPT"], tokens)


def check_served(deployment: Deployment, model: str, repository: Path) -> None:
    """Triton has those that are named, and what these ask: a part can be asked too."""
    systems = deployment.models.systems
    if model not in {each for name in systems for each in with_steps(name, repository)}:
        has = ", ".join(systems)
        raise UserError(f"SYSTEM={model} is not deployed: models.systems has {has}. Add it there, and make deploy-oci")


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
    service.reach()
    found = find(service, deployment)
    if not found:
        raise UserError(
            f"there is no deployment '{deployment.name}' in {deployment.deployment.compartment_id}: make deploy-oci"
        )
    if (state := found[0].lifecycle_state) not in ("ACTIVE", "UPDATING", "NEEDS_ATTENTION"):
        mends = MENDS.get(state, "waits for it")
        raise UserError(f"{deployment.name} is {state.lower()}: make deploy-oci {mends}")
    return found[0].model_deployment_url


def predict_url(url: str) -> str:
    return f"{url.rstrip('/').removesuffix('/predict')}/predict"


def version(model: str, repository: Path) -> str:
    """The newest, as Triton serves it unless told otherwise: /predict wants one to be named."""
    numbers = [int(path.name) for path in (repository / model).glob("*/") if re.fullmatch(r"[1-9]\d*", path.name)]
    return str(max(numbers, default=1))


def check_prompt(model: str, form: RequestForm) -> None:
    if form.config.decoupled:
        raise UserError(f"SYSTEM={model} answers piece by piece, which /predict cannot: ask the one without _stream")
    if not form.generates_text and not form.fill_in(""):
        names = ", ".join(sorted(form.inputs)) or "tensors"
        raise UserError(
            f"SYSTEM={model} asks for {names}, which a PROMPT is not: put the whole request into a file, "
            "REQUEST=file.json"
        )


def answer(endpoint: Endpoint, model: str, form: RequestForm, prompt: str, tokens: int) -> None:
    if form.generates_text:
        show(prompt, pieces(endpoint, model, form.inputs, prompt, tokens))
    else:
        show_outputs(endpoint.infer(model, form.fill_in(prompt)))


def show_outputs(answer: dict) -> None:
    for output in answer["outputs"]:
        data = output["data"]
        first = " ".join(f"{value:.5g}" if isinstance(value, float) else str(value) for value in data[:SHOWN])
        more = " ..." if len(data) > SHOWN else ""
        print(f"{output['name']} {output['datatype']} {output['shape']}: {first}{more}")


if __name__ == "__main__":
    run(main)
