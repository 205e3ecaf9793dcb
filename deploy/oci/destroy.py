"""make destroy-oci: delete the deployment of deployment.toml, then the models that were registered for it."""

from __future__ import annotations

from deploy.oci.client import Service, list_ours, service_errors, wait_until_settled
from deploy.oci.deployment import TO_FIND, Deployment, read
from deploy.oci.registered_models import empty_bucket
from deploy.oci.rollout import delete
from triton_transformers.cli import out, run
from triton_transformers.files import exclusive
from triton_transformers.settings import Settings


def main() -> None:
    settings = Settings.load()
    path = settings.deployment
    dry_run = settings.dry_run
    deployment = read(path, TO_FIND)
    with exclusive(path.parent, "another `make deploy-oci` is running here"), service_errors():
        service = Service.connect(deployment.account)
        service.check_connection()
        destroy(service, deployment, dry_run)


def destroy(service: Service, deployment: Deployment, dry_run: bool = False) -> None:
    verb = "would delete" if dry_run else "deleting"
    deployments = list_ours(service.data_science.list_model_deployments, deployment, ("DELETED",))
    models = list_ours(service.data_science.list_models, deployment, ("DELETED",))
    if not dry_run:
        empty_bucket(service, deployment)
    if not deployments and not models:
        out.print(f"{deployment.deployment.compartment_id} has nothing of {deployment.name}")
        return
    for live in deployments:
        out.print(f"{verb}  deployment {live.id}, {live.lifecycle_state.lower()}")
        if not dry_run:
            # An earlier run may be deleting it already.
            live = wait_until_settled(service, live.id, f"{deployment.name}: its state", deployment.wait)
            if live.lifecycle_state != "DELETED":
                delete(service, deployment, live.id)
    for model in models:
        out.print(f"{verb}  model {model.id}")
        if not dry_run:
            service.data_science.delete_model(model.id)


if __name__ == "__main__":
    run(main)
