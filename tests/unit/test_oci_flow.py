"""make deploy-oci and destroy-oci against a stand-in for Oracle Cloud, whose deployments serve nothing here."""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import oci
import pytest
from cryptography.hazmat.primitives import serialization

from deploy.oci import catalogue, limits
from deploy.oci import deploy as module
from deploy.oci import deployment as config
from deploy.oci import requests as bodies
from deploy.oci.artifact import Artifact
from deploy.oci.client import Service, credentials, told
from deploy.oci.container_image import Image
from deploy.oci.deploy import prepared, roll_out
from deploy.oci.deployment import Account, Deployment
from deploy.oci.destroy import destroy
from deploy.oci.limits import check_shape
from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.package import package
from tests.support.oci_stand_in import OciStandIn, now, oci_stand_in
from tests.unit.test_oci_config import IDS, written

GOLDEN = ROOT / "tests/golden/oci"


@dataclass
class Here:
    """A user's machine: a repository with one model, a deployment.toml, a profile."""

    folder: Path
    cloud: OciStandIn

    def __post_init__(self) -> None:
        model = self.folder / "models/own"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text('backend: "tokenizer"')
        (model / "1/weights").write_bytes(os.urandom(300_000))

    @property
    def settings(self) -> Settings:
        own = {"SYSTEMS": "own", "MODEL_REPOSITORY": f"{self.folder}/models", "PACKAGE": f"{self.folder}/own.zip"}
        return Settings(Settings.load() | own)

    @property
    def path(self) -> Path:
        return self.folder / "deployment.toml"

    def deployment(self, **settings: object) -> Deployment:
        account = {"account__endpoint": self.cloud.url, "account__config_file": str(self.cloud.config_file())}
        wait = {"wait__poll_seconds": 0.1, "models__systems": ["own"]}
        return config.read(written(self.folder, **account | wait | settings))

    def service(self, account: Account | None = None) -> Service:
        """It asks each thing once: Oracle's SDK by itself asks again for minutes."""
        found = Service.of(account or self.deployment().account)
        found.object_storage = oci.object_storage.ObjectStorageClient(
            {"region": "us-ashburn-1"} | credentials(self.deployment().account)[0], service_endpoint=self.cloud.url
        )
        for client in (found.data_science, found.object_storage):
            client.retry_strategy = oci.retry.NoneRetryStrategy()
        return found

    def artifact(self) -> Artifact:
        package(self.settings)
        return Artifact.of(self.folder / "own.zip")

    def deploy(self, **settings: object):
        return roll_out(self.service(), self.deployment(**settings), self.artifact())

    def change_the_model(self) -> None:
        (self.folder / "models/own/1/weights").write_bytes(os.urandom(300_000))

    def command(self, name: str, **settings: str) -> subprocess.Popen[str]:
        if "DEPLOYMENT" not in settings:
            self.deployment()
        own = {"DEPLOYMENT": str(self.path), "MODEL_REPOSITORY": f"{self.folder}/models", "COLUMNS": "200"}
        own |= {"PACKAGE": f"{self.folder}/own.zip", "RUNTIME": "local"}
        return subprocess.Popen(
            [sys.executable, "-m", f"deploy.oci.{name}"],
            cwd=ROOT,
            env=os.environ | own | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, **settings: str) -> tuple[int, str, str]:
        process = self.command(name, **settings)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def here(tmp_path):
    with oci_stand_in(tmp_path) as cloud:
        yield Here(tmp_path, cloud)


def states(records: dict[str, dict]) -> list[str]:
    return [record["lifecycleState"] for record in records.values()]


def test_from_nothing(here):
    code, out, err = here.run("deploy")
    assert code == 0, out + err
    ((model_id, model),) = here.cloud.models.items()
    ((live_id, live),) = here.cloud.deployments.items()
    assert model["artifact"] == (here.folder / "own.zip").read_bytes()
    assert model["freeformTags"][bodies.ARTIFACT] == here.artifact().sha256
    assert live["lifecycleState"] == "ACTIVE"
    assert f"model       {model_id}, 300.6 kB uploaded" in out
    assert f"endpoint    {here.cloud.url}/{live_id}/predict" in out
    assert f'make predict-oci PROMPT="My dog is cute, but" DEPLOYMENT={here.path}' in out
    assert "is not on this machine: its size and what is in it are not checked" in err
    assert "MODEL_DEPLOYMENT_CREATE: a step" in err
    assert live["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["modelId"] == model_id


def test_what_is_sent_is_what_a_dry_run_shows(here):
    code, out, _ = here.run("deploy", DRY_RUN="1")
    assert code == 0
    assert here.cloud.seen == []
    shown = json.loads(out)
    here.deploy()
    assert here.cloud.said("POST .*/models$") == [shown["POST /20190101/models"]]
    (sent,) = here.cloud.said("POST .*/modelDeployments$")
    (model_id,) = here.cloud.models
    assert json.dumps(sent).replace(model_id, module.UNKNOWN_MODEL) == json.dumps(
        shown["POST /20190101/modelDeployments"]
    )


def test_a_dry_run_by_the_letter(here):
    """With no network, no credentials and nothing assembled."""
    path = written(here.folder, account__config_file="/nowhere", models__systems=["gpt2_ensemble", "embedding"])
    code, out, err = here.run("deploy", DRY_RUN="1", DEPLOYMENT=str(path), PACKAGE="/tmp/model_repository.zip")
    assert code == 0, err
    assert out == (GOLDEN / "dry_run.json").read_text()
    assert "not assembled yet: gpt2_ensemble embedding (make models); the zip is not checked" in err


def test_a_second_run_changes_nothing(here, capsys):
    first = here.deploy()
    before = len(here.cloud.seen)
    assert here.deploy().id == first.id
    assert {method for method, _, _ in here.cloud.seen[before:]} == {"GET", "HEAD"}
    assert "as it was" in capsys.readouterr().out


def test_what_changed_is_changed_one_after_the_other(here):
    first = here.deploy()
    changed = {"instances__count": 3, "instances__bandwidth_mbps": 40, "tags__team": "search"}
    assert here.deploy(**changed).id == first.id
    assert len(here.cloud.said("PUT .*modelDeployments")) == 3
    assert here.cloud.said("deactivate") == []
    assert len(here.cloud.models) == 1
    before = len(here.cloud.seen)
    here.deploy(**changed)
    assert not [path for method, path, _ in here.cloud.seen[before:] if method not in ("GET", "HEAD")]


def test_a_new_zip_is_a_new_model(here):
    first = here.deploy()
    here.change_the_model()
    assert here.deploy().id == first.id
    assert len(here.cloud.models) == 2
    newest = list(here.cloud.models)[-1]
    live = here.cloud.deployments[first.id]["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]
    assert live["modelId"] == newest
    assert here.cloud.models[newest]["artifact"] == (here.folder / "own.zip").read_bytes()
    assert here.cloud.said("deactivate") == []


def test_model_and_container_change_while_it_is_stopped(here, capsys):
    first = here.deploy()
    here.change_the_model()
    assert here.deploy(container__environment={"TRITON_LOG_VERBOSE": "1"}, instances__count=2).id == first.id
    asked = [f"{method} {path.rpartition('/')[2]}" for method, path, _ in here.cloud.seen if "actions" in path]
    assert asked == ["POST deactivate", "POST activate"]
    assert len(here.cloud.said("PUT .*modelDeployments")) == 1
    assert "it does not serve meanwhile" in capsys.readouterr().out
    assert states(here.cloud.deployments) == ["ACTIVE"]


def test_one_that_was_stopped_is_started(here):
    first = here.deploy()
    here.cloud.deployments[first.id]["lifecycleState"] = "INACTIVE"
    assert here.deploy().lifecycle_state == "ACTIVE"
    assert here.cloud.said("PUT .*modelDeployments") == []
    here.cloud.deployments[first.id]["lifecycleState"] = "INACTIVE"
    assert here.deploy(instances__count=2, instances__bandwidth_mbps=50).lifecycle_state == "ACTIVE"
    assert len(here.cloud.said("PUT .*modelDeployments")) == 1


def test_a_container_that_does_not_start_is_said_and_made_anew(here):
    here.cloud.fails = "Container exited with code 1."
    with pytest.raises(
        UserError, match=r"creating triton-transformers failed: Container exited with code 1\. The cont"
    ):
        here.deploy()
    assert states(here.cloud.deployments) == ["FAILED"]
    assert here.deploy().lifecycle_state == "ACTIVE"
    assert states(here.cloud.deployments) == ["DELETED", "ACTIVE"]
    assert len(here.cloud.models) == 1


def test_what_is_emptied_is_emptied(here):
    logs = {"logs__group_id": "ocid1.loggroup.x", "logs__access_id": "ocid1.log.a", "logs__predict_id": "ocid1.log.b"}
    here.deploy(deployment__description="of ours", **logs)
    here.deploy(**logs | {"logs__access_id": ""})
    (live,) = here.cloud.deployments.values()
    assert (live["description"], list(live["categoryLogDetails"])) == ("", ["predict"])
    here.deploy()
    assert live["categoryLogDetails"] == {}
    puts = len(here.cloud.said("PUT"))
    here.deploy()
    assert len(here.cloud.said("PUT")) == puts


@pytest.mark.parametrize("at", ["PUT .*modelDeployments", "POST .*/actions/activate"])
def test_one_that_stays_stopped_is_said(here, capsys, at):
    here.deploy()
    here.change_the_model()
    here.cloud.fault(at, 400)
    changed = {"container__environment": {"TRITON_LOG_VERBOSE": "1"}}
    with pytest.raises(UserError), told():
        here.deploy(**changed)
    assert states(here.cloud.deployments) == ["INACTIVE"]
    assert "triton-transformers is stopped, and does not serve: the same command" in capsys.readouterr().err
    assert here.deploy(**changed).lifecycle_state == "ACTIVE"


def test_what_cannot_be_changed_while_it_serves(here, capsys):
    here.deploy()
    here.cloud.fault("PUT", 400)
    with pytest.raises(UserError), told():
        here.deploy(instances__count=2)
    assert "instances: what cannot be changed while it serves can be while it is stopped" in capsys.readouterr().err
    assert states(here.cloud.deployments) == ["ACTIVE"]


def test_what_nobody_saw_fail_is_said(here, capsys):
    here.deploy()
    (live,) = here.cloud.deployments.values()
    live |= {"lifecycleState": "FAILED", "lifecycleDetails": "Image pull [failed]."}
    here.deploy()
    assert "had failed (Image pull [failed].): making it anew" in capsys.readouterr().out


def test_a_log_that_cannot_be_read_ends_no_wait(here):
    here.cloud.fault(".*/workRequests/.*/logs", 404)
    assert here.deploy().lifecycle_state == "ACTIVE"


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"[{}]", b"[1]", b'{"a": 1}'])
def test_somebody_else_answers(here, answer):
    here.cloud.instead = answer
    with pytest.raises(UserError, match="what answered is not Oracle Cloud"), told():
        here.deploy()


def test_an_update_that_fails_is_said(here):
    here.deploy()
    here.cloud.fails = "Container exited with code 1."
    with pytest.raises(UserError, match=r"updating container of triton-transformers failed: Container exited"):
        here.deploy(container__environment={"TRITON_LOG_VERBOSE": "1"})


@pytest.mark.parametrize(
    ("at", "models", "uploads"),
    [
        ("POST .*/models$", 1, 1),
        ("HEAD .*/artifact/content", 1, 1),
        ("POST .*/artifact$", 1, 2),
        ("POST .*/modelDeployments$", 1, 1),
        ("GET .*/workRequests/[^/]+$", 1, 1),
    ],
)
def test_killed_and_run_again(here, at, models, uploads):
    if "HEAD" in at:  # only a second run looks for an artifact
        here.deploy()
    here.cloud.stops_at = at
    process = here.command("deploy")
    deadline = time.monotonic() + 30
    while here.cloud.stops_at and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not here.cloud.stops_at
    process.kill()
    process.wait()
    assert here.deploy().lifecycle_state == "ACTIVE"
    assert len(here.cloud.models) == models
    assert len(here.cloud.deployments) == 1
    assert len(here.cloud.said("POST .*/artifact$")) == uploads


@pytest.mark.parametrize(("at", "goes_on"), [("GET .*/workRequests/[^/]+$", True), ("POST .*/artifact$", False)])
def test_an_interrupt_says_what_becomes_of_it(here, at, goes_on):
    here.cloud.stops_at = at
    process = here.command("deploy")
    deadline = time.monotonic() + 30
    while here.cloud.stops_at and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(2)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("interrupted\n")
    assert ("It goes on in Oracle Cloud, and the same command waits for it again." in err) == goes_on


def test_it_does_not_wait_for_ever(here, monkeypatch):
    monkeypatch.setattr("tests.support.oci_stand_in.WORK_POLLS", 10_000)
    deployment = here.deployment()
    short = replace(deployment, wait=replace(deployment.wait, minutes=0.005))
    with pytest.raises(
        UserError, match=r"creating triton-transformers: not within 0\.005 minutes .* waits for it again"
    ):
        roll_out(here.service(), short, here.artifact())


def test_somebody_elses_is_left_alone(here):
    here.deploy()
    (live,) = here.cloud.deployments.values()
    live["freeformTags"] = {}
    with pytest.raises(UserError, match="that was not made by make deploy-oci"):
        here.deploy()
    with pytest.raises(UserError, match=r"in the way of delete model \(409\): the model is deployed"), told():
        destroy(here.service(), here.deployment())
    assert states(here.cloud.deployments) == ["ACTIVE"]


def test_ours_is_told_from_a_twin(here):
    here.deploy()
    (live,) = here.cloud.deployments.values()
    twin = copy.deepcopy(live) | {"id": "ocid1.twin", "freeformTags": {}}
    twin["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["modelId"] = "ocid1.another"
    here.cloud.deployments["ocid1.twin"] = twin
    destroy(here.service(), here.deployment())
    assert states(here.cloud.deployments) == ["DELETED", "ACTIVE"]


# --- large zips -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(limits, "DIRECT_BYTES", 1000)
    monkeypatch.setattr(catalogue, "PART_BYTES", 100_000)


def test_a_large_zip_goes_by_a_bucket(here, small_parts):
    here.deploy(models__bucket="artifacts")
    (model,) = here.cloud.models.values()
    assert model["artifact"] == (here.folder / "own.zip").read_bytes()
    assert here.cloud.said("POST .*/artifact$") == []
    assert here.cloud.objects == {}


def test_parts_that_were_uploaded_stay(here, small_parts):
    here.cloud.fault("PUT .*/u/.*", 400)
    with pytest.raises(UserError, match=r"refused upload part \(400 Fault\)"), told():
        here.deploy(models__bucket="artifacts")
    sent = len(here.cloud.said("PUT .*/u/"))
    here.deploy(models__bucket="artifacts")
    (model,) = here.cloud.models.values()
    assert model["artifact"] == (here.folder / "own.zip").read_bytes()
    assert len(here.cloud.said("PUT .*/u/")) - sent < 4
    assert here.cloud.uploads == {}


def test_nothing_stays_in_the_bucket(here, small_parts):
    """Of a run that was killed while the catalogue took it, of another zip, of what was never finished."""
    bucket = {"models__bucket": "artifacts"}
    here.deploy(**bucket)
    left = {f"artifacts/triton-transformers/triton-transformers/{name}.zip": b"x" for name in "ab"}
    theirs = {"artifacts/triton-transformers/other/a.zip": b"x", "artifacts/a.zip": b"x"}
    upload = {"namespace": "tests", "bucket": "artifacts", "timeCreated": now(), "parts": {}}
    for act in (lambda: here.deploy(**bucket), lambda: destroy(here.service(), here.deployment(**bucket))):
        here.cloud.objects |= left | theirs
        here.cloud.uploads["1"] = upload | {"object": "triton-transformers/triton-transformers/c.zip", "uploadId": "1"}
        here.cloud.uploads["2"] = upload | {"object": "triton-transformers/other/c.zip", "uploadId": "2"}
        act()
        assert here.cloud.objects == theirs
        assert list(here.cloud.uploads) == ["2"]


def test_a_zip_that_is_packed_anew_is_not_uploaded(here):
    artifact = here.artifact()
    here.change_the_model()
    here.artifact()
    with pytest.raises(UserError, match=r"own\.zip was packed anew meanwhile: run the same command again"):
        roll_out(here.service(), here.deployment(), artifact)
    assert here.cloud.said("POST .*/artifact$") == []


def test_a_zip_that_is_packed_anew_while_its_parts_go_is_not_taken(here, small_parts, monkeypatch):
    artifact = here.artifact()
    parts = catalogue.upload_parts

    def meanwhile(*arguments) -> None:
        parts(*arguments)
        here.change_the_model()
        here.artifact()

    monkeypatch.setattr(catalogue, "upload_parts", meanwhile)
    with pytest.raises(UserError, match="was packed anew meanwhile"):
        roll_out(here.service(), here.deployment(models__bucket="artifacts"), artifact)
    assert here.cloud.objects == {}
    assert here.cloud.said("exportArtifact") == []


def test_a_large_zip_without_a_bucket(here, small_parts):
    with pytest.raises(
        UserError, match=r"over 1\.0 kB it goes through a bucket of Object Storage, and models\.bucket names"
    ):
        prepared(here.settings, here.deployment(), push_it=False)


def test_models_that_the_memory_cannot_hold(here):
    deployment = here.deployment()
    small = replace(deployment, instances=replace(deployment.instances, memory_gb=0.0001))
    with pytest.raises(UserError, match=r"the models have 300\.6 kB, and instances\.memory_gb = 0\.0001 cannot hold"):
        prepared(here.settings, small, push_it=False)


def test_a_zip_of_other_systems(here):
    here.artifact()
    deployment = here.deployment(models__systems=["own", "other"])
    with pytest.raises(UserError, match=r"has no model_repository/other/config\.pbtxt: make package SYSTEMS=other"):
        limits.check(deployment, None, here.folder / "own.zip", set())
    (here.folder / "own.zip").write_text("no")
    with pytest.raises(UserError, match="is no zip: make package"):
        limits.check(deployment, None, here.folder / "own.zip", set())


# --- images -----------------------------------------------------------------------------------------------------------


def test_an_image_that_was_not_pushed(here, monkeypatch):
    image = Image("iad.ocir.io/tests/triton:1.0", 1, [], ["tokenizer"], "")
    monkeypatch.setattr(Image, "here", lambda name: image)
    with pytest.raises(UserError, match="was not pushed from this machine since it was built: say PUSH=1"):
        prepared(here.settings, here.deployment(), push_it=False)
    built = replace(image, digest=f"sha256:{'0' * 64}")  # by an engine that says so before it is pushed
    monkeypatch.setattr(Image, "here", lambda name: built)
    monkeypatch.setattr(Image, "is_pushed", lambda _: False)
    with pytest.raises(UserError, match="say PUSH=1"):
        prepared(here.settings, here.deployment(), push_it=False)
    pushed = []

    def push(name: str) -> None:
        pushed.append(name)
        monkeypatch.setattr(Image, "here", lambda name: replace(image, digest=f"sha256:{'1' * 64}"))

    monkeypatch.setattr(module, "push", push)
    deployment, _ = prepared(here.settings, here.deployment(), push_it=True)
    assert pushed == ["iad.ocir.io/tests/triton:1.0"]
    assert bodies.container(deployment, oci.data_science.models.OcirModelDeploymentEnvironmentConfigurationDetails)
    assert deployment.container.image == f"iad.ocir.io/tests/triton:1.0@sha256:{'1' * 64}"


def test_nothing_is_uploaded_of_what_would_be_refused(here, monkeypatch):
    image = Image("iad.ocir.io/tests/triton:1.0", 17 * 10**9, [], ["detokenizer"], "sha256:1")
    monkeypatch.setattr(Image, "here", lambda name: image)
    monkeypatch.setattr(module, "push", lambda name: pytest.fail("pushed"))
    with pytest.raises(UserError) as error:
        prepared(here.settings, here.deployment(), push_it=True)
    assert len(str(error.value).splitlines()) == 3


# --- destroy ----------------------------------------------------------------------------------------------------------


def test_destroy(here):
    here.deploy()
    here.change_the_model()
    live = here.deploy()
    code, out, _ = here.run("destroy", DRY_RUN="1")
    named = [f"deployment {live.id}, active", *(f"model {model}" for model in reversed(here.cloud.models))]
    assert (code, out.splitlines()) == (0, [f"would delete  {each}" for each in named])
    assert states(here.cloud.deployments) == ["ACTIVE"]
    code, out, _ = here.run("destroy")
    assert (code, out.splitlines()) == (0, [f"deleting  {each}" for each in named])
    assert states(here.cloud.deployments) == ["DELETED"]
    assert states(here.cloud.models) == ["DELETED"] * 2
    code, out, _ = here.run("destroy")
    assert (code, out) == (0, "there is nothing of triton-transformers in ocid1.compartment.oc1..tests\n")
    assert here.deploy().lifecycle_state == "ACTIVE"


@pytest.mark.parametrize("at", ["DELETE .*/modelDeployments", "GET .*/workRequests/[^/]+$", "DELETE .*/models"])
def test_a_killed_destroy_is_run_again(here, at):
    here.deploy()
    here.cloud.stops_at = at
    process = here.command("destroy")
    deadline = time.monotonic() + 30
    while here.cloud.stops_at and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    destroy(here.service(), here.deployment())
    assert states(here.cloud.deployments) + states(here.cloud.models) == ["DELETED"] * 2


# --- what the service refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "status", "code", "said"),
    [
        ("POST .*/models$", 401, "NotAuthenticated", "Oracle Cloud does not take the signature (401)"),
        (
            "POST .*/models$",
            404,
            "NotAuthorizedOrNotFound",
            "not there, or not allowed to you, at create model (404): check the identifiers",
        ),
        (
            "POST .*/modelDeployments$",
            409,
            "Conflict",
            "something is in the way of create model deployment (409): as ask",
        ),
        ("POST .*/models$", 429, "TooManyRequests", "too many requests at create model (429), also after waiting"),
        ("GET .*/models$", 500, "InternalServerError", "Oracle Cloud failed at list models (500)"),
        (
            "POST .*/modelDeployments$",
            400,
            "LimitExceeded",
            "a limit of your tenancy is reached at create model deployment",
        ),
        (
            "POST .*/modelDeployments$",
            400,
            "QuotaExceeded",
            "a limit of your tenancy is reached at create model deployment",
        ),
        ("POST .*/models$", 400, "InvalidParameter", "refused create model (400 InvalidParameter): as asked for"),
    ],
)
def test_each_refusal_is_a_sentence(here, at, status, code, said):
    here.cloud.fault(at, status, code)
    with pytest.raises(UserError) as error, told():
        here.deploy()
    assert said in str(error.value)
    assert str(error.value).endswith("(opc-request-id TESTS/1/2)")
    assert "\n" not in str(error.value)


def test_it_is_asked_again_where_that_helps(here):
    """By Oracle's SDK itself, as it does for everybody."""
    here.cloud.fault("GET .*/modelDeployments$", 503, "ServiceUnavailable")
    here.cloud.fault("POST .*/models$", 429, "TooManyRequests")
    code, out, err = here.run("deploy")
    assert code == 0, out + err
    assert len(here.cloud.models) == len(here.cloud.deployments) == 1


def test_a_signature_of_another_key(here, tmp_path_factory):
    here.deploy()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with oci_stand_in(elsewhere) as other:
        account = replace(here.deployment().account, config_file=str(other.config_file()))
    with pytest.raises(UserError, match=r"does not take the signature \(401\)"), told():
        roll_out(here.service(account), here.deployment(), here.artifact())


def test_a_shape_that_there_is_not(here):
    shape = "VM.Standrd.E4.Flex"
    with pytest.raises(UserError, match=rf"{shape}': us-ashburn-1 has VM\.GPU\.A10\.1, VM\.Standard\.E4\.Flex$"):
        check_shape(here.service(), here.deployment(instances__shape=shape))
    here.cloud.fault("modelDeploymentShapes", 404)
    check_shape(here.service(), here.deployment(instances__shape=shape))


def test_there_is_no_way_to_it(here):
    """Said at once, by each command, and nothing is made."""
    own = {"account__config_file": str(here.cloud.config_file()), "models__systems": ["embedding"]}
    path = written(here.folder, account__endpoint="http://127.0.0.1:1", **own)
    for name in ("deploy", "predict", "destroy"):
        code, _, said = here.run(name, DEPLOYMENT=str(path), PROMPT="go")
        assert code == 1
        assert "http://127.0.0.1:1 does not answer (ConnectionError): check the network" in said
    assert here.cloud.seen == []


@pytest.mark.parametrize("name", ["deploy", "destroy"])
def test_nearly_a_dry_run_is_none(here, name):
    code, _, said = here.run(name, DRY_RUN="true")
    assert (code, here.cloud.seen) == (1, [])
    assert "DRY_RUN=true: must be one of 0, 1" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"SYSTEM": "gpt2_generate"}, "SYSTEM=gpt2_generate is not deployed: models.systems has own. Add it there"),
        ({"REQUEST": "request.json"}, "PROMPT and REQUEST both say what is asked: say one"),
        ({"OCI_ENDPOINT": "foo"}, "OCI_ENDPOINT=foo: must begin with https://"),
        ({"TOKENS": "many"}, "TOKENS=many: must be a whole number"),
        ({}, "SYSTEM=own asks for tensors, which a PROMPT is not"),
    ],
)
def test_what_is_wrong_with_a_question_is_said_before_anybody_is_asked(here, settings, said):
    code, _, error = here.run("predict", PROMPT="go", **settings)
    assert (code, here.cloud.seen) == (1, [])
    assert said in error


def test_who_has_the_address_needs_no_more_of_the_file(here):
    """Not the compartment, nor the project, nor the image."""
    path = written(here.folder, **dict.fromkeys(IDS, ""), account__config_file=str(here.cloud.config_file()))
    (here.folder / "request.json").write_text('{"inputs": []}')
    settings = {"REQUEST": str(here.folder / "request.json"), "DEPLOYMENT": str(path)}
    code, _, error = here.run("predict", OCI_ENDPOINT=f"{here.cloud.url}/ocid1.x", **settings)
    assert code == 1
    assert "or you may not ask it (404)" in error


def test_nobody_answers(here):
    account = replace(here.deployment().account, endpoint="http://127.0.0.1:1")
    with pytest.raises(UserError, match="Oracle Cloud does not answer"), told():
        roll_out(here.service(account), here.deployment(), here.artifact())


# --- who asks ---------------------------------------------------------------------------------------------------------


def profile(here: Here, old: str, new: str) -> Account:
    path = here.cloud.config_file()
    path.write_text(path.read_text().replace(old, new))
    return replace(Account(), config_file=str(path))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[DEFAULT]", "[PROD]", "{here.folder}/config has no profile DEFAULT; it has PROD"),
        ("user=ocid1.user.oc1..tests\ntenancy", "tenant", "tenancy is missing, user is missing"),
        ("[DEFAULT]", "", "is no configuration file"),
        ("user=ocid1.user.oc1..tests\n", "", "user is missing"),
        ("tenancy=ocid1.tenancy.oc1..tests", "tenancy=x", "tenancy is malformed"),
        ("key.pem", "nothing.pem", "its key_file cannot be read"),
        ("key.pem", "config", "its key_file is no private key"),
    ],
)
def test_a_profile_that_will_not_do(here, old, new, said):
    with pytest.raises(UserError) as error:
        credentials(profile(here, old, new))
    assert said.format(here=here) in str(error.value)
    assert "PRIVATE" not in str(error.value)


@pytest.mark.parametrize(
    ("phrase", "said"),
    [
        ("", "its key wants a pass_phrase, and there is none"),
        ("pass_phrase=wrong\n", "or its pass_phrase is another's"),
    ],
)
def test_a_key_with_a_pass_phrase(here, phrase, said):
    account = profile(here, "[DEFAULT]\n", f"[DEFAULT]\n{phrase}")
    how = serialization.BestAvailableEncryption(b"right")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (here.folder / "key.pem").write_bytes(here.cloud.key.private_bytes(*formats, how))
    with pytest.raises(UserError, match=said):
        credentials(account)


def test_a_session_without_what_it_takes(here):
    with pytest.raises(UserError, match="/nowhere cannot be read"):
        credentials(profile(here, "region=", "security_token_file=/nowhere\nregion="))
    with pytest.raises(UserError, match="key_file is missing"):
        credentials(profile(here, f"key_file={here.folder}/key.pem", "security_token_file=/nowhere"))


def test_no_configuration_at_all(here):
    with pytest.raises(UserError, match="there is no /nowhere/config: `oci setup config` writes one"):
        credentials(replace(Account(), config_file="/nowhere/config"))


def test_no_such_profile(here):
    with pytest.raises(UserError, match="config has no profile OTHER; it has DEFAULT"):
        credentials(replace(profile(here, "", ""), profile="OTHER"))


def test_no_resource_principal(monkeypatch):
    monkeypatch.delenv("OCI_RESOURCE_PRINCIPAL_VERSION", raising=False)
    with pytest.raises(UserError, match=r"account\.auth = 'resource_principal': there is none here"):
        credentials(replace(Account(), auth="resource_principal"))


def test_a_resource_principal(here, monkeypatch):
    """As a notebook session of OCI's has it: a token that says until when, and the key that goes with it."""
    parts = ({"alg": "RS256"}, {"exp": int(time.time()) + 3600, "res_tenant": "ocid1.tenancy.oc1..tests"})
    token = ".".join(base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in (*parts, {}))
    here.cloud.config_file()
    for name, value in {
        "VERSION": "2.2",
        "RPST": token,
        "PRIVATE_PEM": (here.folder / "key.pem").read_text(),
        "REGION": "us-ashburn-1",
    }.items():
        monkeypatch.setenv(f"OCI_RESOURCE_PRINCIPAL_{name}", value)
    account = replace(here.deployment().account, auth="resource_principal", config_file="/nowhere")
    live = roll_out(here.service(account), here.deployment(), here.artifact())
    assert live.lifecycle_state == "ACTIVE"


def test_the_region_may_be_said_here(here):
    account = replace(profile(here, "region=us-ashburn-1\n", ""), region="eu-frankfurt-1")
    assert Service.of(account).data_science.base_client.endpoint.startswith("https://datascience.eu-frankfurt-1.")
    with pytest.raises(UserError, match="region is missing"):
        credentials(replace(account, region=""))


def test_a_session_token(here):
    """As `oci session authenticate` keeps it."""
    (here.folder / "token").write_text("a.token.b")
    account = profile(here, "region=", f"security_token_file={here.folder}/token\nregion=")
    assert credentials(account)[1].api_key == "ST$a.token.b"
