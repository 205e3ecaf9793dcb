"""Bodies of requests to Oracle Cloud, checked by the SDK's own models and literally; limits before any upload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oci.data_science import models

from deploy.oci import limits
from deploy.oci import requests as bodies
from deploy.oci.container_image import Image
from deploy.oci.deployment import read
from tests.support.oci import EVERYTHING, write_deployment
from tests.support.oci_stand_in import check_fields
from triton_transformers.settings import UserError


@pytest.fixture(params=[{}, EVERYTHING], ids=["minimum", "everything"])
def deployment(request, tmp_path):
    return read(write_deployment(tmp_path, **request.param))


def test_bodies_fit_the_sdks_models(deployment):
    check_fields(bodies.create_model(deployment, "hash"), models.CreateModelDetails)
    requested = bodies.create_deployment(deployment, "ocid1.model")
    check_fields(requested, models.CreateModelDeploymentDetails)
    for groups in ([], *([group] for group in bodies.GROUPS), list(bodies.GROUPS)):
        body = bodies.update_deployment(requested, groups, "ocid1.model")
        check_fields(body, models.UpdateModelDeploymentDetails)


def live(deployment) -> bodies.Body:
    """Return what the service reports after a request: the same fields, and some that it adds."""
    reported = bodies.create_deployment(deployment, "ocid1.model") | {"lifecycleState": "ACTIVE"}
    configuration = reported["modelDeploymentConfigurationDetails"]
    model = configuration["modelConfigurationDetails"]
    model["maximumBandwidthMbps"] = 10
    model["instanceConfiguration"]["networkAccessType"] = "CUSTOM_NETWORKING"
    configuration["environmentConfigurationDetails"]["defaultEnvironmentVariables"] = {"WEB_CONCURRENCY": "1"}
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


# --- limits -----------------------------------------------------------------------------------------------------------


def image(**changes: object) -> Image:
    usual = Image("iad.ocir.io/tests/triton:1.0", 400_000_000, ["serve.sh"], ["tokenizer"], "sha256:0")
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("settings", "inspected", "message"),
    [
        *[
            ({"container__environment": {name: value}}, None, message)
            for name, value, message in (
                ("LONG", "x" * 2048, "the container's environment has 2"),
                ("X", "1", "container.environment.X: a name must have 2 to 31 letters"),
                ("TEST_", "1", "container.environment.TEST_: a name must have 2 to 31"),
                ("A" * 32, "1", "a name must have 2 to 31 letters"),
                ("TENANCY_OCID", "1", "environment.TENANCY_OCID is reserved by Oracle"),
                ("SYSTEMS", "1", "container.environment.SYSTEMS is set by make deploy-oci"),
            )
        ],
        ({}, image(size=17 * 10**9), "has 17.0 GB unpacked, and must have at most 16.0 GB"),
        ({}, image(command=["x" * 2048]), "ENTRYPOINT and CMD of iad.ocir.io/tests/triton:1.0 have 2048 bytes"),
        ({"container__cmd": ["x" * 1024, "y" * 1024]}, None, "container.entrypoint and container.cmd have 2048 bytes"),
        ({}, image(backends=["detokenizer"]), "has no backend tokenizer, which models.systems need"),
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
