"""Build the bodies of requests to Oracle Cloud, as the SDK's own models."""

from __future__ import annotations

from typing import Any

from oci.data_science import models

from deploy.oci.deployment import Deployment, Logs

# A deployment mounts the content of the zip here, read-only; the folder is the one that `make package` writes.
REPOSITORY = "/opt/ds/model/deployed_model/model_repository"
PORT = 8000
# Tags by which a later run finds what this one created.
MADE_BY = "made-by"
PROJECT = "triton-transformers"
DEPLOYED_AS = "deployed-as"
ARTIFACT = "artifact-sha256"


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


def create_model(deployment: Deployment, sha256: str) -> models.CreateModelDetails:
    place = deployment.deployment
    return models.CreateModelDetails(
        compartment_id=place.compartment_id,
        project_id=place.project_id,
        display_name=place.name,
        description=place.description or None,
        freeform_tags=tags(deployment) | {ARTIFACT: sha256},
    )


def create_deployment(deployment: Deployment, model_id: str) -> models.CreateModelDeploymentDetails:
    place = deployment.deployment
    return models.CreateModelDeploymentDetails(
        display_name=place.name,
        description=place.description or None,
        compartment_id=place.compartment_id,
        project_id=place.project_id,
        model_deployment_configuration_details=models.SingleModelDeploymentConfigurationDetails(
            model_configuration_details=models.ModelConfigurationDetails(
                model_id=model_id,
                instance_configuration=instance_configuration(deployment),
                scaling_policy=models.FixedSizeScalingPolicy(instance_count=deployment.instances.count),
                bandwidth_mbps=deployment.instances.bandwidth_mbps,
            ),
            environment_configuration_details=container(deployment),
        ),
        category_log_details=logs(deployment.logs),
        freeform_tags=tags(deployment),
    )


def instance_configuration(deployment: Deployment) -> models.InstanceConfiguration:
    instances = deployment.instances
    size = models.ModelDeploymentInstanceShapeConfigDetails(ocpus=instances.ocpus, memory_in_gbs=instances.memory_gb)
    return models.InstanceConfiguration(
        instance_shape_name=instances.shape,
        model_deployment_instance_shape_config_details=size if instances.flexible else None,
        subnet_id=instances.subnet_id or None,
    )


def container(deployment: Deployment) -> models.OcirModelDeploymentEnvironmentConfigurationDetails:
    """Return the container's configuration; an empty entrypoint or cmd leaves the image's own."""
    image, _, digest = deployment.container.image.partition("@")
    return models.OcirModelDeploymentEnvironmentConfigurationDetails(
        image=image,
        image_digest=digest or None,
        entrypoint=deployment.container.entrypoint or None,
        cmd=deployment.container.cmd or None,
        server_port=PORT,
        health_check_port=PORT,
        environment_variables=environment(deployment),
    )


def logs(logs: Logs) -> models.CategoryLogDetails | None:
    def log(log_id: str) -> models.LogDetails | None:
        return models.LogDetails(log_id=log_id, log_group_id=logs.group_id) if log_id else None

    details = models.CategoryLogDetails(access=log(logs.access_id), predict=log(logs.predict_id))
    return details if logs.group_id else None


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


def changed(target: models.CreateModelDeploymentDetails, live: models.ModelDeployment) -> list[str]:
    """Return the groups in which a live deployment differs from the target."""
    ours, theirs = as_json(target), as_json(live)
    return [
        group
        for group, paths in GROUPS.items()
        if any(differ(value_at(ours, path), value_at(theirs, path), path.rpartition(".")[2]) for path in paths)
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


def update_deployment(
    target: models.CreateModelDeploymentDetails, groups: list[str], model_id: str
) -> models.UpdateModelDeploymentDetails:
    """Return the body that changes these groups; it always names a model, if not the new one then `model_id`."""
    body = models.UpdateModelDeploymentDetails()
    if "description and tags" in groups:
        body.description, body.freeform_tags = target.description or "", target.freeform_tags
    if "logs" in groups:
        logs = target.category_log_details or models.CategoryLogDetails()
        body.category_log_details = recast(logs, models.UpdateCategoryLogDetails)
    configuration = models.UpdateSingleModelDeploymentConfigurationDetails()
    details = target.model_deployment_configuration_details
    if {"instances", "bandwidth", "model"} & set(groups):
        theirs = details.model_configuration_details
        ours = configuration.model_configuration_details = models.UpdateModelConfigurationDetails()
        ours.model_id = theirs.model_id if "model" in groups else model_id
        if "instances" in groups:
            ours.instance_configuration, ours.scaling_policy = theirs.instance_configuration, theirs.scaling_policy
        if "bandwidth" in groups:
            ours.bandwidth_mbps = theirs.bandwidth_mbps
    if "container" in groups:
        kind = models.UpdateOcirModelDeploymentEnvironmentConfigurationDetails
        configuration.environment_configuration_details = recast(details.environment_configuration_details, kind)
    if set(groups) - {"description and tags", "logs"}:
        body.model_deployment_configuration_details = configuration
    return body


def recast(value: Any, kind: type) -> Any:
    """Copy the fields to the class that an update has for them."""
    other = kind()
    for name in other.swagger_types.keys() & value.swagger_types.keys():
        setattr(other, name, getattr(value, name))
    return other


def as_json(value: Any) -> Any:
    """Return the JSON that the SDK sends: the API's names, without fields that are not set."""
    if hasattr(value, "attribute_map"):
        return {
            theirs: as_json(getattr(value, ours))
            for ours, theirs in value.attribute_map.items()
            if getattr(value, ours) is not None
        }
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value
