"""Create, update and delete the live deployment, and continue what an interrupted run began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oci.data_science.models import ModelDeployment
from oci.exceptions import ServiceError
from rich.markup import escape

from deploy.oci import requests as bodies
from deploy.oci.client import WORK_REQUEST_HEADER, Service, list_named, wait_for_work, wait_until_settled
from deploy.oci.deployment import Deployment
from deploy.oci.registered_models import Artifact, register
from triton_transformers.cli import err, out
from triton_transformers.settings import UserError

GONE = ("DELETED", "DELETING")


def roll_out(service: Service, deployment: Deployment, artifact: Artifact) -> ModelDeployment:
    """Return the deployment once it is active with this artifact; update the one that an earlier run left."""
    same_name = list_named(service.data_science.list_model_deployments, deployment, GONE)
    ours = [live for live in same_name if bodies.is_ours(live, deployment)]
    if same_name and not ours:
        raise UserError(
            f"this compartment has a deployment '{deployment.name}' that was not created by make deploy-oci "
            f"({same_name[0].id}). Choose another deployment.name"
        )
    model_id = register(service, deployment, artifact)
    target = bodies.create_deployment(deployment, model_id)
    if ours:
        state = ours[0].lifecycle_state.lower()
        live = wait_until_settled(service, ours[0].id, f"{deployment.name}: {state}", deployment.wait)
        if live.lifecycle_state not in (*GONE, "FAILED"):
            return update(service, deployment, target, live)
        if live.lifecycle_state == "FAILED":
            reason = f" ({escape(live.lifecycle_details)})" if live.lifecycle_details else ""
            out.print(f"deployment  {live.id} failed{reason}: replacing it")
            delete(service, deployment, live.id)
    response = service.data_science.create_model_deployment(target)
    out.print(f"deployment  {response.data.id}")
    wait_for_work(service, response, f"creating {deployment.name}", deployment.wait)
    return check_active(service, deployment, response.data.id)


def update(service: Service, deployment: Deployment, target: bodies.Body, live: ModelDeployment) -> ModelDeployment:
    """Change what differs: one group at a time while it serves, as the service requires.

    A new model and a new container may not fit the old ones, so both change together, while the deployment is stopped.
    """
    groups = bodies.changed(target, service.data_science.base_client.sanitize_for_serialization(live))
    out.print(f"deployment  {live.id}, {'changes: ' + ', '.join(groups) if groups else 'unchanged'}")
    stopped = live.lifecycle_state == "INACTIVE"
    if {"model", "container"} <= set(groups) and not stopped:
        out.print("model and container change together: the deployment does not serve meanwhile")
        response = service.data_science.deactivate_model_deployment(live.id)
        with while_stopped(deployment):
            wait_for_work(service, response, f"stopping {deployment.name}", deployment.wait)
        stopped = True
    if not stopped:
        for group in groups:
            with while_serving(group):
                change(service, deployment, target, live.id, [group])
        return check_active(service, deployment, live.id)
    with while_stopped(deployment):
        if groups:
            change(service, deployment, target, live.id, groups)
        response = service.data_science.activate_model_deployment(live.id)
        wait_for_work(service, response, f"starting {deployment.name}", deployment.wait)
    return check_active(service, deployment, live.id)


@contextmanager
def while_stopped(deployment: Deployment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        err.print(f"[yellow]{deployment.name} is stopped and does not serve.[/] Run the same command again to start it")
        raise


@contextmanager
def while_serving(group: str) -> Iterator[None]:
    """Add to a refusal how to change the group anyway: Oracle's pages disagree on what may change while it serves."""
    try:
        yield
    except ServiceError as error:
        if error.status in (400, 409):
            err.print(
                f"[yellow]{group}: the service refuses this change while the deployment serves.[/] Deactivate it in "
                "the console, and run the same command again: it changes and starts it"
            )
        raise


def change(service: Service, deployment: Deployment, target: bodies.Body, live_id: str, groups: list[str]) -> None:
    live = service.data_science.get_model_deployment(live_id).data
    model_id = live.model_deployment_configuration_details.model_configuration_details.model_id
    body = bodies.update_deployment(target, groups, model_id)
    response = service.data_science.update_model_deployment(live_id, body)
    action = f"updating {', '.join(groups)} of {deployment.name}"
    if WORK_REQUEST_HEADER in response.headers:
        wait_for_work(service, response, action, deployment.wait)
    wait_until_settled(service, live_id, action, deployment.wait)


def check_active(service: Service, deployment: Deployment, live_id: str) -> ModelDeployment:
    live = wait_until_settled(service, live_id, f"{deployment.name}: its state", deployment.wait)
    if live.lifecycle_state != "ACTIVE":
        details = f": {live.lifecycle_details}" if live.lifecycle_details else ""
        raise UserError(f"{deployment.name} is {live.lifecycle_state.lower()}{details}. See docs/oci.md, When it fails")
    return live


def delete(service: Service, deployment: Deployment, live_id: str) -> None:
    response = service.data_science.delete_model_deployment(live_id)
    wait_for_work(service, response, f"deleting {deployment.name}", deployment.wait)
