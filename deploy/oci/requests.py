"""Build the bodies of requests to Oracle Cloud. A test compares them with the SDK's own models."""

from __future__ import annotations

from typing import Any

from deploy.oci.deployment import Deployment

# A deployment mounts the content of the zip here, read-only; the folder is the one that `make package` writes.
REPOSITORY = "/opt/ds/model/deployed_model/model_repository"
PORT = 8000
# Tags by which a later run finds what this one created.
MADE_BY = "made-by"
PROJECT = "triton-transformers"
DEPLOYED_AS = "deployed-as"
ARTIFACT = "artifact-sha256"

Body = dict[str, Any]


def environment(deployment: Deployment) -> dict[str, str]:
    return deployment.container.environment | own_environment(deployment)


def own_environment(deployment: Deployment) -> dict[str, str]:
    """Return the variables that we set ourselves.

    With CONTAINER_TYPE, the service maps /predict and /health to Triton's API, and serve.sh opens one port only.
    """
    return {
        "CONTAINER_TYPE": "TRITON",
        "MODEL_REPOSITORY": REPOSITORY,
        "SYSTEMS": " ".join(deployment.models.systems),
        "PROFILE": deployment.container.profile,
        "BIND_ADDRESS": "0.0.0.0",
        "TRITON_HTTP_PORT": str(PORT),
    }


def tags(deployment: Deployment) -> dict[str, str]:
    return deployment.tags | {MADE_BY: PROJECT, DEPLOYED_AS: deployment.name}


def is_ours(resource: Any, deployment: Deployment) -> bool:
    """Return whether `make deploy-oci` created this resource for this deployment."""
    created_with = resource.freeform_tags or {}
    return created_with.get(MADE_BY) == PROJECT and created_with.get(DEPLOYED_AS) == deployment.name


def create_model(deployment: Deployment, sha256: str) -> Body:
    return described(deployment) | {"freeformTags": tags(deployment) | {ARTIFACT: sha256}}


def create_deployment(deployment: Deployment, model_id: str) -> Body:
    logs = deployment.logs
    groups = {"access": logs.access_id, "predict": logs.predict_id}
    log_details = {kind: {"logId": id, "logGroupId": logs.group_id} for kind, id in groups.items() if id}
    configuration = {
        "deploymentType": "SINGLE_MODEL",
        "modelConfigurationDetails": {
            "modelId": model_id,
            "instanceConfiguration": instance_configuration(deployment),
            "scalingPolicy": {"policyType": "FIXED_SIZE", "instanceCount": deployment.instances.count},
            "bandwidthMbps": deployment.instances.bandwidth_mbps,
        },
        "environmentConfigurationDetails": container(deployment),
    }
    details = {"modelDeploymentConfigurationDetails": configuration, "categoryLogDetails": log_details}
    return described(deployment) | filled(details) | {"freeformTags": tags(deployment)}


def filled(body: Body) -> Body:
    """Return the fields that have a value."""
    return {name: value for name, value in body.items() if value not in (None, "", [], {})}


def described(deployment: Deployment) -> Body:
    place = deployment.deployment
    names = {"displayName": place.name, "description": place.description}
    return filled(names | {"projectId": place.project_id, "compartmentId": place.compartment_id})


def instance_configuration(deployment: Deployment) -> Body:
    instances = deployment.instances
    size = {"ocpus": instances.ocpus, "memoryInGBs": instances.memory_gb}
    return filled(
        {
            "instanceShapeName": instances.shape,
            "modelDeploymentInstanceShapeConfigDetails": size if instances.flexible else None,
            "subnetId": instances.subnet_id,
        }
    )


def container(deployment: Deployment) -> Body:
    """Return the container's configuration; an empty entrypoint or cmd leaves the image's own."""
    image, _, digest = deployment.container.image.partition("@")
    return filled(
        {
            "environmentConfigurationType": "OCIR_CONTAINER",
            "image": image,
            "imageDigest": digest,
            "entrypoint": deployment.container.entrypoint,
            "cmd": deployment.container.cmd,
            "serverPort": PORT,
            "healthCheckPort": PORT,
            "environmentVariables": environment(deployment),
        }
    )


# --- updates ----------------------------------------------------------------------------------------------------------

# The service changes one of these groups of an active deployment at a time: the paths in the body that creates one.
CONFIGURATION = "modelDeploymentConfigurationDetails"
MODEL = f"{CONFIGURATION}.modelConfigurationDetails"
GROUPS = {
    "description and tags": ("description", "freeformTags"),
    "logs": ("categoryLogDetails",),
    "instances": (f"{MODEL}.instanceConfiguration", f"{MODEL}.scalingPolicy"),
    "bandwidth": (f"{MODEL}.bandwidthMbps",),
    "model": (f"{MODEL}.modelId",),
    "container": (f"{CONFIGURATION}.environmentConfigurationDetails",),
}
# Compare these fields exactly; elsewhere ignore fields that the service adds.
EXACT = ("description", "environmentVariables", "freeformTags", "entrypoint", "cmd", "access", "predict")
# The values that clear a field.
CLEARED: Body = {"description": "", "categoryLogDetails": {}}


def changed(target: Body, live: Body) -> list[str]:
    """Return the groups in which a live deployment differs from the target."""
    return [
        group
        for group, paths in GROUPS.items()
        if any(differ(value_at(target, path), value_at(live, path), path.rpartition(".")[2]) for path in paths)
    ]


def value_at(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = (body or {}).get(name)
    return body


def differ(ours: Any, theirs: Any, name: str) -> bool:
    if name in EXACT:
        return (ours or None) != (theirs or None)
    if isinstance(ours, dict) or isinstance(theirs, dict):
        ours, theirs = ours or {}, theirs or {}
        return any(differ(ours.get(key), theirs.get(key), key) for key in {*ours, *(theirs.keys() & set(EXACT))})
    return ours is not None and ours != theirs


def update_deployment(target: Body, groups: list[str], model_id: str) -> Body:
    """Return the body that changes these groups; it always names a model, if not the new one then `model_id`."""
    body: Body = {}
    for path in (path for group in groups for path in GROUPS[group]):
        *parents, name = path.split(".")
        section = body
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value_at(target, path) or CLEARED[name]
    if configuration := body.get(CONFIGURATION):
        configuration["deploymentType"] = "SINGLE_MODEL"
        if model := configuration.get("modelConfigurationDetails"):
            model.setdefault("modelId", model_id)
    return body
