"""make deploy-oci: the model and the deployment that deployment.toml describes; what is there already is updated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from oci.data_science.models import CreateModelDeploymentDetails, ModelDeployment, ModelDeploymentSummary
from oci.exceptions import ServiceError
from rich.markup import escape

from deploy.oci import catalogue, limits, waiting
from deploy.oci import deployment as configuration
from deploy.oci import requests as bodies
from deploy.oci.artifact import Artifact, assemble, is_assembled, packed, settings_of
from deploy.oci.client import Service, told
from deploy.oci.container_image import Image, push
from deploy.oci.deployment import Deployment
from scripts.common.cli import err, out, run
from scripts.common.files import exclusive
from scripts.common.settings import Settings, UserError
from scripts.models.backends import needed
from scripts.models.selection import missing_systems

GONE = ("DELETED", "DELETING")
# What an identifier stands for in a dry run that has not got it.
UNKNOWN_MODEL = "(the id of the model above)"
UNKNOWN_HASH = "(SHA-256 of the zip, which is yet to be packed)"


def main() -> None:
    settings = Settings.load()
    path = settings.path("DEPLOYMENT")
    deployment = configuration.read(path)
    settings = settings_of(settings, deployment)
    push_it = settings.flag("PUSH")
    if settings.flag("DRY_RUN"):
        dry_run(settings, deployment)
        return
    with exclusive(path.parent, "another `make deploy-oci` is at work here"):
        limits.check(deployment, Image.here(deployment.container.image), None, set())
        service = Service.of(deployment.account)
        with told():
            service.reach()
            limits.check_shape(service, deployment)
        assemble(settings)
        deployment, artifact = prepared(settings, deployment, push_it)
        with told():
            live = roll_out(service, deployment, artifact)
    out.print(f"endpoint    {live.model_deployment_url}/predict")
    said = f" DEPLOYMENT={settings['DEPLOYMENT']}" if settings["DEPLOYMENT"] != "deploy/oci/deployment.toml" else ""
    out.print(f'\n`make predict-oci PROMPT="My dog is cute, but"{said}` asks it, `make destroy-oci{said}` removes it.')


def prepared(settings: Settings, deployment: Deployment, push_it: bool) -> tuple[Deployment, Artifact]:
    """Packed, checked and pushed: nothing is in Oracle Cloud's catalogue before all of that is well."""
    artifact = packed(settings)
    backends = needed(deployment.models.systems, settings.path("MODEL_REPOSITORY"))
    name = deployment.container.image
    image = Image.here(name)
    limits.check(deployment, image, artifact.path, backends)
    if said := limits.start_up(artifact.path):
        out.print(f"[dim]{said}[/]")
    if image is None:
        err.print(f"[yellow]{name} is not on this machine:[/] its size and what is in it are not checked")
    if push_it:
        push(name)
        image = Image.here(name)
    elif image and "@" not in name and not image.is_pushed():
        raise UserError(f"{name} was not pushed from this machine since it was built: say PUSH=1, after `docker login`")
    return with_digest(deployment, image), artifact


def with_digest(deployment: Deployment, image: Image | None) -> Deployment:
    """A tag that was pushed anew is another image: by its digest that is seen."""
    name = deployment.container.image
    if not image or not image.digest or "@" in name:
        return deployment
    return replace(deployment, container=replace(deployment.container, image=f"{name}@{image.digest}"))


def dry_run(settings: Settings, deployment: Deployment) -> None:
    """What would be sent: nothing is asked of any service, nor downloaded."""
    image = Image.here(deployment.container.image)
    artifact = packed_quietly(settings)
    backends = needed(deployment.models.systems, settings.path("MODEL_REPOSITORY")) if artifact else set()
    limits.check(deployment, image, artifact.path if artifact else None, backends)
    deployment = with_digest(deployment, image)
    model = bodies.create_model(deployment, artifact.sha256 if artifact else UNKNOWN_HASH)
    requests = {
        "POST /20190101/models": bodies.as_json(model),
        "POST /20190101/models/{id}/artifact": str(settings.path("PACKAGE")),
        "POST /20190101/modelDeployments": bodies.as_json(bodies.create_deployment(deployment, UNKNOWN_MODEL)),
    }
    print(json.dumps(requests, indent=2, ensure_ascii=False))


def packed_quietly(settings: Settings) -> Artifact | None:
    """Where the models are there. What is printed is JSON and nothing else."""
    if not is_assembled(settings):
        missing_systems(settings, report=False)  # says of what is no system at all
        err.print(f"[yellow]not assembled yet:[/] {settings['SYSTEMS']} (make models); the zip is not checked")
        return None
    with err.status("packing"):
        before, out.quiet = out.quiet, True
        try:
            return packed(settings)
        finally:
            out.quiet = before


def roll_out(service: Service, deployment: Deployment, artifact: Artifact) -> ModelDeployment:
    """What an earlier run began and did not end is found, waited for, and made what it should be."""
    everyones = named(service, deployment)
    there = [each for each in everyones if catalogue.is_ours(each, deployment)]
    if everyones and not there:
        raise UserError(
            f"there is a deployment '{deployment.name}' in this compartment that was not made by make deploy-oci "
            f"({everyones[0].id}): choose another deployment.name"
        )
    model_id = catalogue.put(service, deployment, artifact)
    wanted = bodies.create_deployment(deployment, model_id)
    if there:
        state = there[0].lifecycle_state.lower()
        live = waiting.settled(service, there[0].id, f"{deployment.name}: {state}", deployment.wait)
        if live.lifecycle_state not in (*GONE, "FAILED"):
            return updated(service, deployment, wanted, live)
        if live.lifecycle_state == "FAILED":
            why = f" ({escape(live.lifecycle_details)})" if live.lifecycle_details else ""
            out.print(f"deployment  {live.id} had failed{why}: making it anew")
            remove(service, deployment, live.id)
    return created(service, deployment, wanted)


def find(service: Service, deployment: Deployment, gone: tuple[str, ...] = GONE) -> list[ModelDeploymentSummary]:
    """Those of that name that are not gone, the newest first. Never one that somebody else made."""
    return [each for each in named(service, deployment, gone) if catalogue.is_ours(each, deployment)]


def named(service: Service, deployment: Deployment, gone: tuple[str, ...] = GONE) -> list[ModelDeploymentSummary]:
    return catalogue.named(service.data_science.list_model_deployments, deployment, gone)


def created(service: Service, deployment: Deployment, wanted: CreateModelDeploymentDetails) -> ModelDeployment:
    answer = service.data_science.create_model_deployment(wanted)
    out.print(f"deployment  {answer.data.id}")
    waiting.done(service, answer, f"creating {deployment.name}", deployment.wait)
    return active(service, deployment, answer.data.id)


def updated(
    service: Service, deployment: Deployment, wanted: CreateModelDeploymentDetails, live: ModelDeployment
) -> ModelDeployment:
    """Active, one group after the other, as the service wants it and while it serves on.

    A model and a container that are both new may not fit the old ones: these come together, while it is stopped.
    """
    groups = bodies.changed(wanted, live)
    out.print(f"deployment  {live.id}, {'changes: ' + ', '.join(groups) if groups else 'as it was'}")
    stopped = live.lifecycle_state == "INACTIVE"
    if {"model", "container"} <= set(groups) and not stopped:
        out.print("model and container change together: it does not serve meanwhile")
        answer = service.data_science.deactivate_model_deployment(live.id)
        with without_service(deployment):
            waiting.done(service, answer, f"stopping {deployment.name}", deployment.wait)
        stopped = True
    if not stopped:
        for group in groups:
            with while_it_serves(group):
                update(service, deployment, wanted, live.id, [group])
        return active(service, deployment, live.id)
    with without_service(deployment):
        if groups:
            update(service, deployment, wanted, live.id, groups)
        answer = service.data_science.activate_model_deployment(live.id)
        waiting.done(service, answer, f"starting {deployment.name}", deployment.wait)
    return active(service, deployment, live.id)


@contextmanager
def without_service(deployment: Deployment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        err.print(
            f"[yellow]{deployment.name} is stopped, and does not serve:[/] the same command goes on and starts it"
        )
        raise


@contextmanager
def while_it_serves(group: str) -> Iterator[None]:
    """Oracle's pages do not agree on what may be changed then."""
    try:
        yield
    except ServiceError as error:
        if error.status in (400, 409):
            err.print(
                f"[yellow]{group}:[/] what cannot be changed while it serves can be while it is stopped: deactivate it "
                "in the console, and the same command changes and starts it"
            )
        raise


def update(
    service: Service, deployment: Deployment, wanted: CreateModelDeploymentDetails, live_id: str, groups: list[str]
) -> None:
    now = service.data_science.get_model_deployment(live_id).data
    model_id = now.model_deployment_configuration_details.model_configuration_details.model_id
    body = bodies.update_deployment(wanted, groups, model_id)
    answer = service.data_science.update_model_deployment(live_id, body)
    what = f"updating {', '.join(groups)} of {deployment.name}"
    if waiting.WORK in answer.headers:
        waiting.done(service, answer, what, deployment.wait)
    waiting.settled(service, live_id, what, deployment.wait)


def active(service: Service, deployment: Deployment, live_id: str) -> ModelDeployment:
    live = waiting.settled(service, live_id, f"{deployment.name}: its state", deployment.wait)
    if live.lifecycle_state != "ACTIVE":
        details = f": {live.lifecycle_details}" if live.lifecycle_details else ""
        raise UserError(f"{deployment.name} is {live.lifecycle_state.lower()}{details}; docs/oci.md says where to look")
    return live


def remove(service: Service, deployment: Deployment, live_id: str) -> None:
    answer = service.data_science.delete_model_deployment(live_id)
    waiting.done(service, answer, f"deleting {deployment.name}", deployment.wait)


if __name__ == "__main__":
    run(main)
