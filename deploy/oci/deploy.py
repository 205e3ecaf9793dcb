"""make deploy-oci: register the models and create or update the deployment that deployment.toml describes."""

from __future__ import annotations

import json

from deploy.oci import limits
from deploy.oci import requests as bodies
from deploy.oci.client import Service, service_errors
from deploy.oci.container_image import Image, push
from deploy.oci.deployment import Deployment, read
from deploy.oci.registered_models import Artifact, assemble, is_assembled, pack
from deploy.oci.rollout import roll_out
from export.backends import needed
from export.selection import missing_systems
from triton_transformers.cli import err, out, run
from triton_transformers.files import exclusive
from triton_transformers.settings import Settings, UserError

# Stand for values that a dry run does not know.
UNKNOWN_MODEL = "(id of the model above)"
UNKNOWN_HASH = "(SHA-256 of the zip, once it is packed)"


def main() -> None:
    settings = Settings.load()
    path = settings.deployment
    deployment = read(path)
    option = f" DEPLOYMENT={settings['DEPLOYMENT']}" if settings.chosen_for_this_command("DEPLOYMENT") else ""
    settings = settings.replace(SYSTEMS=" ".join(deployment.models.systems))
    with_push = settings.push
    if settings.dry_run:
        dry_run(settings, deployment)
        return
    with exclusive(path.parent, "another `make deploy-oci` is running here"):
        limits.check(deployment, Image.inspect(deployment.container.image), None, set())
        service = Service.connect(deployment.account)
        with service_errors():
            service.check_connection()
            limits.check_shape(service, deployment)
        assemble(settings)
        deployment, artifact = prepare(settings, deployment, with_push)
        with service_errors():
            live = roll_out(service, deployment, artifact)
    out.print(f"endpoint    {live.model_deployment_url}/predict")
    out.print(f'\nTo send a request: `make predict-oci PROMPT="My dog is cute, but"{option}`')
    out.print(f"To delete it: `make destroy-oci{option}`")


def prepare(settings: Settings, deployment: Deployment, with_push: bool) -> tuple[Deployment, Artifact]:
    """Pack, check and push: nothing enters Oracle Cloud's catalogue before all of that has succeeded."""
    artifact = pack(settings)
    backends = needed(deployment.models.systems, settings.model_repository)
    name = deployment.container.image
    image = Image.inspect(name)
    limits.check(deployment, image, artifact.path, backends)
    if warning := limits.startup_warning(artifact.path):
        out.print(f"[dim]{warning}[/]")
    if image is None:
        err.print(f"[yellow]{name} is not on this machine:[/] its size and content are not checked")
    if with_push:
        push(name)
        image = Image.inspect(name)
    elif image and "@" not in name and not image.is_pushed():
        raise UserError(f"{name} was not pushed since it was built here. Run `docker login`, and set PUSH=1")
    return with_digest(deployment, image), artifact


def with_digest(deployment: Deployment, image: Image | None) -> Deployment:
    """Name the image by its digest too, so that a tag that was pushed again counts as a change."""
    name = deployment.container.image
    if not image or not image.digest or "@" in name:
        return deployment
    container = deployment.container.model_copy(update={"image": f"{name}@{image.digest}"})
    return deployment.model_copy(update={"container": container})


def dry_run(settings: Settings, deployment: Deployment) -> None:
    """Print the requests of a first deployment, without the network and without assembling models."""
    image = Image.inspect(deployment.container.image)
    artifact = pack_quietly(settings)
    backends = needed(deployment.models.systems, settings.model_repository) if artifact else set()
    limits.check(deployment, image, artifact.path if artifact else None, backends)
    deployment = with_digest(deployment, image)
    model = bodies.create_model(deployment, artifact.sha256 if artifact else UNKNOWN_HASH)
    requests = {
        "POST /20190101/models": model,
        "POST /20190101/models/{id}/artifact": str(settings.package),
        "POST /20190101/modelDeployments": bodies.create_deployment(deployment, UNKNOWN_MODEL),
    }
    print(json.dumps(requests, indent=2, ensure_ascii=False))


def pack_quietly(settings: Settings) -> Artifact | None:
    """Pack the models if they are assembled, and keep stdout for the JSON."""
    if not is_assembled(settings):
        missing_systems(settings, settings.systems)  # raises for unknown systems
        err.print(f"[yellow]not assembled yet:[/] {settings['SYSTEMS']} (make models); the zip is not checked")
        return None
    with err.status("packing"):
        before, out.quiet = out.quiet, True
        try:
            return pack(settings)
        finally:
            out.quiet = before


if __name__ == "__main__":
    run(main)
