"""Bodies of requests to Oracle Cloud, checked by the SDK's own models and literally; limits before any upload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oci.data_science import models

from deploy.oci import limits
from deploy.oci import requests as bodies
from deploy.oci.container_image import Image
from deploy.oci.deployment import read
from tests.support.oci import write_deployment
from tests.support.oci_stand_in import check_fields
from triton_transformers.settings import UserError

EVERYTHING = {
    "deployment__description": "of the tests",
    "container__entrypoint": ["/opt/triton-transformers/serve.sh"],
    "container__cmd": ["--log-verbose=1"],
    "container__environment": {"TRITON_LOG_VERBOSE": "1"},
    "container__image": f"iad.ocir.io/tests/triton:1.0@sha256:{'0' * 64}",
    "instances__subnet_id": "ocid1.subnet.oc1.iad.tests",
    "logs__group_id": "ocid1.loggroup.oc1.iad.tests",
    "logs__access_id": "ocid1.log.oc1.iad.access",
    "logs__predict_id": "ocid1.log.oc1.iad.predict",
    "tags__team": "search",
}


@pytest.fixture(params=[{}, EVERYTHING], ids=["minimum", "everything"])
def deployment(request, tmp_path):
    return read(write_deployment(tmp_path, **request.param))


def test_bodies_fit_the_sdks_models(deployment):
    check_fields(bodies.as_json(bodies.create_model(deployment, "hash")), models.CreateModelDetails)
    requested = bodies.create_deployment(deployment, "ocid1.model")
    check_fields(bodies.as_json(requested), models.CreateModelDeploymentDetails)
    for groups in ([], *([group] for group in bodies.GROUPS), list(bodies.GROUPS)):
        body = bodies.update_deployment(requested, groups, "ocid1.model")
        check_fields(bodies.as_json(body), models.UpdateModelDeploymentDetails)


def test_body_is_literally_this(tmp_path):
    deployment = read(write_deployment(tmp_path, **EVERYTHING))
    assert bodies.as_json(bodies.create_deployment(deployment, "ocid1.model")) == {
        "displayName": "triton-transformers",
        "description": "of the tests",
        "projectId": "ocid1.datascienceproject.oc1.iad.tests",
        "compartmentId": "ocid1.compartment.oc1..tests",
        "modelDeploymentConfigurationDetails": {
            "deploymentType": "SINGLE_MODEL",
            "modelConfigurationDetails": {
                "modelId": "ocid1.model",
                "instanceConfiguration": {
                    "instanceShapeName": "VM.Standard.E4.Flex",
                    "modelDeploymentInstanceShapeConfigDetails": {"ocpus": 2, "memoryInGBs": 16},
                    "subnetId": "ocid1.subnet.oc1.iad.tests",
                },
                "scalingPolicy": {"policyType": "FIXED_SIZE", "instanceCount": 1},
                "bandwidthMbps": 10,
            },
            "environmentConfigurationDetails": {
                "environmentConfigurationType": "OCIR_CONTAINER",
                "image": "iad.ocir.io/tests/triton:1.0",
                "imageDigest": f"sha256:{'0' * 64}",
                "entrypoint": ["/opt/triton-transformers/serve.sh"],
                "cmd": ["--log-verbose=1"],
                "serverPort": 8000,
                "healthCheckPort": 8000,
                "environmentVariables": {
                    "CONTAINER_TYPE": "TRITON",
                    "MODEL_REPOSITORY": "/opt/ds/model/deployed_model/model_repository",
                    "SYSTEMS": "gpt2_ensemble",
                    "PROFILE": "cpu",
                    "BIND_ADDRESS": "0.0.0.0",
                    "TRITON_HTTP_PORT": "8000",
                    "TRITON_LOG_VERBOSE": "1",
                },
            },
        },
        "categoryLogDetails": {
            "access": {"logId": "ocid1.log.oc1.iad.access", "logGroupId": "ocid1.loggroup.oc1.iad.tests"},
            "predict": {"logId": "ocid1.log.oc1.iad.predict", "logGroupId": "ocid1.loggroup.oc1.iad.tests"},
        },
        "freeformTags": {"team": "search", "made-by": "triton-transformers", "deployed-as": "triton-transformers"},
    }


def live(deployment, model_id: str = "ocid1.model") -> models.ModelDeployment:
    """Return what the service reports after this body: the same fields, and some that it adds."""
    requested = bodies.create_deployment(deployment, model_id)
    reported = models.ModelDeployment(lifecycle_state="ACTIVE", id="ocid1.deployment")
    for name in requested.swagger_types:
        setattr(reported, name, getattr(requested, name))
    configuration = reported.model_deployment_configuration_details
    configuration.model_configuration_details.maximum_bandwidth_mbps = 10
    configuration.model_configuration_details.instance_configuration.network_access_type = "CUSTOM_NETWORKING"
    configuration.environment_configuration_details.default_environment_variables = {"WEB_CONCURRENCY": "1"}
    return reported


def test_same_deployment_has_no_changes(deployment):
    assert bodies.changed(bodies.create_deployment(deployment, "ocid1.model"), live(deployment)) == []


@pytest.mark.parametrize(
    ("section", "change", "group"),
    [
        ("deployment", {"description": "another"}, "description and tags"),
        ("tags", {"team": "another"}, "description and tags"),
        ("logs", {"group_id": "g", "access_id": "a"}, "logs"),
        ("instances", {"ocpus": 4}, "instances"),
        ("instances", {"count": 3}, "instances"),
        ("instances", {"bandwidth_mbps": 20}, "bandwidth"),
        ("container", {"image": "iad.ocir.io/tests/triton:1.1"}, "container"),
        ("container", {"environment": {"TRITON_LOG_VERBOSE": "2"}}, "container"),
        ("container", {"environment": {}}, "container"),
        ("container", {"cmd": []}, "container"),
    ],
)
def test_change_is_in_its_group(tmp_path, section, change, group):
    before = read(write_deployment(tmp_path, **EVERYTHING))
    section_before = getattr(before, section)
    now = section_before | change if section == "tags" else section_before.model_copy(update=change)
    requested = bodies.create_deployment(before.model_copy(update={section: now}), "ocid1.model")
    assert bodies.changed(requested, live(before)) == [group]


def test_new_model_is_a_change(deployment):
    assert bodies.changed(bodies.create_deployment(deployment, "ocid1.new"), live(deployment)) == ["model"]


def test_update_has_only_its_group(deployment):
    requested = bodies.create_deployment(deployment, "ocid1.new")
    body = bodies.as_json(bodies.update_deployment(requested, ["bandwidth"], "ocid1.live"))
    configuration = {"modelId": "ocid1.live", "bandwidthMbps": 10}
    assert body == {
        "modelDeploymentConfigurationDetails": {
            "deploymentType": "SINGLE_MODEL",
            "modelConfigurationDetails": configuration,
        }
    }


# --- limits -----------------------------------------------------------------------------------------------------------


def image(**changes: object) -> Image:
    usual = Image("iad.ocir.io/tests/triton:1.0", 400_000_000, ["serve.sh"], ["tokenizer"], "sha256:0")
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("settings", "inspected", "message"),
    [
        ({}, image(size=17 * 10**9), "has 17.0 GB unpacked, and must have at most 16.0 GB"),
        ({}, image(command=["x" * 2048]), "ENTRYPOINT and CMD of iad.ocir.io/tests/triton:1.0 have 2048 bytes"),
        ({"container__cmd": ["x" * 1024, "y" * 1024]}, None, "container.entrypoint and container.cmd have 2048 bytes"),
        ({}, image(backends=["detokenizer"]), "has no backend tokenizer, which models.systems need"),
        ({"container__environment": {"LONG": "x" * 2048}}, None, "the container's environment has 2"),
        ({"container__environment": {"X": "1"}}, None, "container.environment.X: a name must have 2 to 31 letters"),
        ({"container__environment": {"TEST_": "1"}}, None, "container.environment.TEST_: a name must have 2 to 31"),
        ({"container__environment": {"A" * 32: "1"}}, None, "a name must have 2 to 31 letters"),
        (
            {"container__environment": {"TENANCY_OCID": "1"}},
            None,
            "environment.TENANCY_OCID is reserved by Oracle",
        ),
        ({"container__environment": {"SYSTEMS": "1"}}, None, "container.environment.SYSTEMS is set by make deploy-oci"),
    ],
)
def test_exceeded_limit_is_reported(tmp_path, settings, inspected, message):
    with pytest.raises(UserError) as error:
        limits.check(read(write_deployment(tmp_path, **settings)), inspected, None, {"tokenizer"})
    assert message in str(error.value)


def test_image_with_vllm_is_too_large_whatever_is_left_out(tmp_path):
    deployment = read(
        write_deployment(tmp_path, container__profile="cuda", instances__shape="VM.GPU.A10.1", instances__ocpus=0)
    )
    with pytest.raises(UserError, match=r"at most 16\.0 GB: assemble generating systems with FORMAT=python"):
        limits.check(deployment, image(size=27 * 10**9, backends=["generation"]), None, {"generation"})


def test_values_within_the_limits_pass(tmp_path):
    deployment = read(write_deployment(tmp_path, container__environment={"A" * 31: "1", "LONG": "x" * 1700}))
    limits.check(deployment, image(), None, {"tokenizer", "python"})
    limits.check(deployment, image(backends=None, command=["x" * 2047]), None, {"anything"})
