"""make predict-oci: send PROMPT or REQUEST to the deployment and print its answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.markup import escape

from deploy.oci.client import Service, list_ours, service_errors
from deploy.oci.deployment import TO_ASK, TO_FIND, Deployment, read
from deploy.oci.endpoint import Endpoint
from deploy.oci.rollout import GONE
from scripts.stack.generate import pieces, show
from triton_transformers.cli import err, run
from triton_transformers.model_config import ModelConfig, find_config, read_config, with_steps
from triton_transformers.settings import Settings, UserError

SHOWN_VALUES = 6
# `make deploy-oci` does this about a deployment that does not serve.
REMEDIES = {"FAILED": "replaces it", "INACTIVE": "starts it"}


def read_form(model: str, repository: Path) -> ModelConfig:
    """Read a model's inputs from its config.pbtxt: no endpoint of a deployment describes its models."""
    path = find_config(model, repository)
    if not path:
        raise UserError(
            f"SYSTEM={model}: {repository} has no {model}/config.pbtxt, which describes the model's inputs. "
            "Check the name, or set MODEL_REPOSITORY"
        )
    return read_config(path)


def inputs_of(form: ModelConfig) -> set[str]:
    return {tensor.name for tensor in form.inputs}


def generates_text(form: ModelConfig) -> bool:
    return bool(inputs_of(form) & {"TEXT", "prompt"}) and any(tensor.data_type == "STRING" for tensor in form.outputs)


def fill_in(form: ModelConfig, text: str) -> dict | None:
    """Return a request with one text, or None if the model requires other inputs."""
    required = [tensor for tensor in form.inputs if not tensor.optional]
    if [tensor.data_type for tensor in required] != ["STRING"]:
        return None
    shape = [1] * (len(required[0].dims) + bool(form.max_batch_size))
    return {"inputs": [{"name": required[0].name, "shape": shape, "datatype": "BYTES", "data": [text]}]}


def main() -> None:
    settings = Settings.load()
    if not settings.prompt and not settings.request:
        raise UserError('Nothing to send. Set PROMPT="My dog is cute, but", or REQUEST=file.json')
    if settings.prompt and settings.request:
        raise UserError("PROMPT and REQUEST are both set. Set one of them")
    tokens = settings.tokens
    url = settings.oci_endpoint
    if url and not re.match(r"https?://[^/]", url):
        raise UserError(f"OCI_ENDPOINT={url}: must begin with https://")
    deployment = read(settings.deployment, TO_ASK if url else TO_FIND)
    repository = settings.model_repository
    model = choose_model(settings, deployment)
    if not url:
        check_served(deployment, model, repository)
    request = form = None
    if settings.request:
        request = read_request(settings.request)
    else:
        form = read_form(model, repository)
        check_prompt(model, form)
    service = Service.connect(deployment.account)
    with service_errors():
        url = url or find_url(service, deployment)
    endpoint = Endpoint(predict_url(url), service.signer, lambda name: newest_version(name, repository))
    err.print(f"[dim]{escape(model)}[/]")
    if form:
        answer_prompt(endpoint, model, form, settings.prompt, tokens)
    elif request:
        show_outputs(endpoint.infer(model, request))


def choose_model(settings: Settings, deployment: Deployment) -> str:
    """Return SYSTEM if the user set it: its default is for comparisons. Otherwise return the first deployed system."""
    return settings.system if settings.chosen("SYSTEM") else next(iter(deployment.models.systems), "")


def check_served(deployment: Deployment, model: str, repository: Path) -> None:
    """Raise if Triton does not load the model: it loads the systems and their ensembles' steps."""
    systems = deployment.models.systems
    if model not in {step for name in systems for step in with_steps(name, repository)}:
        has = ", ".join(systems)
        raise UserError(f"SYSTEM={model} is not deployed: models.systems has {has}. Add it, and run make deploy-oci")


def read_request(path: Path) -> dict:
    try:
        request = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"REQUEST={path}: no such file") from None
    except ValueError as error:
        raise UserError(f"REQUEST={path} is not valid JSON: {error}") from None
    if not isinstance(request, dict) or "inputs" not in request:
        raise UserError(f"REQUEST={path} must hold a request as Triton's infer takes it: an object with inputs")
    return request


def find_url(service: Service, deployment: Deployment) -> str:
    service.check_connection()
    deployments = list_ours(service.data_science.list_model_deployments, deployment, GONE)
    if not deployments:
        compartment = deployment.deployment.compartment_id
        raise UserError(f"{compartment} has no deployment '{deployment.name}'. Create it with make deploy-oci")
    if (state := deployments[0].lifecycle_state) not in ("ACTIVE", "UPDATING", "NEEDS_ATTENTION"):
        remedy = REMEDIES.get(state, "waits for it")
        raise UserError(f"{deployment.name} is {state.lower()}. Run make deploy-oci: it {remedy}")
    return deployments[0].model_deployment_url


def predict_url(url: str) -> str:
    return f"{url.rstrip('/').removesuffix('/predict')}/predict"


def newest_version(model: str, repository: Path) -> str:
    """Return the version that Triton serves by default: /predict requires a number."""
    numbers = [int(path.name) for path in (repository / model).glob("*/") if re.fullmatch(r"[1-9]\d*", path.name)]
    return str(max(numbers, default=1))


def check_prompt(model: str, form: ModelConfig) -> None:
    if form.decoupled:
        raise UserError(
            f"SYSTEM={model} streams its answer, which /predict does not support. Name the model without _stream"
        )
    if not generates_text(form) and not fill_in(form, ""):
        names = ", ".join(sorted(inputs_of(form))) or "tensors"
        raise UserError(
            f"SYSTEM={model} takes {names}, not a PROMPT. Put the request in a file, and set REQUEST=file.json"
        )


def answer_prompt(endpoint: Endpoint, model: str, form: ModelConfig, prompt: str, tokens: int) -> None:
    if generates_text(form):
        show(prompt, pieces(endpoint, model, inputs_of(form), prompt, tokens))
    elif request := fill_in(form, prompt):
        show_outputs(endpoint.infer(model, request))


def show_outputs(answer: dict) -> None:
    for output in answer["outputs"]:
        data = output["data"]
        first = " ".join(f"{value:.5g}" if isinstance(value, float) else str(value) for value in data[:SHOWN_VALUES])
        more = " ..." if len(data) > SHOWN_VALUES else ""
        print(f"{output['name']} {output['datatype']} {output['shape']}: {first}{more}")


if __name__ == "__main__":
    run(main)
