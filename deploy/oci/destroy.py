"""make destroy-oci: the deployment of deployment.toml, then the models that were made for it."""

from __future__ import annotations

from deploy.oci import catalogue, waiting
from deploy.oci import deployment as configuration
from deploy.oci.client import Service, told
from deploy.oci.deploy import find, remove
from deploy.oci.deployment import Deployment
from scripts.common.cli import out, run
from scripts.common.files import exclusive
from scripts.common.settings import Settings


def main() -> None:
    settings = Settings.load()
    path = settings.path("DEPLOYMENT")
    only_show = settings.flag("DRY_RUN")
    deployment = configuration.read(path, configuration.TO_FIND)
    with exclusive(path.parent, "another `make deploy-oci` is at work here"), told():
        service = Service.of(deployment.account)
        service.reach()
        destroy(service, deployment, only_show)


def destroy(service: Service, deployment: Deployment, only_show: bool = False) -> None:
    verb = "would delete" if only_show else "deleting"
    found = find(service, deployment, gone=("DELETED",))
    models = catalogue.ours(service, deployment)
    if not only_show:
        catalogue.clear(service, deployment)
    if not found and not models:
        out.print(f"there is nothing of {deployment.name} in {deployment.deployment.compartment_id}")
        return
    for each in found:
        out.print(f"{verb}  deployment {each.id}, {each.lifecycle_state.lower()}")
        if not only_show:
            take_down(service, deployment, each.id)
    for model in models:
        out.print(f"{verb}  model {model.id}")
        if not only_show:
            service.data_science.delete_model(model.id)


def take_down(service: Service, deployment: Deployment, live_id: str) -> None:
    """One that is on its way somewhere cannot be deleted before it is there; nor one that an earlier run deletes."""
    live = waiting.settled(service, live_id, f"{deployment.name}: its state", deployment.wait)
    if live.lifecycle_state != "DELETED":
        remove(service, deployment, live_id)


if __name__ == "__main__":
    run(main)
