"""`make deploy-oci` and `destroy-oci` against a stand-in for Oracle Cloud whose deployments serve nothing."""

from __future__ import annotations

import base64
import copy
import functools
import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import oci
import pytest

from deploy.oci import deploy, limits, registered_models
from deploy.oci import requests as bodies
from deploy.oci.client import service_errors
from deploy.oci.container_image import Image
from deploy.oci.deploy import prepare
from deploy.oci.deployment import Account
from deploy.oci.destroy import destroy
from deploy.oci.limits import check_shape
from deploy.oci.rollout import roll_out
from tests.support.oci import EVERYTHING, REQUIRED, Machine, write_deployment
from tests.support.oci_stand_in import now, oci_server
from triton_transformers.settings import ROOT, UserError

GOLDEN = ROOT / "tests/golden/oci"
load_private_key = functools.cache(oci.signer.load_private_key)  # it checks the key for a tenth of a second


@pytest.fixture(scope="module")
def server():
    with oci_server() as server:
        yield server


@pytest.fixture
def machine(tmp_path, server, monkeypatch):
    """Return a machine with models that are assembled, where waits of Oracle's SDK pass at once."""
    clock = SimpleNamespace(now=0.0)
    waits = SimpleNamespace(time=lambda: clock.now, sleep=lambda seconds: vars(clock).update(now=clock.now + seconds))
    monkeypatch.setattr("oci.waiter.time", waits)
    monkeypatch.setattr("oci.retry.retry.time", waits)
    monkeypatch.setattr("oci.signer.load_private_key", load_private_key)
    monkeypatch.setattr(Image, "inspect", lambda name: None)
    monkeypatch.setattr(deploy, "assemble", lambda settings: None)
    return Machine(tmp_path, server.new_cloud(tmp_path))


def states(records: dict[str, dict]) -> list[str]:
    return [record["lifecycleState"] for record in records.values()]


def model_in(live: dict) -> str:
    return live["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["modelId"]


VERBOSE = {"container__environment": {"TRITON_LOG_VERBOSE": "1"}}


@pytest.mark.slow
def test_first_deployment_creates_model_and_deployment(machine):
    """Run in a process of its own, which also runs `make models`."""
    done = machine.run_process("deploy")
    assert done.returncode == 0, done.stdout + done.stderr
    ((model_id, model),) = machine.cloud.models.items()
    ((live_id, live),) = machine.cloud.deployments.items()
    assert model["artifact"] == (machine.folder / "own.zip").read_bytes()
    assert model["freeformTags"][bodies.ARTIFACT] == machine.artifact().sha256
    assert (live["lifecycleState"], model_in(live)) == ("ACTIVE", model_id)
    assert f"model       {model_id}, 300.6 kB uploaded" in done.stdout
    assert f"endpoint    {machine.cloud.url}/{live_id}/predict" in done.stdout
    assert f'`make predict-oci PROMPT="My dog is cute, but" DEPLOYMENT={machine.folder}' in done.stdout
    assert "is not on this machine: its size and content are not checked" in done.stderr
    assert "creating triton-transformers\n  MODEL_DEPLOYMENT_CREATE: a step\n" in done.stderr


def test_dry_run_shows_what_is_sent(machine):
    code, out, _ = machine.run("deploy", DRY_RUN="1")
    assert code == 0
    assert machine.cloud.received == []
    shown = json.loads(out)
    machine.deploy()
    assert machine.cloud.bodies("POST .*/models$") == [shown["POST /20190101/models"]]
    (sent,) = machine.cloud.bodies("POST .*/modelDeployments$")
    (model_id,) = machine.cloud.models
    assert json.dumps(sent).replace(model_id, deploy.UNKNOWN_MODEL) == json.dumps(
        shown["POST /20190101/modelDeployments"]
    )


def test_dry_run_needs_no_credentials_and_no_models(machine):
    systems = ["gpt2_ensemble", "embedding"]
    path = write_deployment(machine.folder, **EVERYTHING, account__config_file="/nowhere", models__systems=systems)
    code, out, err = machine.run("deploy", DRY_RUN="1", DEPLOYMENT=str(path), PACKAGE="/tmp/model_repository.zip")
    assert code == 0, err
    assert out == (GOLDEN / "dry_run.json").read_text()
    assert "not assembled yet: gpt2_ensemble embedding (make models); the zip is not checked" in err


# What changes after the first deployment: the state, the zip, settings -> the requests that change something, a notice.
COUNT, BANDWIDTH = {"instances__count": 3}, {"instances__bandwidth_mbps": 40}
FLOWS = {
    "nothing": ("ACTIVE", False, {}, [], "deployment  {live}, unchanged"),
    "settings": ("ACTIVE", False, COUNT | BANDWIDTH | {"tags__team": "search"}, ["PUT"] * 3, "{model}, unchanged"),
    "zip": ("ACTIVE", True, {}, ["POST models", "POST artifact", "PUT"], "changes: model"),
    "zip and container": ("ACTIVE", True, VERBOSE | COUNT, ["POST models", "POST artifact", "POST deactivate", "PUT",
                          "POST activate"], "the deployment does not serve meanwhile"),
    "stopped": ("INACTIVE", False, {}, ["POST activate"], ""),
    "stopped, and settings": ("INACTIVE", False, COUNT | BANDWIDTH, ["PUT", "POST activate"], ""),
}  # fmt: skip


def changing(machine, since: int) -> list[str]:
    """Return the requests that change something, with the last part of the path unless it is a name."""
    requests = [(method, path.rpartition("/")[2]) for method, path, _ in machine.cloud.received[since:]]
    return [
        method if "ocid1" in last else f"{method} {last}" for method, last in requests if method in "POST PUT DELETE"
    ]


@pytest.mark.parametrize("name", FLOWS)
def test_change_takes_few_requests_and_is_made_once(machine, capsys, name):
    state, new_zip, settings, requests, notice = FLOWS[name]
    machine.cloud.fault(".*/workRequests/.*/logs", 404)  # an unreadable log does not end the wait
    first = machine.deploy()
    machine.cloud.deployments[first.id]["lifecycleState"] = state
    if new_zip:
        machine.change_model()
    before = len(machine.cloud.received)
    live = machine.deploy(**settings)
    assert (live.id, live.lifecycle_state, changing(machine, before)) == (first.id, "ACTIVE", requests)
    newest = [*machine.cloud.models][-1]
    assert (model_in(machine.cloud.deployments[first.id]), len(machine.cloud.models)) == (newest, 1 + new_zip)
    assert machine.cloud.models[newest]["artifact"] == (machine.folder / "own.zip").read_bytes()
    assert notice.format(live=first.id, model=newest) in capsys.readouterr().out
    before = len(machine.cloud.received)
    machine.deploy(**settings)
    assert changing(machine, before) == []


def test_failed_deployment_is_reported_and_replaced(machine, capsys):
    machine.cloud.container_error = "Container exited with code 1."
    failure = r"creating triton-transformers failed: Container exited with code 1\. The cont"
    with pytest.raises(UserError, match=failure):
        machine.deploy()
    (live,) = machine.cloud.deployments.values()
    assert live["lifecycleState"] == "FAILED"
    live["lifecycleDetails"] = "Image pull [failed]."
    assert machine.deploy().lifecycle_state == "ACTIVE"
    assert "failed (Image pull [failed].): replacing it" in capsys.readouterr().out
    assert states(machine.cloud.deployments) == ["DELETED", "ACTIVE"]
    assert len(machine.cloud.models) == 1


def test_emptied_settings_are_cleared(machine):
    logs = {"logs__group_id": "ocid1.loggroup.x", "logs__access_id": "ocid1.log.a", "logs__predict_id": "ocid1.log.b"}
    machine.deploy(deployment__description="of ours", **logs)
    machine.deploy(**logs | {"logs__access_id": ""})
    (live,) = machine.cloud.deployments.values()
    assert (live["description"], list(live["categoryLogDetails"])) == ("", ["predict"])
    machine.deploy()
    assert live["categoryLogDetails"] == {}
    puts = len(machine.cloud.bodies("PUT"))
    machine.deploy()
    assert len(machine.cloud.bodies("PUT")) == puts


@pytest.mark.parametrize("request_pattern", ["PUT .*modelDeployments", "POST .*/actions/activate"])
def test_deployment_that_stays_stopped_is_reported_and_started_later(machine, capsys, request_pattern):
    machine.deploy()
    machine.change_model()
    machine.cloud.fault(request_pattern, 400)
    with pytest.raises(UserError), service_errors():
        machine.deploy(**VERBOSE)
    assert states(machine.cloud.deployments) == ["INACTIVE"]
    assert "triton-transformers is stopped and does not serve. Run the same" in capsys.readouterr().err
    assert machine.deploy(**VERBOSE).lifecycle_state == "ACTIVE"


def test_refused_change_of_active_deployment_names_the_way_out(machine, capsys):
    machine.deploy()
    machine.cloud.fault("PUT", 400)
    with pytest.raises(UserError), service_errors():
        machine.deploy(instances__count=2)
    assert "instances: the service refuses this change while the deployment serves. Deac" in capsys.readouterr().err
    assert states(machine.cloud.deployments) == ["ACTIVE"]


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"[{}]", b"[1]", b'{"a": 1}'])
def test_answer_of_a_proxy_is_recognized(machine, answer):
    machine.cloud.proxy_answer = answer
    with pytest.raises(UserError, match="Another server answered in Oracle Cloud's place"), service_errors():
        machine.deploy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hanging_request", "models", "uploads"),
    [
        ("POST .*/models$", 1, 1),
        ("POST .*/artifact$", 1, 2),
        ("GET .*/workRequests/[^/]+$", 1, 1),
    ],
)
def test_killed_deployment_is_continued(machine, hanging_request, models, uploads):
    with machine.hanging_command("deploy", hanging_request) as command:
        command.kill()
    assert machine.deploy().lifecycle_state == "ACTIVE"
    assert len(machine.cloud.models) == models
    assert len(machine.cloud.deployments) == 1
    assert len(machine.cloud.bodies("POST .*/artifact$")) == uploads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hanging_request", "continues"), [("GET .*/workRequests/[^/]+$", True), ("POST .*/artifact$", False)]
)
def test_interrupt_prints_whether_the_work_continues(machine, hanging_request, continues):
    with machine.hanging_command("deploy", hanging_request) as command:
        os.kill(command.pid, signal.SIGINT)
        assert command.wait(120) == 130
    output = (machine.folder / "output").read_text()
    assert output.endswith("interrupted\n")
    assert ("It continues in Oracle Cloud, and the same command waits for it again." in output) == continues


def test_wait_ends_at_its_limit(machine, monkeypatch):
    monkeypatch.setattr("tests.support.oci_stand_in.WORK_POLLS", 10_000)
    with pytest.raises(
        UserError, match=r"creating triton-transformers: not finished after 1 minutes .* waits for it again"
    ):
        machine.deploy(wait__minutes=1, wait__poll_seconds=20)


def test_deployment_of_others_is_left_alone(machine):
    machine.deploy()
    (live,) = machine.cloud.deployments.values()
    ours, live["freeformTags"] = live["freeformTags"], {}
    with pytest.raises(UserError, match="that was not created by make deploy-oci"):
        machine.deploy()
    in_the_way = r"delete model: another operation is in the way \(409\): the model is deployed"
    with pytest.raises(UserError, match=in_the_way), service_errors():
        destroy(machine.usual_service, machine.deployment())
    assert states(machine.cloud.deployments) == ["ACTIVE"]
    # Another deployment of this name, with a model of its own, does not keep ours.
    twin = copy.deepcopy(live) | {"id": "ocid1.twin", "freeformTags": {}}
    twin["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["modelId"] = "ocid1.another"
    live["freeformTags"] = ours
    machine.cloud.deployments["ocid1.twin"] = twin
    destroy(machine.usual_service, machine.deployment())
    assert states(machine.cloud.deployments) == ["DELETED", "ACTIVE"]


# --- large zips -------------------------------------------------------------------------------------------------------

BUCKET = {"models__bucket": "artifacts"}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(limits, "DIRECT_BYTES", 1000)
    monkeypatch.setattr(registered_models, "PART_BYTES", 100_000)


def test_uploaded_parts_are_not_uploaded_again(machine, small_parts):
    machine.cloud.fault("PUT .*/u/.*", 400)
    with pytest.raises(UserError, match=r"upload part: .* refused the request \(400 Fault\)"), service_errors():
        machine.deploy(**BUCKET)
    sent = len(machine.cloud.bodies("PUT .*/u/"))
    machine.deploy(**BUCKET)
    (model,) = machine.cloud.models.values()
    assert model["artifact"] == (machine.folder / "own.zip").read_bytes()
    assert len(machine.cloud.bodies("PUT .*/u/")) - sent < 4
    assert (machine.cloud.uploads, machine.cloud.objects, machine.cloud.bodies("POST .*/artifact$")) == ({}, {}, [])


@pytest.mark.parametrize("command", ["deploy", "destroy"])
def test_leftovers_in_the_bucket_are_deleted(machine, small_parts, command):
    """Delete objects of a killed run, of another zip, and of an unfinished upload."""
    machine.deploy(**BUCKET)
    ours = {f"artifacts/triton-transformers/triton-transformers/{name}.zip": b"x" for name in "ab"}
    foreign = {"artifacts/triton-transformers/other/a.zip": b"x", "artifacts/a.zip": b"x"}
    upload = {"namespace": "tests", "bucket": "artifacts", "timeCreated": now(), "parts": {}}
    machine.cloud.objects |= ours | foreign
    machine.cloud.uploads["1"] = upload | {"object": "triton-transformers/triton-transformers/c.zip", "uploadId": "1"}
    machine.cloud.uploads["2"] = upload | {"object": "triton-transformers/other/c.zip", "uploadId": "2"}
    if command == "deploy":
        machine.deploy(**BUCKET)
    else:
        destroy(machine.usual_service, machine.deployment(**BUCKET))
    assert machine.cloud.objects == foreign
    assert list(machine.cloud.uploads) == ["2"]


@pytest.mark.parametrize("during_upload", [False, True])
def test_zip_packed_again_is_refused(machine, small_parts, monkeypatch, during_upload):
    artifact = machine.artifact()

    def pack_again() -> None:
        machine.change_model()
        machine.artifact()

    upload_parts = registered_models.upload_parts
    monkeypatch.setattr(registered_models, "upload_parts", lambda *given: (upload_parts(*given), pack_again()))
    if not during_upload:
        monkeypatch.setattr(limits, "DIRECT_BYTES", 10**9)
        pack_again()
    with pytest.raises(UserError, match=r"own\.zip was packed again meanwhile. Run the same command again"):
        roll_out(machine.usual_service, machine.deployment(**BUCKET), artifact)
    assert machine.cloud.objects == {}
    assert machine.cloud.bodies("POST .*/artifact$") == machine.cloud.bodies("exportArtifact") == []


def test_unsuitable_zip_is_refused(machine, small_parts):
    path = machine.artifact().path
    deployment = machine.deployment(models__systems=["own", "other"])
    instances = deployment.instances.model_copy(update={"memory_gb": 0.0001})
    deployment = deployment.model_copy(update={"instances": instances})
    with pytest.raises(UserError) as error:
        limits.check(deployment, None, path, set())
    for message in (
        "/other/config.pbtxt: add it with `make package SYSTEMS=other`",
        "over 1.0 kB it must go through a bucket of Object Storage. Set models.bucket",
        "the models have 300.6 kB, more than instances.memory_gb = 0.0001 holds",
    ):
        assert message in str(error.value)
    path.write_text("no")
    with pytest.raises(UserError, match="is not a zip: write it with `make package`"):
        limits.check(deployment, None, path, set())


# --- images -----------------------------------------------------------------------------------------------------------

IMAGE = Image("iad.ocir.io/tests/triton:1.0", 1, [], ["tokenizer"], "")


@pytest.mark.parametrize("digest", ["", f"sha256:{'0' * 64}"])  # some engines name a digest before a push
def test_image_that_was_not_pushed_is_refused(machine, monkeypatch, digest):
    monkeypatch.setattr(Image, "inspect", lambda name: replace(IMAGE, digest=digest))
    monkeypatch.setattr(Image, "is_pushed", lambda _: False)
    with pytest.raises(UserError, match="was not pushed since it was built here\\. Run `docker login`, and set PUSH=1"):
        prepare(machine.settings, machine.deployment(), with_push=False)


def test_pushed_image_is_named_by_its_digest(machine, monkeypatch):
    monkeypatch.setattr(Image, "inspect", lambda name: IMAGE)
    pushed = []

    def push(name: str) -> None:
        pushed.append(name)
        monkeypatch.setattr(Image, "inspect", lambda name: replace(IMAGE, digest=f"sha256:{'1' * 64}"))

    monkeypatch.setattr(deploy, "push", push)
    deployment, _ = prepare(machine.settings, machine.deployment(), with_push=True)
    assert pushed == [IMAGE.name]
    assert deployment.container.image == f"{IMAGE.name}@sha256:{'1' * 64}"


# --- destroy ----------------------------------------------------------------------------------------------------------


def test_destroy_deletes_deployment_and_models(machine):
    machine.deploy()
    machine.change_model()
    live = machine.deploy()
    code, out, _ = machine.run("destroy", DRY_RUN="1")
    resources = [f"deployment {live.id}, active", *(f"model {model}" for model in reversed(machine.cloud.models))]
    assert (code, out.splitlines()) == (0, [f"would delete  {resource}" for resource in resources])
    assert states(machine.cloud.deployments) == ["ACTIVE"]
    code, out, _ = machine.run("destroy")
    assert (code, out.splitlines()) == (0, [f"deleting  {resource}" for resource in resources])
    assert states(machine.cloud.deployments) == ["DELETED"]
    assert states(machine.cloud.models) == ["DELETED"] * 2
    code, out, _ = machine.run("destroy")
    assert (code, out) == (0, "ocid1.compartment.oc1..tests has nothing of triton-transformers\n")
    assert machine.deploy().lifecycle_state == "ACTIVE"


@pytest.mark.slow
@pytest.mark.parametrize("hanging_request", ["GET .*/workRequests/[^/]+$", "DELETE .*/models"])
def test_killed_destroy_is_continued(machine, hanging_request):
    machine.deploy()
    with machine.hanging_command("destroy", hanging_request) as command:
        command.kill()
    destroy(machine.usual_service, machine.deployment())
    assert states(machine.cloud.deployments) + states(machine.cloud.models) == ["DELETED"] * 2


# --- refusals of the service ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_pattern", "status", "code", "message"),
    [
        ("POST .*/models$", 401, "NotAuthenticated", "Oracle Cloud rejects the signature (401)"),
        ("POST .*/models$", 404, "NotAuthorizedOrNotFound", "create model: not found, or you have no permission (404)"),
        ("POST .*/modelDeployments$", 409, "Conflict", "create model deployment: another operation is in the way (409"),
        ("POST .*/models$", 429, "TooManyRequests", "create model: too many requests (429), despite retries"),
        ("GET .*/models$", 500, "InternalServerError", "list models: Oracle Cloud failed (500)"),
        *[
            ("POST .*/modelDeployments$", 400, code, "create model deployment: your tenancy has reached a limit")
            for code in ("LimitExceeded", "QuotaExceeded", "OutOfHostCapacity")
        ],
        ("POST .*/models$", 400, "InvalidParameter", "refused the request (400 InvalidParameter): injected fault"),
    ],
)
def test_refusal_is_one_sentence(machine, request_pattern, status, code, message):
    machine.cloud.fault(request_pattern, status, code)
    with pytest.raises(UserError) as error, service_errors():
        machine.deploy()
    assert message in str(error.value)
    assert str(error.value).endswith("(opc-request-id TESTS/1/2)")
    assert "\n" not in str(error.value)


def test_sdk_retries_temporary_failures(machine):
    machine.cloud.fault("GET .*/modelDeployments$", 503, "ServiceUnavailable")
    machine.cloud.fault("POST .*/models$", 429, "TooManyRequests")
    code, out, err = machine.run("deploy")
    assert code == 0, out + err
    assert machine.cloud.faults == []
    assert len(machine.cloud.models) == len(machine.cloud.deployments) == 1


def test_shape_that_the_region_lacks_is_refused(machine):
    deployment = machine.deployment(instances__shape="VM.Standard.E0.Flex")
    shapes = r"Flex': must be one that us-ashburn-1 has: VM\.GPU\.A10\.1, VM\.Standard\.E4\.Flex$"
    with pytest.raises(UserError, match=shapes):
        check_shape(machine.usual_service, deployment)
    machine.cloud.fault("modelDeploymentShapes", 404)  # they may not be listed
    check_shape(machine.usual_service, deployment)


@pytest.mark.parametrize("name", ["deploy", "predict", "destroy"])
def test_unreachable_service_is_reported_at_once(machine, name):
    settings = {"account__config_file": machine.config_file, "models__systems": ["embedding"]}
    path = write_deployment(machine.folder, account__endpoint="http://127.0.0.1:1", **settings)
    code, _, err = machine.run(name, DEPLOYMENT=str(path), PROMPT="go")
    assert code == 1
    assert "http://127.0.0.1:1 does not answer (ConnectionError). Check the network" in err
    assert machine.cloud.received == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"SYSTEM": "gpt2_generate"}, "SYSTEM=gpt2_generate is not deployed: models.systems has own. Add it, and run"),
        ({"PROMPT": ""}, "Nothing to send. Set PROMPT="),
        ({"REQUEST": "request.json"}, "PROMPT and REQUEST are both set"),
        ({"OCI_ENDPOINT": "foo"}, "OCI_ENDPOINT=foo: must begin with https://"),
        ({"TOKENS": "many"}, "TOKENS=many: must be a whole number"),
        ({}, "SYSTEM=own takes tensors, not a PROMPT"),
    ],
)
def test_wrong_settings_of_predict_are_reported_before_any_request(machine, settings, message):
    code, _, err = machine.run("predict", **{"PROMPT": "go", **settings})
    assert (code, machine.cloud.received) == (1, [])
    assert message in err


def test_predict_reports_a_deployment_that_does_not_serve(machine):
    live = machine.deploy()
    request = machine.folder / "request.json"
    request.write_text('{"inputs": []}')
    for state, remedy in (("FAILED", "replaces it"), ("INACTIVE", "starts it"), ("CREATING", "waits for it")):
        machine.cloud.deployments[live.id]["lifecycleState"] = state
        code, _, err = machine.run("predict", REQUEST=str(request))
        assert f"triton-transformers is {state.lower()}. Run make deploy-oci: it {remedy}" in err
        assert code == 1
    # With an address, the command needs only the account.
    path = write_deployment(machine.folder, **dict.fromkeys(REQUIRED, ""), account__config_file=machine.config_file)
    url = f"{machine.cloud.url}/ocid1.x"
    code, _, err = machine.run("predict", OCI_ENDPOINT=url, REQUEST=str(request), DEPLOYMENT=str(path))
    assert (code, "or you have no permission (404)" in err) == (1, True)


def test_resource_principal_deploys(machine, monkeypatch):
    """Sign with a token that names its expiry, and with its key, as in a notebook session of OCI."""
    parts = ({"alg": "RS256"}, {"exp": int(time.time()) + 3600, "res_tenant": "ocid1.tenancy.oc1..tests"}, {})
    token = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    machine.cloud.config_file()
    for name, value in {
        "VERSION": "2.2",
        "RPST": token,
        "PRIVATE_PEM": (machine.folder / "key.pem").read_text(),
        "REGION": "us-ashburn-1",
    }.items():
        monkeypatch.setenv(f"OCI_RESOURCE_PRINCIPAL_{name}", value)
    account = Account(auth="resource_principal", config_file="/nowhere", endpoint=machine.cloud.url)
    live = roll_out(machine.service(account), machine.deployment(), machine.artifact())
    assert live.lifecycle_state == "ACTIVE"
